"""FedLIT: types of edges, their matching and the network, by hand and against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedlit import (
    CENTROIDS,
    FedLITNet,
    assign_types,
    average_types,
    edge_vectors,
    first_centroids,
    in_order,
    match_types,
    move_centroids,
    undirected,
)
from flower_fgl.methods.fedlit import FedLITSettings
from flower_fgl.nn import GraphInput, num_parameters

EDGES = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4)]
"""Node 5 has no edge."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0, **settings: Any) -> FedLITNet:
    sizes: dict[str, Any] = {
        "model": "gcn", "num_features": 4, "num_outputs": 2, "width": 8,
        "num_layers": 2, "dropout": 0.0,
    }  # fmt: skip
    sizes |= {name: settings.pop(name) for name in set(sizes) & set(settings)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FedLITNet(FedLITSettings(**settings), **sizes)


def graph() -> GraphInput:
    ends = torch.tensor(EDGES).T
    x = torch.randn(6, 4, generator=generator(1))
    return GraphInput(x, torch.cat([ends, ends.flip(0)], dim=1))


def test_an_edge_has_the_vectors_of_its_ends() -> None:
    h = torch.tensor([[1.0, 2.0], [5.0, -1.0]])
    ends = undirected(torch.tensor([[1, 0, 1], [0, 1, 1]]))
    assert ends.tolist() == [[0], [1]]
    assert edge_vectors(h, ends, edge="ordered").tolist() == [[1, 2, 5, -1]]
    assert edge_vectors(h, ends, edge="symmetric").tolist() == [[6, 1, 4, 3]]
    # other numbers of the nodes change only the ordered vector
    flipped = [edge_vectors(h.flip(0), ends, edge=e) for e in ("ordered", "symmetric")]
    assert flipped[0].tolist() == [[5, -1, 1, 2]]
    assert flipped[1].tolist() == [[6, 1, 4, 3]]


def test_the_first_centroids_are_means_of_near_edges() -> None:
    edges = torch.tensor([[0.0, 0.0], [9.0, 1.0], [0.0, 1.0], [9.0, 0.0]])
    for seed in range(20):
        found, types = first_centroids(edges, 2, generator=generator(seed))
        # the second seed is far from the first one with probability 163 / 164 or more
        assert types[0] == types[2] != types[1] == types[3]
        assert found[types[0]].tolist() == [0.0, 0.5]
        assert found[types[1]].tolist() == [9.0, 0.5]
    torch.testing.assert_close(
        first_centroids(edges, 3, generator=generator(4)),
        first_centroids(edges, 3, generator=generator(4)),
    )


def test_too_few_edges_leave_centroids_of_zero() -> None:
    twice = torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    for seed in range(5):
        found, types = first_centroids(twice, 4, generator=generator(seed))
        assert types[0] == types[1] != types[2]
        assert sorted(found.abs().sum(1).tolist()) == [0, 0, 3, 3]
    found, types = first_centroids(twice[:0], 4, generator=generator())
    assert found.shape == (4, 2)
    assert not found.any()
    assert types.shape == (0,)


def test_edges_join_the_centroid_of_largest_cosine_which_then_moves() -> None:
    centroids = torch.tensor([[10.0, 0.0], [0.0, 0.1], [-1.0, -1.0]])
    edges = torch.tensor([[2.0, 1.0], [1.0, 2.0], [4.0, 0.0], [3.0, 3.0]])
    types = assign_types(edges, centroids)
    assert types.tolist() == [0, 1, 0, 0]  # the last one is equally near to two
    moved = move_centroids(edges, types, centroids)
    wanted = torch.tensor([[3.0, 4 / 3], [1.0, 2.0], [-1.0, -1.0]])
    torch.testing.assert_close(moved, wanted)  # the empty type keeps its centroid
    nothing = move_centroids(edges[:0], types[:0], centroids)
    assert torch.equal(nothing, centroids)


def test_the_matching_is_not_transposed() -> None:
    centres = torch.eye(3)
    own = centres[[1, 2, 0]] + 0.01
    every = torch.ones(3, dtype=torch.bool)
    assert match_types(own, every, centres) == [1, 2, 0]
    # what a reader of the transposed similarities gets
    assert match_types(centres, every, own) == [2, 0, 1]


def test_equal_cosines_go_to_the_first_type_and_centre() -> None:
    same, every = torch.ones(3, 2), torch.ones(3, dtype=torch.bool)
    assert match_types(same, every, same) == [0, 1, 2]
    own = torch.tensor([[1.0, 0.2], [1.0, 0.0], [0.0, 1.0]])
    centres = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, -5.0]])
    # types 1 and 2 are equal to a centre; type 0 gets the one that is left
    assert match_types(own, every, centres) == [2, 1, 0]
    # a type without edges gets what is left, though it is equal to centre 1
    assert match_types(own, torch.tensor([True, False, True]), centres) == [1, 2, 0]
    assert match_types(own, ~every, centres) == [0, 1, 2]


def test_an_order_and_its_inverse_give_the_state_back() -> None:
    model = network(types=3)
    state = model.state_dict()
    state[CENTROIDS] = torch.arange(48.0).view(3, 16)
    changed = in_order(state, [1, 2, 0])
    assert torch.equal(changed[CENTROIDS], state[CENTROIDS][[1, 2, 0]])
    for name in ("map.weight", "convs.1.lin.weight"):
        found = changed[f"encoder.channels.0.{name}"]
        assert torch.equal(found, state[f"encoder.channels.1.{name}"])
    for name, tensor in in_order(changed, [2, 0, 1]).items():
        assert torch.equal(tensor, state[name])


def test_types_are_averaged_over_the_clients_that_have_them() -> None:
    names = [f"encoder.channels.{m}.w" for m in range(3)]

    def state(*values: float) -> dict[str, Tensor]:
        rows = torch.tensor(values)[:, None].expand(3, 2)
        return dict(zip(names, rows * 10, strict=True)) | {CENTROIDS: rows}

    before = state(-1.0, -2.0, -3.0)
    states = [state(1.0, 2.0, 3.0), state(5.0, 6.0, 0.0)]
    # type 0: both; type 1: both, but one trains it; type 2: nobody
    sizes = torch.tensor([[[9, 1], [4, 0], [0, 0]], [[1, 1], [7, 1], [0, 0]]])
    found = average_types(states, sizes, before)
    assert found[CENTROIDS][:, 0].tolist() == [3.0, 4.0, -3.0]
    assert [found[name][0].item() for name in names] == [30.0, 60.0, -30.0]
    assert found.keys() == before.keys()


def slow_logits(model: FedLITNet, types: list[int]) -> Tensor:
    """Return the logits by loops over nodes and edges."""
    w, x = model.state_dict(), graph().x
    out = []
    h = [w["encoder.input.weight"] @ row + w["encoder.input.bias"] for row in x]
    totals = [torch.zeros(8) for _ in h]
    for m in range(len(model.centroids)):
        own = [e for e, t in zip(EDGES, types, strict=True) if t == m]
        start = f"encoder.channels.{m}"
        nodes = sorted({v for e in own for v in e})
        near = {v: [v, *(a + b - v for a, b in own if v in (a, b))] for v in nodes}
        z = {v: w[f"{start}.map.weight"] @ h[v] + w[f"{start}.map.bias"] for v in nodes}
        for layer in (0, 1):
            weight, bias = (
                w[f"{start}.convs.{layer}.{k}"] for k in ("lin.weight", "bias")
            )
            z = {
                v: sum(
                    (
                        weight @ z[u] / (len(near[u]) * len(near[v])) ** 0.5
                        for u in near[v]
                    ),
                    bias,
                ).relu()
                for v in nodes
            }
        for v in nodes:
            totals[v] = totals[v] + z[v]
    for total in totals:
        out.append(w["classifier.weight"] @ total + w["classifier.bias"])
    return torch.stack(out)


@pytest.mark.parametrize("count", [1, 3])
def test_the_network_against_loops(count: int) -> None:
    model = network(types=count).train()
    model.start_types(graph(), generator(2))
    logits = model(graph())
    assert model.assigned is not None
    types = model.assigned.tolist()
    assert len(set(types)) == count
    torch.testing.assert_close(logits, slow_logits(model, types))
    # a node without edges has the bias of the head only
    torch.testing.assert_close(logits[5], model.classifier.bias)  # type: ignore[arg-type]
    logits.square().sum().backward()
    slopes = {name: p.grad for name, p in model.named_parameters()}
    assert CENTROIDS not in slopes
    for start in ["encoder.input.", *(f"encoder.channels.{m}." for m in range(count))]:
        parts = [g for n, g in slopes.items() if n.startswith(start)]
        assert all(g is not None for g in parts)
        assert max(float(g.abs().max()) for g in parts if g is not None) > 1e-4


def test_only_training_moves_the_centroids() -> None:
    model = network(types=2, em_steps=2)
    start = torch.randn(2, 16, generator=generator(3))
    model.centroids.copy_(start)
    with torch.no_grad():
        h = model.first_map(graph())
    edges = edge_vectors(h, undirected(graph().edge_index), edge="ordered")
    model.eval()(graph())
    assert torch.equal(model.centroids, start)
    assert model.assigned is None
    model.train()(graph())
    wanted = start
    for _ in range(2):
        types = assign_types(edges, wanted)
        wanted = move_centroids(edges, types, wanted)
    torch.testing.assert_close(model.centroids, wanted)
    assert torch.equal(model.assigned, types)
    assert not torch.equal(wanted, start)


def test_the_number_of_parameters() -> None:
    model = network(num_features=200, num_outputs=3, width=64)
    assert num_parameters(model) == 62_979
    assert model.centroids.shape == (4, 128)
