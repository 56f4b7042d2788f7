"""Decoders and negatives of link prediction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import GraphInput, build_model
from flower_fgl.nn.link import (
    DotDecoder,
    MLPDecoder,
    draw_negatives,
    graph_sides,
    make_decoder,
    pair_codes,
)

PAIRS = torch.tensor([[0, 1, 2], [1, 2, 0]])


def test_the_dot_decoder_is_a_binary_cross_entropy_of_dot_products() -> None:
    z = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]])
    logits = DotDecoder()(z, PAIRS)
    scores = torch.tensor([1 * 0.5 - 2 * 1.0, 0.5 * 3.0, 3.0 * 1.0])
    torch.testing.assert_close(logits[:, 1], scores)
    y = torch.tensor([1, 0, 1])
    torch.testing.assert_close(
        F.cross_entropy(logits, y),
        F.binary_cross_entropy_with_logits(scores, y.float()),
    )


def test_the_mlp_decoder_ignores_the_direction_of_a_pair() -> None:
    torch.manual_seed(0)
    decoder, z = MLPDecoder(4), torch.randn(3, 4)
    torch.testing.assert_close(decoder(z, PAIRS), decoder(z, PAIRS.flip(0)))
    u, v = z[0], z[1]
    hidden = (decoder.hidden.weight @ (u * v) + decoder.hidden.bias).clamp(min=0)
    by_hand = (decoder.out.weight @ hidden + decoder.out.bias).squeeze()
    torch.testing.assert_close(decoder(z, PAIRS)[0, 1], by_hand)


@pytest.mark.parametrize("kind", ["dot", "mlp"])
@pytest.mark.parametrize("model", ["gcn", "graphsage", "gin:3x6", "sgc", "mlp"])
def test_every_backbone_predicts_pairs(model: str, kind: str) -> None:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graph = GraphInput(torch.randn(4, 3), edges)
    net = build_model(
        model, in_channels=3, hidden_channels=8, num_outputs=2, num_layers=2,
        dropout=0.0, link=kind,
    )  # fmt: skip
    logits = net(graph.with_pairs(PAIRS))
    assert logits.shape == (3, 2)
    z = net(graph)
    assert z.shape == (4, 6 if model == "gin:3x6" else 8)
    torch.testing.assert_close(logits, net.decoder(z, PAIRS))
    names = {name.split(".")[0] for name in net.state_dict()}
    assert ("decoder" in names) == (kind == "mlp")
    assert graph.pairs is None


@pytest.mark.parametrize("num_nodes", [8, 300])
def test_negatives_are_uniform_over_the_free_pairs(num_nodes: int) -> None:
    draw = torch.Generator().manual_seed(0)
    ring = torch.stack(
        [torch.arange(num_nodes), (torch.arange(num_nodes) + 1) % num_nodes]
    )
    known = pair_codes(ring, num_nodes)
    free = num_nodes * (num_nodes - 1) // 2 - num_nodes
    number = min(free, num_nodes) // 2
    drawn = torch.cat(
        [draw_negatives(known, num_nodes, number, draw) for _ in range(400)], 1
    )
    assert drawn.shape == (2, 400 * number)
    assert bool((drawn[0] < drawn[1]).all())
    found = pair_codes(drawn, num_nodes)
    assert not bool(torch.isin(found, known).any())
    each = draw_negatives(known, num_nodes, number, draw)
    assert len(torch.unique(pair_codes(each, num_nodes))) == number
    if num_nodes == 8:  # each of the 20 free pairs is drawn 80 times on average
        counts = torch.unique(found, return_counts=True)[1]
        assert len(counts) == free
        assert 40 < int(counts.min()) <= int(counts.max()) < 130


def test_fewer_free_pairs_than_asked_are_all_drawn() -> None:
    draw = torch.Generator().manual_seed(0)
    known = pair_codes(torch.triu_indices(5, 5, 1)[:, 2:], 5)
    assert draw_negatives(known, 5, 9, draw).shape == (2, 2)
    assert draw_negatives(known, 5, 0, draw).shape == (2, 0)


def cycle(num_nodes: int, first: int = 0) -> Tensor:
    nodes = torch.arange(num_nodes)
    return torch.stack([nodes, (nodes + 1) % num_nodes]) + first


def complete(rows: int, columns: int) -> Tensor:
    grid = torch.ones(rows, columns).nonzero().T
    return grid + torch.tensor([[0], [rows]])


def test_only_even_cycles_show_that_a_graph_has_sides() -> None:
    side, is_bipartite = graph_sides(complete(4, 5), 10)  # 20 - 9 + 1 = 12 cycles
    assert is_bipartite
    assert len(set(side[:4].tolist())) == len(set(side[4:9].tolist())) == 1
    assert len(set(side.tolist())) == 3  # the last node has no edge
    both = torch.cat([complete(4, 5), complete(4, 5).flip(0)], dim=1)
    assert graph_sides(both, 10)[1]
    # one edge within a side, two components of which one is odd, and a path
    odd = torch.cat([complete(4, 5), torch.tensor([[0], [1]])], dim=1)
    assert not graph_sides(odd, 9)[1]
    side, is_bipartite = graph_sides(torch.cat([complete(4, 5), cycle(3, 9)], 1), 12)
    assert not is_bipartite
    assert len(set(side[9:].tolist())) == 1
    path = torch.stack([torch.arange(50), torch.arange(1, 51)])
    side, is_bipartite = graph_sides(path, 51)
    assert not is_bipartite  # a forest has no cycle
    assert side[::2].unique().numel() == side[1::2].unique().numel() == 1
    # nine cycles of four nodes are too few, ten are enough
    for number in (9, 10):
        rings = torch.cat([cycle(4, 4 * i) for i in range(number)], dim=1)
        assert graph_sides(rings, 4 * number)[1] == (number == 10)
    assert not graph_sides(torch.empty(2, 0, dtype=torch.int64), 3)[1]


@pytest.mark.parametrize("number", [4, 9])
def test_negatives_between_sides_are_uniform_over_the_free_pairs(number: int) -> None:
    # sides {0, 1, 2} and {3, 4, 5, 6, 7}, and the node 8: 15 + 8 pairs, two are known
    side = torch.tensor([7, 7, 7, 2, 2, 2, 2, 2, 5])
    known = pair_codes(torch.tensor([[0, 4], [3, 1]]), 9)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.cat(
        [draw_negatives(known, 9, number, draw, side) for _ in range(400)], 1
    )
    assert drawn.shape == (2, 400 * number)
    assert bool((drawn[0] < drawn[1]).all())
    assert bool((side[drawn[0]] != side[drawn[1]]).all())
    found, counts = torch.unique(pair_codes(drawn, 9), return_counts=True)
    assert not bool(torch.isin(found, known).any())
    mean = 400 * number / 21
    assert len(found) == 21
    assert 0.6 * mean < int(counts.min()) <= int(counts.max()) < 1.4 * mean
    each = draw_negatives(known, 9, number, draw, side)
    assert len(torch.unique(pair_codes(each, 9))) == number
    assert draw_negatives(known, 9, 99, draw, side).shape == (2, 21)


def test_sides_of_very_unequal_size_have_enough_negatives() -> None:
    # of 5·10^9 pairs 2·10^5 are between the sides, of these three quarters are known
    edges = complete(2, 100_000)[:, :150_000]
    side, is_bipartite = graph_sides(edges, 100_002)
    assert is_bipartite
    known = pair_codes(edges, 100_002)
    draw = torch.Generator().manual_seed(0)
    for number in (10_000, 40_000):
        drawn = draw_negatives(known, 100_002, number, draw, side)
        assert drawn.shape == (2, number)
        assert bool((drawn[0] == 1).all())
        assert bool((drawn[1] > 50_001).all())


def test_the_decoder_of_edges_reads_both_ends_in_order_and_the_features() -> None:
    decoder = make_decoder("edge:3x2", 4)
    h = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    pairs, pair_x = (
        torch.tensor([[0, 3], [1, 2]]),
        torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
    )
    out = decoder(h, pairs, pair_x)
    for row, (u, v) in enumerate(pairs.T.tolist()):
        both = torch.cat([h[u], h[v], pair_x[row]])
        expected = decoder.out(decoder.hidden(both).relu())
        torch.testing.assert_close(out[row], expected)
    assert not torch.allclose(decoder(h, pairs.flip(0), pair_x), out)
    assert not torch.allclose(decoder(h, pairs, pair_x + 1), out)
    assert out.shape == (2, 3)
