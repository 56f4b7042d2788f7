"""The models of many clients on one graph, against one model after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flower_fgl.core.model_spec import TYPED
from flower_fgl.nn import MODELS, Backbone, GraphInput, build_model
from flower_fgl.nn.stacked import Ensemble

MakeGraph = Callable[..., GraphInput]


def clients(name: str, *, is_linear: bool = False) -> list[Backbone]:
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        network = build_model(
            name,
            in_channels=9,
            hidden_channels=8,
            num_classes=3,
            num_layers=3,
            dropout=0.5,
            has_linear_head=is_linear,
        )
        made.append(network.eval())
    return made


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", sorted({*MODELS} - {"gine", *TYPED}))
def test_an_ensemble_predicts_as_its_models(
    make_graph: MakeGraph, name: str, is_sparse: bool, is_linear: bool
) -> None:
    graph = make_graph(num_nodes=12, num_edges=20, is_sparse=is_sparse, num_isolated=2)
    models = clients(name, is_linear=is_linear)
    ensemble = Ensemble(models[0], [model.state_dict() for model in models])
    direct = torch.stack([model(graph) for model in models])
    torch.testing.assert_close(ensemble.predict(graph), direct, atol=1e-6, rtol=1e-5)
    h = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    heads = torch.stack([model.head(h, graph) for model in models])
    torch.testing.assert_close(ensemble.classify(h, graph), heads, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["gcn", "gamlp", "gat"])
def test_gradients_reach_the_features_and_no_weight(
    make_graph: MakeGraph, name: str
) -> None:
    plain = make_graph(num_nodes=12, num_edges=20)
    models = clients(name)
    ensemble = Ensemble(models[0], [model.state_dict() for model in models])
    weight = torch.randn(3, 12, 3, generator=torch.Generator().manual_seed(2))
    found = []
    for direct in (False, True):
        x = plain.x.clone().requires_grad_()
        graph = GraphInput(x, plain.edge_index)
        logits = (
            torch.stack([model(graph) for model in models])
            if direct
            else ensemble.predict(graph)
        )
        (weight * logits).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)
    assert all(parameter.requires_grad for parameter in models[0].parameters())


def test_dropout_is_off_and_the_template_keeps_its_mode(make_graph: MakeGraph) -> None:
    model = clients("gcn")[0].train()
    graph = make_graph(num_nodes=12, num_edges=20)
    ensemble = Ensemble(model, [model.state_dict()])
    assert torch.equal(ensemble.predict(graph), ensemble.predict(graph))
    assert model.training
