"""Graphs whose edges have weights from 0 to 1: a weight of 0 equals a removed edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.explanation import integrated_gradients
from flower_fgl.nn import GraphInput, build_model
from flower_fgl.nn.relations import Relations
from flower_fgl.nn.topology import Direction
from tests.nn.test_typed import build

N = 8
PAIRS = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6], [1, 2, 3, 4, 5, 2, 6, 1]])
KEPT = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1])
NODE_TYPE = torch.tensor([0, 0, 1, 0, 1, 1, 0, 1])
RELATION = torch.tensor([0, 1, 2, 0, 1, 0, 1, 0])


def graph_of(name: str, direction: Direction, edges: Tensor) -> GraphInput:
    """Return a graph with some of the pairs (E,), by number."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=draw)
    pairs = PAIRS[:, edges]
    both = torch.cat([pairs, pairs.flip(0)], dim=1)
    graph = GraphInput(x, both)
    if name.startswith("typed") or name == "rgcn":
        return graph.with_relations(Relations(NODE_TYPE, pairs, RELATION[edges]))
    if name == "gine" or direction != "both":
        features = torch.randn(8, 3, generator=draw)[edges, : 3 * (name == "gine")]
        return graph.with_messages(pairs, features)
    return graph


def edge_of(graph: GraphInput, direction: Direction) -> list[Tensor]:
    """Return the number of the pair of each message."""
    if graph.relations is not None:
        return [torch.arange(8)]
    if graph.messages is None:
        return [torch.arange(8).repeat(2)]
    found = []
    for way in graph.ways(direction):
        if way is not None:
            ends = way.index.sort(dim=0).values
            is_own = (ends[:, :, None] == PAIRS.sort(dim=0).values[:, None]).all(dim=0)
            found.append(is_own.long().argmax(dim=1))
    return found


CASES: list[tuple[str, Direction]] = [
    *((name, "both") for name in ("gcn", "graphsage", "gin", "gat", "sgc", "gine")),
    *((name, "separate") for name in ("gcn", "graphsage", "gine")),
    *((name, "forward") for name in ("gcn", "graphsage", "gine")),
    *((name, "both") for name in ("rgcn", "typed-graphsage", "typed-gine")),
]  # fmt: skip


def model_of(name: str, direction: Direction) -> Any:
    if name.startswith("typed") or name == "rgcn":
        return build(name).eval()
    reads = f"{direction}:{3 * (name == 'gine')}"
    torch.manual_seed(0)
    return build_model(
        name, in_channels=2, hidden_channels=16, num_outputs=3, num_layers=2,
        dropout=0.0, messages=reads if name == "gine" or direction != "both" else "",
    ).eval()  # fmt: skip


@pytest.mark.parametrize(("name", "direction"), CASES)
def test_a_weight_of_0_is_a_removed_edge_and_of_1_a_kept_one(
    name: str, direction: Direction
) -> None:
    model, every = model_of(name, direction), torch.arange(8)
    whole = graph_of(name, direction, every)
    of = edge_of(whole, direction)
    with torch.no_grad():
        full = model(whole.masked(torch.ones(8), of, direction))
        torch.testing.assert_close(full, model(whole))
        found = model(whole.masked(KEPT.float(), of, direction))
        due = model(graph_of(name, direction, KEPT.nonzero().flatten()))
        torch.testing.assert_close(found, due)
        assert not torch.allclose(found, full)


@pytest.mark.parametrize(("name", "direction"), CASES)
def test_attributions_of_all_edges_lead_from_none_to_all(
    name: str, direction: Direction
) -> None:
    model = model_of(name, direction)
    whole = graph_of(name, direction, torch.arange(8))
    of = edge_of(whole, direction)

    def score(mask: Tensor) -> Tensor:
        return model(whole.masked(mask, of, direction))[2].softmax(dim=0)[0]  # type: ignore[no-any-return]

    total = float(integrated_gradients(score, torch.ones(8)).sum())
    none, full = (float(score(w).detach()) for w in (torch.zeros(8), torch.ones(8)))
    assert total == pytest.approx(full - none, abs=0.01)
    assert abs(full - none) > 1e-4
