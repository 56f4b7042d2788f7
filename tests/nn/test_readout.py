"""Backbones that classify whole graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms import fedstar
from flower_fgl.client_apps.runtime.training import TrainingSet, train_epochs
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.model_spec import TYPED
from flower_fgl.methods.fedstar import FedStarSettings
from flower_fgl.nn import MODELS, Backbone, GraphInput, build_model, state_shapes
from tests.support.sparse import sparse

# gine reads features of edges, which these graphs lack: see test_gine.py
names = pytest.mark.parametrize("name", sorted({*MODELS} - {"gine", *TYPED}))
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)
Graphs = list[tuple[Tensor, Tensor]]
MapX = Callable[[Tensor], Tensor]


def build(name: str, *, dropout: float = 0.0, readout: bool | str = True) -> Backbone:
    torch.manual_seed(0)
    return build_model(
        name,
        in_channels=5,
        hidden_channels=8,
        num_outputs=3,
        num_layers=2,
        dropout=dropout,
        readout=readout,
    )


@pytest.fixture
def graphs(generator: torch.Generator) -> Graphs:
    """Six graphs of 1 to 7 nodes; the third and the one-node graph have no edges."""
    out = []
    for size in (4, 7, 3, 1, 5, 6):
        x = torch.rand(size, 5, generator=generator)
        edges = torch.randint(0, size, (2, 2 * size), generator=generator)
        edges = torch.cat([edges, edges.flip(0)], dim=1)
        edges = torch.unique(edges[:, edges[0] != edges[1]], dim=1)
        out.append((x, NO_EDGES if size == 3 else edges))
    return out


def unite(graphs: Graphs, to_x: MapX = Tensor.clone) -> GraphInput:
    sizes = torch.tensor([len(x) for x, _ in graphs])
    first = (sizes.cumsum(0) - sizes).tolist()
    edges = torch.cat(
        [e + start for (_, e), start in zip(graphs, first, strict=True)], dim=1
    )
    batch = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    return GraphInput(to_x(torch.cat([x for x, _ in graphs])), edges, batch=batch)


def one_by_one(model: Backbone, graphs: Graphs) -> Tensor:
    return torch.cat([model(unite([graph])) for graph in graphs])


@names
@pytest.mark.parametrize("to_x", [Tensor.clone, sparse])
def test_a_batch_gives_the_results_of_its_single_graphs(
    name: str, to_x: MapX, graphs: Graphs
) -> None:
    model = build(name).eval()
    out = model(unite(graphs, to_x))
    assert out.shape == (6, 3)
    torch.testing.assert_close(out, one_by_one(model, graphs), atol=1e-5, rtol=1e-5)


@names
def test_graphs_without_any_edge_are_classified(name: str, graphs: Graphs) -> None:
    bare = [(x, NO_EDGES) for x, _ in graphs]
    model = build(name).eval()
    out = model(unite(bare))
    assert out.isfinite().all()
    torch.testing.assert_close(out, one_by_one(model, bare), atol=1e-5, rtol=1e-5)


@names
@pytest.mark.parametrize("to_x", [Tensor.clone, sparse])
def test_selected_graphs_give_the_same_results_as_in_the_batch(
    name: str, to_x: MapX, graphs: Graphs
) -> None:
    model = build(name).eval()
    whole = unite(graphs, to_x)
    chosen = torch.tensor([4, 0, 3])
    part = whole.select(chosen)
    assert part.num_nodes == 5 + 4 + 1
    torch.testing.assert_close(model(part), model(whole)[chosen], atol=1e-5, rtol=1e-5)


def test_selected_edges_keep_their_weights(graphs: Graphs) -> None:
    plain = unite(graphs)
    weight = torch.arange(1.0, plain.edge_index.shape[1] + 1)
    whole = GraphInput(plain.x, plain.edge_index, weight, batch=plain.batch)
    chosen = torch.tensor([5, 1])
    model = build("gcn").eval()
    torch.testing.assert_close(
        model(whole.select(chosen)), model(whole)[chosen], atol=1e-5, rtol=1e-5
    )


@names
def test_every_parameter_of_a_readout_gets_a_gradient(
    name: str, graphs: Graphs
) -> None:
    model = build(name)
    model(unite(graphs)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert key.startswith(("encoder.", "classifier."))
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@names
def test_the_head_of_a_readout_is_a_linear_map_of_the_embedding(
    name: str, graphs: Graphs
) -> None:
    model = build(name).eval()
    shapes = state_shapes(model.classifier)
    assert shapes == {"weight": (3, 8), "bias": (3,)}
    whole = unite(graphs)
    h = model.embed(whole)
    assert h.shape == (6, 8)
    expected = h @ model.classifier.weight.t() + model.classifier.bias  # type: ignore[union-attr, operator]
    torch.testing.assert_close(model(whole), expected)


def test_gin_pools_by_sum_and_the_others_by_mean(graphs: Graphs) -> None:
    x, edges = graphs[1]
    # two copies of a graph in one: a sum doubles, a mean stays
    twice = (torch.cat([x, x]), torch.cat([edges, edges + len(x)], dim=1))
    for name in {*MODELS} - {"gine", *TYPED}:
        model = build(name).eval()
        once, double = model.embed(unite([(x, edges)])), model.embed(unite([twice]))
        factor = 2 if name == "gin" else 1
        torch.testing.assert_close(double, factor * once, atol=1e-5, rtol=1e-5)


@names
def test_a_readout_can_be_chosen(name: str, graphs: Graphs) -> None:
    whole = unite(graphs)
    own = build(name).eval()
    assert torch.equal(build(name, readout="default").eval()(whole), own(whole))
    sizes = torch.tensor([[len(x)] for x, _ in graphs])
    total, mean = (build(name, readout=how).eval() for how in ("sum", "mean"))
    assert torch.equal(total.embed(whole) / sizes, mean.embed(whole))
    assert own.pooling == ("sum" if name == "gin" else "mean")


def test_the_network_of_fedstar_takes_the_readout() -> None:
    sizes = {"num_features": 5, "num_outputs": 3, "width": 8, "num_layers": 2}
    for how, pooling in ((True, "sum"), ("default", "sum"), ("mean", "mean")):
        network = fedstar.FedStarNet(
            FedStarSettings(), model="gin", dropout=0.0, readout=how, **sizes
        )
        assert network.readout
        assert network.pooling == pooling


def test_an_unknown_readout_is_refused() -> None:
    with pytest.raises(ConfigError, match='readout must be "sum" or "mean", got "max"'):
        build("gin", readout="max")


def test_a_graph_without_nodes_pools_to_zero() -> None:
    batch = torch.tensor([0, 0, 2])
    graph = GraphInput(torch.ones(3, 5), NO_EDGES, batch=batch, num_graphs=4)
    for how in ("sum", "mean"):
        pooled = graph.pool(torch.ones(3, 2), how)
        assert pooled[[1, 3]].eq(0).all()
    assert graph.pool(torch.ones(3, 2), "sum")[0].tolist() == [2, 2]


def test_features_and_device_can_change_in_a_batch(graphs: Graphs) -> None:
    whole = unite(graphs)
    assert whole.with_features(torch.ones(whole.num_nodes, 2)).num_graphs == 6
    assert whole.to("cpu") is whole
    moved = whole.to("meta")
    assert moved.batch is not None
    assert moved.batch.device.type == "meta"


@names
def test_operators_of_a_batch_cached_in_evaluation_serve_training(
    name: str, graphs: Graphs
) -> None:
    model, whole = build(name), unite(graphs)
    with torch.inference_mode():
        model(whole)
        model(whole.select(torch.tensor([1, 4])))
    model(whole).sum().backward()
    model(whole.select(torch.tensor([4, 0]))).sum().backward()
    assert model.classifier.bias.grad.tolist() == [8, 8, 8]  # type: ignore[union-attr]


def test_single_graphs_and_batches_of_graphs_are_not_confused(graphs: Graphs) -> None:
    whole = unite(graphs)
    single = GraphInput(*graphs[0])
    assert (single.num_graphs, single.batch) == (1, None)
    with pytest.raises(ValueError, match="readout = False, batch of 6 graphs"):
        build("gin", readout=False)(whole)
    with pytest.raises(ValueError, match="readout = True, batch of no graphs"):
        build("gin")(single)
    with pytest.raises(
        DataError, match="Expected a batch of graphs, got a single graph"
    ):
        single.select(torch.tensor([0]))
    with pytest.raises(DataError, match="each of the 4 nodes"):
        GraphInput(*graphs[0], batch=torch.zeros(3, dtype=torch.int64))


def test_a_batch_of_graphs_passes_only_those_through_the_model(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = unite(graphs)
    data = TrainingSet(whole, torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2]))
    model = build("gin")
    seen: list[tuple[int, int]] = []
    forward = type(model).forward

    def spy(self: Backbone, graph: GraphInput) -> Tensor:
        seen.append((graph.num_graphs, graph.num_nodes))
        return forward(self, graph)

    monkeypatch.setattr(type(model), "forward", spy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_epochs(model, data, optimizer, epochs=1, batch_size=2)
    assert [count for count, _ in seen] == [2, 2, 2]
    assert sum(nodes for _, nodes in seen) == whole.num_nodes
    seen.clear()
    train_epochs(model, data, optimizer, epochs=1)
    assert seen == [(6, whole.num_nodes)]


@pytest.mark.parametrize("batch_size", [0, 2])
def test_training_learns_to_classify_graphs_with_edges(batch_size: int) -> None:
    ring = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]])
    graphs = [(torch.ones(3, 5), ring if k % 2 else NO_EDGES) for k in range(8)]
    data = TrainingSet(unite(graphs), torch.arange(8), torch.arange(8) % 2)
    model = build("gin")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = train_epochs(model, data, optimizer, epochs=60, batch_size=batch_size)
    assert loss < 0.1
