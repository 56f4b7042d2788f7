"""Networks of other libraries as backbones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import scipy.sparse
import torch
from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.datasets.transforms.canonical import csr_tensor
from flower_fgl.nn import MODELS, Backbone, GraphInput, build_model, state_shapes
from flower_fgl.nn.models import backbone_class
from flower_fgl.simulation.register import register

SIZES: dict[str, Any] = {
    "in_channels": 5,
    "hidden_channels": 8,
    "num_outputs": 3,
    "num_layers": 2,
    "dropout": 0.5,
}
EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


class Wide(nn.Module):
    """Returns more columns than it was asked for."""

    def __init__(self, *, hidden_channels: int, in_channels: int, **_: Any) -> None:
        super().__init__()
        self.map = nn.Linear(in_channels, hidden_channels + 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.map(x)


def test_a_network_of_pyg_embeds_and_a_linear_map_classifies() -> None:
    from torch_geometric.nn import GraphSAGE

    register(backbone=GraphSAGE, name="pyg-sage")
    torch.manual_seed(0)
    model = build_model("pyg-sage:3x16", **SIZES)
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "num_outputs"}
    direct = GraphSAGE(**{**sizes, "hidden_channels": 16, "num_layers": 3})
    x = torch.randn(3, 5)
    model.eval()
    direct.eval()
    expected = model.classifier(direct(x, EDGES))
    torch.testing.assert_close(model(GraphInput(x, EDGES)), expected)
    names = state_shapes(model)
    assert {name.partition(".")[0] for name in names} == {"encoder", "classifier"}
    assert names["classifier.weight"] == (3, 16)


def test_sparse_features_are_made_dense_once() -> None:
    register(backbone=lambda **sizes: Embed(**sizes), name="embed")
    model = build_model("embed", **SIZES).eval()
    x = torch.eye(3, 5)
    graph = GraphInput(csr_tensor(scipy.sparse.csr_matrix(x.numpy())), EDGES)
    torch.testing.assert_close(model(graph), model(GraphInput(x, EDGES)))
    assert graph.dense_features() is graph.dense_features()


class Embed(nn.Module):
    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.map = nn.Linear(in_channels, hidden_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.map(x)


def test_a_readout_pools_the_embeddings() -> None:
    register(backbone=Embed, name="embed")
    model = build_model("embed", **SIZES, readout=True).eval()
    x, batch = torch.randn(3, 5), torch.tensor([0, 0, 1])
    out = model(GraphInput(x, torch.empty(2, 0, dtype=torch.int64), batch=batch))
    nodes = model.encoder.map(x)
    pooled = torch.stack([nodes[:2].mean(0), nodes[2]])
    torch.testing.assert_close(out, model.classifier(pooled))


def test_building_without_weights_draws_no_number() -> None:
    register(backbone=Embed, name="embed")
    state = torch.get_rng_state()
    build_model("embed", **SIZES, initialise=False)
    assert torch.equal(torch.get_rng_state(), state)
    build_model("embed", **SIZES)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Wide, r"shape \(nodes, hidden_channels\) = \(3, 8\), got \(3, 9\)"),
        (lambda width: nn.Linear(5, width), "must take in_channels, hidden_channels"),
        (lambda **sizes: 3, r"must return a torch.nn.Module, got int"),
        (lambda **sizes: nn.BatchNorm1d(8), "num_batches_tracked is of torch.int64"),
    ],
)
def test_a_factory_that_does_not_fit_is_an_error(factory: Any, message: str) -> None:
    register(backbone=factory, name="odd")
    with pytest.raises(ConfigError, match=message):
        build_model("odd", **SIZES)(GraphInput(torch.randn(3, 5), EDGES))


class Growing(nn.Module):
    """Has one layer more each time."""

    made = 0

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        Growing.made += 1
        sizes = [in_channels] + [hidden_channels] * Growing.made
        self.maps = nn.Sequential(
            *(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.maps(x)


@pytest.mark.parametrize("initialise", [True, False])
def test_networks_with_other_weights_each_time_are_refused(initialise: bool) -> None:
    register(backbone=Growing, name="growing")
    with pytest.raises(
        ConfigError, match=r"other weights each time: encoder\.maps\.\d\.bias, "
    ):
        build_model("growing", **SIZES, initialise=initialise)


def test_errors_of_a_factory_name_where_it_comes_from() -> None:
    register(backbone=lambda **sizes: 3, name="odd")
    where = r'"odd" of flower_fgl\.register in this process must return a torch'
    with pytest.raises(ConfigError, match=where):
        build_model("odd", **SIZES)


def test_only_a_class_or_a_function_is_a_backbone() -> None:
    for thing in (nn.Linear(2, 2), "GCN"):
        with pytest.raises(ConfigError, match=r"subclass of flower_fgl\.nn"):
            register(backbone=thing, name="thing")


def test_weights_of_edges_are_refused() -> None:
    register(backbone=Embed, name="embed")
    graph = GraphInput(torch.randn(3, 5), EDGES, torch.ones(4))
    with pytest.raises(ConfigError, match="takes no weights of edges"):
        build_model("embed", **SIZES)(graph)


def test_a_subclass_of_backbone_is_used_as_it_is() -> None:
    class Mine(MODELS.own["gcn"]):  # type: ignore[name-defined,misc]
        pass

    assert backbone_class("mine", Mine) is Mine
    register(backbone=Mine, name="mine")
    model = build_model("mine:2x16", **SIZES)
    assert type(model) is Mine
    assert isinstance(model, Backbone)


def test_sizes_of_a_name_are_checked() -> None:
    register(backbone=Embed, name="embed")
    for name in ("embed:linear", "embed:2x8:k3"):
        with pytest.raises(ConfigError, match="embed"):
            build_model(name, **SIZES)
