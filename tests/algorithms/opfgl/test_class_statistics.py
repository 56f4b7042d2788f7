from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.opfgl import class_statistics as statistics
from flower_fgl.algorithms.opfgl.class_statistics import (
    ClassStatistics,
    class_statistics,
    merge_statistics,
    outside_shares,
    propagated_features,
)
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import SparseOperator

C, D = 4, 6


def of_list(*values: float) -> ClassStatistics:
    """Statistics of one class of one feature."""
    x = torch.tensor(values)[:, None]
    return class_statistics(x, torch.zeros(len(values), dtype=torch.int64), 1)


def merged(parts: list[ClassStatistics], denominator: str = "n-1") -> ClassStatistics:
    return merge_statistics(parts, denominator)


def merged_by_deviations(
    parts: list[ClassStatistics], denominator: str = "n-1"
) -> ClassStatistics:
    """Eq. (9) as printed: [Σ (N_k − 1) s_k² + Σ N_k (μ_k − μ)²] / q."""
    mean, variance = (
        torch.stack([getattr(p, name) for p in parts]).double()
        for name in ("mean", "variance")
    )
    count = torch.stack([p.count for p in parts])
    n = count.double()[..., None]
    centre = (n * mean).sum(dim=0) / n.sum(dim=0).clamp(min=1)
    squares = (n - 1).clamp(min=0) * variance + n * (mean - centre).square()
    owners = (count > 0).sum(dim=0) if denominator == "n-mc" else 1
    divisor = (count.sum(dim=0) - owners).clamp(min=1)
    return ClassStatistics(
        centre.float(),
        (squares.sum(dim=0) / divisor[:, None]).float(),
        count.sum(dim=0),
        torch.stack([p.labelled_count for p in parts]).sum(dim=0),
    )


@pytest.fixture
def samples(generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Features and classes of five clients; client 4 has no class 2, class 3 is rare."""
    made = []
    for client in range(5):
        classes = torch.randint(-1, 3, (60,), generator=generator)
        if client == 4:
            classes[classes == 2] = 1
        x = torch.randn(60, D, generator=generator) * 3 + client
        made.append((x, classes))
    made[0][1][:2] = 3
    return made


@pytest.fixture
def parts(samples: list[tuple[Tensor, Tensor]]) -> list[ClassStatistics]:
    return [class_statistics(x, c, C) for x, c in samples]


@pytest.mark.parametrize(
    # N = 5, μ = (1+2+3+10+12)/5 = 5.6; SS = 21.16+12.96+6.76+19.36+40.96 = 101.2
    ("denominator", "variance"),
    [("n-1", 101.2 / 4), ("n-mc", 101.2 / 3)],  # 25.3 and 33.73
)
@pytest.mark.parametrize("pool", [merged, merged_by_deviations])
def test_merging_two_clients_gives_the_hand_numbers(pool, denominator, variance):
    out = pool([of_list(1, 2, 3), of_list(10, 12)], denominator)
    assert int(out.count) == 5
    assert float(out.mean) == pytest.approx(5.6)
    assert float(out.variance) == pytest.approx(variance)


def test_the_merged_variance_is_that_of_the_pooled_sample(samples, parts):
    out = merged(parts)
    x = torch.cat([x for x, _ in samples])
    classes = torch.cat([c for _, c in samples])
    for c in range(C):
        pooled = x[classes == c]
        assert int(out.count[c]) == len(pooled)
        torch.testing.assert_close(out.mean[c], pooled.mean(dim=0))
        torch.testing.assert_close(out.variance[c], pooled.var(dim=0))


@pytest.mark.parametrize("denominator", ["n-1", "n-mc"])
def test_sums_give_what_deviations_give_in_any_order(denominator, parts):
    plain, found = (
        merged_by_deviations(parts, denominator),
        merged(parts[::-1], denominator),
    )
    torch.testing.assert_close(found.mean, plain.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.variance, plain.variance, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.count, plain.count)
    assert torch.equal(found.labelled_count, plain.labelled_count)


@pytest.mark.parametrize("denominator", ["n-1", "n-mc"])
def test_a_client_without_a_class_changes_nothing_for_it(denominator, parts):
    with_it, without = merged(parts, denominator), merged(parts[:4], denominator)
    assert int(parts[4].count[2]) == 0
    torch.testing.assert_close(with_it.mean[2], without.mean[2])
    torch.testing.assert_close(with_it.variance[2], without.variance[2])
    assert not torch.equal(with_it.mean[1], without.mean[1])


def test_a_large_mean_does_not_cancel_a_small_variance(generator):
    x = torch.randn(400, 3, generator=generator) * 0.1 + 1000
    halves = [class_statistics(h, h.new_zeros(200).long(), 1) for h in x.split(200)]
    # the means are rounded to 1000·2⁻²⁴ = 6e-5, which moves S2 − S1²/S0 consistently
    want = x.double().var(dim=0).float()
    torch.testing.assert_close(merged(halves).variance[0], want, rtol=1e-3, atol=0)


def test_class_statistics_are_those_of_a_slow_loop(samples, monkeypatch):
    monkeypatch.setattr(statistics, "ROWS", 7)
    x, classes = samples[0]
    out = class_statistics(x, classes, C)
    for c in range(C):
        rows = [x[i].tolist() for i in range(len(x)) if classes[i] == c]
        for j in range(D):
            mean = math.fsum(r[j] for r in rows) / len(rows)
            square = math.fsum((r[j] - mean) ** 2 for r in rows)
            assert float(out.mean[c, j]) == pytest.approx(mean, rel=1e-5, abs=1e-6)
            variance = square / (len(rows) - 1)
            assert float(out.variance[c, j]) == pytest.approx(variance, rel=1e-5)


def test_a_class_with_one_node_is_omitted(generator):
    x = torch.randn(4, 3, generator=generator)
    out = class_statistics(x, torch.tensor([0, 0, 1, -1]), 3)
    assert out.count.tolist() == out.labelled_count.tolist() == [2, 0, 0]
    assert not out.mean[1:].any()
    assert not out.variance[1:].any()


def test_reliable_nodes_count_but_are_not_labelled(generator):
    x = torch.randn(4, 3, generator=generator)
    own = torch.tensor([True, False, True, False])
    out = class_statistics(x, torch.tensor([0, 0, 0, -1]), 2, is_labelled=own)
    assert out.count.tolist() == [3, 0]
    assert out.labelled_count.tolist() == [2, 0]


def star(leaves: int, edges: list[tuple[int, int]]) -> SparseOperator:
    """Return Ã of a hub 0 with leaves, and further edges."""
    pairs = torch.tensor([(0, leaf) for leaf in range(1, leaves + 1)] + edges).T
    graph = GraphInput(
        torch.zeros(int(pairs.max()) + 1, 1), torch.cat([pairs, pairs.flip(0)], 1)
    )
    return graph.operator("normalised")  # type: ignore[return-value]


def test_a_hub_stands_out_in_the_statistics_of_its_leaves():
    classes = torch.full((9,), -1)
    classes[1:6] = 0  # five labelled leaves of eight
    shares = outside_shares(star(8, []), classes, 2, depth=1)
    assert shares.tolist() == [1.0, 0.0]
    # the second hop also reads the other three leaves
    two = outside_shares(star(8, []), classes, 2, depth=2)
    assert two.tolist() == [1.0, 0.0]
    # each leaf has a neighbour of its own as well: d̃ = 3 for leaves, 2 for those
    edges = [(leaf, 8 + leaf) for leaf in range(1, 9)]
    classes = torch.cat([classes, torch.full((8,), -1)])
    hub, other = 5 / math.sqrt(9 * 3), 1 / math.sqrt(2 * 3)
    expected = hub / (hub + 5 * other)
    assert outside_shares(
        star(8, edges), classes, 1, depth=1
    ).tolist() == pytest.approx([expected])
    assert outside_shares(star(8, []), classes[:9], 1, depth=0).tolist() == [0.0]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_propagated_features_are_concatenated(
    toy: NodeDataset, generator: torch.Generator, is_sparse: bool
) -> None:
    a = torch.rand(6, 6, generator=generator)
    row, column = a.nonzero().T
    operator = SparseOperator.from_entries(row, column, a[row, column], (6, 6))
    x = torch.rand(6, 3, generator=generator)
    given = SparseOperator.from_entries(
        *x.nonzero().T, x[tuple(x.nonzero().T)], (6, 3)
    ).matrix
    out = propagated_features(operator, given if is_sparse else x, 2)
    torch.testing.assert_close(out, torch.cat([x, a @ x, a @ a @ x], dim=1))


def test_no_hops_leave_the_features():
    eye = SparseOperator.from_entries(
        torch.arange(2), torch.arange(2), torch.ones(2), (2, 2)
    )
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(propagated_features(eye, x, 0), x)


def test_a_class_that_no_client_has_is_zero_in_both_forms():
    part = class_statistics(torch.rand(3, 2), torch.zeros(3).long(), 2)
    for out in (merged([part, part]), merged_by_deviations([part, part])):
        assert out.count.tolist() == [6, 0]
        assert not out.mean[1].any()
        assert not out.variance[1].any()
