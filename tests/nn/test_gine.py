"""GINE: messages with features of edges, and their directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import GINEConv

from flower_fgl.core.errors import ConfigError
from flower_fgl.nn import GraphInput, build_model, num_parameters, topology
from flower_fgl.nn.topology import Messages, edge_messages

H = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
INDEX = torch.tensor([[0, 1], [2, 2]])
X = torch.tensor([[2.0], [-1.0]])
SIZES: dict[str, Any] = {
    "in_channels": 177,
    "hidden_channels": 64,
    "num_outputs": 1,
    "num_layers": 3,
    "dropout": 0.0,
}


def linear(weight: list[list[float]], bias: list[float]) -> torch.nn.Linear:
    """Return a linear map with given numbers."""
    layer = torch.nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def random_graph(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features (6, 4), edges with repeats and self-loops, and their features."""
    drawn = torch.Generator().manual_seed(seed)
    index = torch.randint(6, (2, 30), generator=drawn)
    edge_x = torch.randn(30, 2, generator=drawn)
    return torch.randn(6, 4, generator=drawn), index, edge_x


def simple(index: torch.Tensor) -> torch.Tensor:
    """Return both directions of the edges, without repeats and self-loops."""
    both = torch.cat([index, index.flip(0)], dim=1)
    return torch.unique(both[:, both[0] != both[1]], dim=1)


def model_and_graph(direction: str, **settings: Any) -> tuple[Any, GraphInput]:
    """Return a small network and a graph with features of edges."""
    x, index, edge_x = random_graph()
    model = build_model(
        "gine:2x5",
        **SIZES | {"in_channels": 4, "num_outputs": 3} | settings,
        messages=f"{direction}:2",
    )
    return model.eval(), GraphInput(x, simple(index)).with_messages(index, edge_x)


def test_each_direction_gives_the_numbers_computed_by_hand() -> None:
    layer = linear([[1.0], [-1.0]], [0.0, 0.5])
    back = linear([[0.0], [1.0]], [0.0, 0.0])
    edges = Messages(INDEX, X)

    forward = H + edge_messages(H, edges.ways("forward").first, layer)
    both = H + edge_messages(H, edges.ways("both").first, layer)
    first, second = edges.ways("separate")
    assert second is not None
    separate = H + edge_messages(H, first, layer) + edge_messages(H, second, back)

    # ReLU(1 + 2, 0 - 1.5) = (3, 0) and ReLU(0 - 1, 1 + 1.5) = (0, 2.5) arrive at node 2
    assert forward.tolist() == [[1.0, 0.0], [0.0, 1.0], [4.0, 3.5]]
    assert both.tolist() == [[4.0, 0.0], [0.0, 3.5], [4.0, 3.5]]
    assert separate.tolist() == [[2.0, 3.0], [1.0, 1.0], [4.0, 3.5]]


@pytest.mark.parametrize("direction", ["forward", "separate"])
def test_a_layer_equals_that_of_pyg(direction: str) -> None:
    model, graph = model_and_graph(direction)
    x, index, edge_x = random_graph()
    encoder = model.encoder
    h = encoder["input"](x)
    for number in range(2):
        h = h.relu() if number else h
        total = h
        names = ["edges", "edges_back"] if direction == "separate" else ["edges"]
        for name, ends in zip(names, (index, index.flip(0)), strict=False):
            conv = GINEConv(torch.nn.Linear(5, 5), edge_dim=2, eps=-1.0)
            conv.nn, conv.lin = torch.nn.Identity(), encoder[name][number]
            total = total + conv(h, ends, edge_x)
        h = encoder["mlps"][number](total)
    torch.testing.assert_close(model(graph), model.classifier(h.relu()))


def test_both_directions_of_a_file_that_lists_them_are_not_doubled() -> None:
    once = Messages(
        torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([[1.0], [1.0], [2.0]])
    )
    twice = Messages(
        torch.tensor([[0, 1, 0, 1, 1], [1, 0, 1, 0, 1]]),
        torch.tensor([[1.0], [1.0], [1.0], [1.0], [2.0]]),
    )
    other = Messages(torch.tensor([[0, 1], [1, 0]]), torch.tensor([[1.0], [3.0]]))

    for edges in (once, twice):
        both = edges.ways("both").first
        # the edge from node 1 to itself stays one
        assert sorted(both.index.T.tolist()) == [[0, 1], [0, 1], [1, 0], [1, 0], [1, 1]]
    found = other.ways("both").first
    assert found.index.shape == (2, 4)  # two edges with other features each
    ahead = found.index[0] == 0
    assert found.x[ahead].flatten().sort().values.tolist() == [1.0, 3.0]
    assert found.x[~ahead].flatten().sort().values.tolist() == [1.0, 3.0]


def test_edges_that_are_all_listed_in_both_directions_are_held_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = torch.combinations(torch.arange(9)).T
    x = torch.rand(pairs.shape[1], 3, generator=torch.Generator().manual_seed(0))
    edges = Messages(torch.cat([pairs, pairs.flip(0)], dim=1), torch.cat([x, x]))
    whole = topology._hash_rows(edges.index.T, edges.x)
    monkeypatch.setattr(topology, "HASHED_AT_ONCE", 35)  # seven rows of five numbers
    assert torch.equal(topology._hash_rows(edges.index.T, edges.x), whole)
    assert edges.ways("both").first is edges
    changed = Messages(
        edges.index, edges.x + (edges.index[0] < edges.index[1])[:, None]
    )
    assert changed.ways("both").first.index.shape == (2, 4 * pairs.shape[1])
    again = torch.cat([edges.index, edges.index], dim=1), torch.cat([edges.x, edges.x])
    assert Messages(*again).ways("both").first.index.shape == (2, 4 * pairs.shape[1])


@pytest.mark.parametrize("direction", ["both", "separate", "forward"])
def test_the_order_of_edges_changes_nothing(direction: str) -> None:
    model, graph = model_and_graph(direction)
    _, index, edge_x = random_graph()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    other = graph.with_messages(index[:, order], edge_x[order])
    torch.testing.assert_close(model(other), model(graph), atol=1e-6, rtol=1e-6)


def test_without_edge_weights_later_layers_are_those_of_gin_on_the_multigraph() -> None:
    model, graph = model_and_graph("both")
    for layer in model.encoder["edges"]:
        torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    h = model.encoder["input"](graph.x)
    source, target = graph.ways("both").first.index
    for number, mlp in enumerate(model.encoder["mlps"]):
        h = h.relu() if number else h
        sent = h.relu() if number == 0 else h  # only the input has negative entries
        h = mlp(h + torch.zeros_like(h).index_add(0, target, sent[source]))
    assert bool((model.encoder["input"](graph.x) < 0).any())
    torch.testing.assert_close(model(graph), model.classifier(h.relu()))


def test_parts_of_a_large_sum_give_the_same_result_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, graph = model_and_graph("separate")
    whole = model(graph)
    whole.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(topology, "MOST_NUMBERS", 5 * 7)  # 7 of 30 edges at once
    parts = model(graph)
    parts.sum().backward()
    torch.testing.assert_close(parts, whole)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_every_weight_has_a_gradient() -> None:
    model, graph = model_and_graph("separate")
    model(graph).square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())


@pytest.mark.parametrize(
    ("direction", "number"), [("both", 42_369), ("separate", 48_321)]
)
def test_the_number_of_parameters(direction: str, number: int) -> None:
    model = build_model("gine", **SIZES, readout=True, messages=f"{direction}:30")
    assert num_parameters(model) == number


@pytest.mark.parametrize("direction", ["both", "separate", "forward"])
def test_graphs_of_a_batch_give_the_same_logits_as_alone(direction: str) -> None:
    model, _ = model_and_graph(direction, readout=True)
    parts = [random_graph(seed) for seed in range(3)]
    shift = [6 * number for number in range(3)]
    index = torch.cat([p[1] + s for p, s in zip(parts, shift, strict=True)], dim=1)
    x, edge_x = torch.cat([p[0] for p in parts]), torch.cat([p[2] for p in parts])
    order = torch.randperm(90, generator=torch.Generator().manual_seed(2))
    batch = torch.arange(3).repeat_interleave(6)
    union = GraphInput(x, simple(index), batch=batch).with_messages(
        index[:, order], edge_x[order]
    )
    whole = model(union)
    for chosen in ([2], [2, 0], [1, 2, 0]):
        part = union.select(torch.tensor(chosen))
        torch.testing.assert_close(model(part), whole[chosen])


def test_missing_features_or_edges_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs features of edges"):
        build_model("gine", **SIZES)
    model, graph = model_and_graph("both")
    with pytest.raises(ValueError, match="with_messages"):
        model(GraphInput(graph.x, graph.edge_index))


def test_edges_are_optional_for_a_graph() -> None:
    model, graph = model_and_graph("separate")
    alone = graph.with_messages(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, 2))
    assert bool(model(alone).isfinite().all())
