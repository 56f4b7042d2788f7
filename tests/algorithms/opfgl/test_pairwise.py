from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.opfgl import pairwise
from flower_fgl.algorithms.opfgl.pairwise import pair_scores, smoothness_loss

S, H, W, D = 5, 4, 3, 6


@pytest.fixture(params=[1, 40, 2**18])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, of two rows, of everything."""
    monkeypatch.setattr(pairwise, "BLOCK", request.param)


@pytest.fixture
def layer(generator: torch.Generator) -> list[Tensor]:
    shapes = [(S, H), (S, H), (W, H), (W,), (W,), (W,)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_()
        for s in shapes
    ]


@pytest.fixture
def graph(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(S, D, generator=generator, dtype=torch.float64).requires_grad_()
    upper = torch.rand(S, S, generator=generator, dtype=torch.float64).triu(1)
    return x, (upper + upper.T).requires_grad_()


def slow_scores(
    left: Tensor, right: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    head: Tensor,
) -> Tensor:  # fmt: skip
    lower = (left[:, None] + right).relu().flatten(0, 1) @ weight.T
    upper = F.batch_norm(lower, None, None, scale, shift, training=True).relu()
    return (upper @ head).view(len(left), len(left))


def slow_similarity(x: Tensor, weight: Tensor) -> Tensor:
    total = x.new_zeros(())
    for i in range(len(x)):
        for j in range(len(x)):
            kappa = torch.exp(-(x[i] - x[j]).square() / 2).mean()
            total = total + weight[i, j] * kappa
    return total / weight.sum()


def test_blocks_are_larger_on_another_device_than_in_a_cpus_cache() -> None:
    def number(device: str) -> int:
        # the pairs of 240 pseudo-nodes at width 128, as on Cora with node-share
        return len(list(pairwise._blocks(240, 240 * 128, torch.device(device))))

    assert number("cpu") == 60  # 4 rows of 30,720 numbers each
    assert number("meta") == 1  # 29 MB: one product


@pytest.mark.usefixtures("block")
def test_scores_and_their_gradients_are_those_of_torch(layer: list[Tensor]) -> None:
    got, want = pair_scores(*layer), slow_scores(*layer)
    torch.testing.assert_close(got, want)
    pull = torch.randn(
        S, S, dtype=got.dtype, generator=torch.Generator().manual_seed(1)
    )
    for mine, theirs in zip(
        torch.autograd.grad(got, layer, pull),
        torch.autograd.grad(want, layer, pull),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("wanted", [(0, 1), (2, 3, 4, 5)])
def test_scores_give_the_same_gradients_for_a_subset_of_inputs(
    layer: list[Tensor], wanted: tuple[int, ...]
) -> None:
    whole = torch.autograd.grad(pair_scores(*layer).square().sum(), layer)
    fixed = [t if i in wanted else t.detach() for i, t in enumerate(layer)]
    part = torch.autograd.grad(
        pair_scores(*fixed).square().sum(), [fixed[i] for i in wanted]
    )
    for i, got in zip(wanted, part, strict=True):
        torch.testing.assert_close(got, whole[i])


@pytest.mark.usefixtures("block")
def test_similarity_and_its_gradients_are_those_of_a_slow_loop(
    graph: tuple[Tensor, Tensor],
) -> None:
    got, want = smoothness_loss(*graph), slow_similarity(*graph)
    torch.testing.assert_close(got, want)
    mine, theirs = torch.autograd.grad(got, graph), torch.autograd.grad(want, graph)
    torch.testing.assert_close(mine[0], theirs[0])
    off = 1 - torch.eye(S, dtype=got.dtype)  # the diagonal of A is zero by construction
    torch.testing.assert_close(mine[1] * off, theirs[1] * off)


def test_a_graph_without_edges_has_no_similarity(graph: tuple[Tensor, Tensor]) -> None:
    x, weight = graph[0], torch.zeros(S, S, dtype=torch.float64, requires_grad=True)
    value = smoothness_loss(x, weight)
    assert float(value.detach()) == 0
    assert all(not g.any() for g in torch.autograd.grad(value, (x, weight)))


def test_a_single_pair_has_scores_and_gradients(generator: torch.Generator) -> None:
    ends = torch.randn(2, 1, H, generator=generator).requires_grad_()
    weight = torch.randn(W, H, generator=generator)
    shift = torch.tensor([1.0, -1.0, 2.0])
    head = torch.tensor([1.0, 5.0, 10.0])
    out = pair_scores(ends[0], ends[1], weight, torch.ones(W), shift, head)
    # one pair is its own mean: ReLU(shift)·head = 1 + 0 + 20, up to rounding that
    # 1/√ε = 316 enlarges
    assert float(out.detach()) == pytest.approx(21, abs=1e-2)
    (to_ends,) = torch.autograd.grad(out.sum(), ends)
    assert to_ends.isfinite().all()
