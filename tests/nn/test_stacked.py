from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.model_spec import TYPED
from flower_fgl.nn import MODELS, Backbone, GraphInput, build_model
from flower_fgl.nn.message_passing import GCN
from flower_fgl.nn.sparse import lay_out_for_sparse
from flower_fgl.nn.stacked import (
    DescendingInput,
    Descent,
    Ensemble,
    Ragged,
    StackedInput,
    can_stack,
    map_each,
    pad_rows,
    split_state,
    stack_model,
)

MakeGraph = Callable[..., GraphInput]

STACKED = ["gamlp", "gcn", "gin", "graphsage", "mlp", "sgc", "ssgc"]

SIZES = (12, 5, 9, 1)


def build(name: str, seed: int = 0, **changes: Any) -> Backbone:
    sizes: dict[str, Any] = {
        "messages": "both:2",
        "in_channels": 9,
        "hidden_channels": 8,
        "num_outputs": 3,
        "num_layers": 3,
        "dropout": 0.5,
    }
    torch.manual_seed(seed)
    return build_model(name, **(sizes | changes))


def graphs(make_graph: MakeGraph, *, is_sparse: bool) -> list[GraphInput]:
    return [
        make_graph(num_nodes=size, num_edges=2 * size, is_sparse=is_sparse, seed=k,
                   num_isolated=min(2, size - 1))
        for k, size in enumerate(SIZES)
    ]  # fmt: skip


class PerClient:
    """Uniform numbers of each client from its own generator, as in one-by-one training."""

    def __init__(self) -> None:
        self.generators = [
            torch.Generator().manual_seed(100 + k) for k in range(len(SIZES))
        ]

    def __call__(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for k, (g, size) in enumerate(zip(self.generators, SIZES, strict=True)):
            out[k, :size] = torch.rand(size, h.shape[2], generator=g)
        return out


def test_the_list_of_stackable_backbones() -> None:
    assert [n for n in MODELS if n not in TYPED and can_stack(build(n))] == STACKED


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_equals_its_clients_one_by_one(
    make_graph: MakeGraph, name: str, is_sparse: bool, is_linear: bool
) -> None:
    parts = graphs(make_graph, is_sparse=is_sparse)
    models = [build(name, seed=k, has_linear_head=is_linear) for k in range(len(SIZES))]
    if is_sparse:
        for model in models:
            lay_out_for_sparse(model, 9)
    stacked = stack_model(models[0], [m.state_dict() for m in models], len(models))
    stacked.uniform = PerClient()
    whole = StackedInput(parts)
    labels = [torch.arange(size) % 3 for size in SIZES]
    target = pad_rows(labels, max(SIZES))
    logits = stacked.train()(whole)
    torch.where(
        whole.real, F.cross_entropy(logits.mT, target, reduction="none"), 0
    ).sum().backward()
    weights = dict(stacked.named_parameters())
    for k, (model, part, size) in enumerate(zip(models, parts, SIZES, strict=True)):
        torch.manual_seed(100 + k)
        alone = model.train()(part)
        torch.testing.assert_close(logits[k, :size], alone, atol=1e-6, rtol=1e-5)
        F.cross_entropy(alone, labels[k], reduction="sum").backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            found = weights[key].grad
            assert found is not None
            assert weights[key][k].stride() == parameter.stride()
            torch.testing.assert_close(found[k], parameter.grad, atol=1e-5, rtol=1e-4)
    stacked.eval()
    with torch.inference_mode():
        for k, (model, part, size) in enumerate(zip(models, parts, SIZES, strict=True)):
            torch.testing.assert_close(
                stacked(whole)[k, :size], model.eval()(part), atol=1e-6, rtol=1e-5
            )


def test_a_failing_client_leaves_the_others_alone(make_graph: MakeGraph) -> None:
    parts = graphs(make_graph, is_sparse=False)
    model = build("gcn")
    states = [dict(model.state_dict()) for _ in parts]
    states[1] = {name: torch.full_like(t, torch.nan) for name, t in states[1].items()}
    stacked = stack_model(model, states, len(parts)).eval()
    logits = stacked(StackedInput(parts))
    assert logits[1].isnan().all()
    assert logits[[0, 2, 3]].isfinite().all()
    logits[:, 0, 0].sum().backward()
    grad = stacked.get_parameter("encoder.0.lin.weight").grad
    assert grad is not None
    assert grad[[0, 2, 3]].isfinite().all()


def test_a_subclass_must_declare_that_it_stacks() -> None:
    class Other(GCN):
        def head(self, h: Tensor, graph: GraphInput) -> Tensor:
            return h

    sizes = {"in_channels": 2, "hidden_channels": 4, "num_outputs": 2, "num_layers": 2}
    assert can_stack(GCN(**sizes, dropout=0.0))  # type: ignore[arg-type]
    assert not can_stack(Other(**sizes, dropout=0.0))  # type: ignore[arg-type]
    assert not can_stack(GCN(**sizes, dropout=0.0, readout=True))  # type: ignore[arg-type]


def test_a_stack_refuses_edge_weights(make_graph: MakeGraph) -> None:
    graph = make_graph()
    weight = torch.ones(graph.edge_index.shape[1])
    with pytest.raises(ValueError, match="edge weights"):
        StackedInput([graph, graph.with_edges(graph.edge_index, weight)])


def test_ragged_rows_are_padded_with_the_first_of_their_client() -> None:
    ragged = Ragged([2, 3, 1], torch.device("cpu"))
    assert ragged.index.tolist() == [[0, 1, 0], [2, 3, 4], [5, 5, 5]]
    values = torch.arange(12.0).view(2, 6)
    assert torch.equal(ragged.flat(values[:, ragged.index]), values)
    assert Ragged([1, 0], torch.device("cpu")).slots.tolist() == [0]


def test_states_are_split_and_stacked_again() -> None:
    states = [build("gin", seed=k).state_dict() for k in range(3)]
    model = stack_model(build("gin"), states, 3)
    for state, found in zip(states, split_state(model.state_dict(), 3), strict=True):
        assert state.keys() == found.keys()
        assert all(torch.equal(state[name], found[name]) for name in state)
    shared = stack_model(build("gin"), states[1], 2)
    for found in split_state(shared.state_dict(), 2):
        assert all(torch.equal(states[1][name], found[name]) for name in found)
    assert split_state({}, 2) == [{}, {}]


def clients(name: str, *, is_linear: bool = False) -> list[Backbone]:
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        network = build_model(
            name,
            in_channels=9,
            hidden_channels=8,
            num_outputs=3,
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


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_of_stacked_weights_have_their_layout(
    is_turned: bool, has_bias: bool
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 4, dtype=torch.float64)
    if is_turned:
        weight = weight.mT.contiguous().mT
    weight.requires_grad_()
    bias = (
        torch.randn(3, 2, dtype=torch.float64, requires_grad=True) if has_bias else None
    )
    inputs = (rows, weight, bias) if bias is not None else (rows, weight)
    found = map_each(rows, weight.mT, bias)
    slow = torch.stack(
        [
            F.linear(rows[k], weight[k], None if bias is None else bias[k])
            for k in range(3)
        ]
    )
    torch.testing.assert_close(found, slow)
    slope = torch.randn_like(slow)
    got = torch.autograd.grad(found, inputs, slope)
    for one, other in zip(got, torch.autograd.grad(slow, inputs, slope), strict=True):
        torch.testing.assert_close(one, other)
    assert got[1].stride() == weight.stride()
    assert torch.autograd.gradcheck(
        lambda *t: map_each(t[0], t[1].mT, *(t[2:] or (None,))), inputs
    )
    assert torch.autograd.gradgradcheck(
        lambda *t: map_each(t[0], t[1].mT, *(t[2:] or (None,))), inputs
    )


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", ["gcn", "gin", "graphsage", "mlp"])
def test_a_backward_pass_that_descends_takes_the_step_of_sgd(
    name: str, is_sparse: bool, make_graph: MakeGraph
) -> None:
    inputs = StackedInput(graphs(make_graph, is_sparse=is_sparse))
    template = build(name, dropout=0.0, has_linear_head=True)
    assert template.reach
    models = [
        stack_model(template, template.state_dict(), len(SIZES)) for _ in range(2)
    ]
    used = torch.tensor([[3, 11], [4, 0], [1, 8], [0, 5]])  # of sizes 12, 5, 9, 1
    slope = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    slope[3, 1] = 0  # a row of padding
    few = used + inputs.num_rows * torch.arange(4)[:, None]
    descending = DescendingInput(inputs, used, template.reach, Descent(0.1, 0.2))
    for model, graph in zip(models, (inputs, descending), strict=True):
        weights = model.encoder.parameters()
        optimizer = torch.optim.SGD(weights, lr=0.1, weight_decay=0.2)
        h = model.represent(graph)
        h.flatten(0, 1)[few].backward(slope)
        optimizer.step()
    expected, found = (model.state_dict() for model in models)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=key)
        start = template.state_dict()[key]
        assert key.startswith("classifier") or not torch.equal(value[0], start), key
