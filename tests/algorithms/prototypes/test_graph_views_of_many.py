"""The terms of FGGP of many clients equal those of each client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes import graph_views
from flower_fgl.algorithms.prototypes.graph_views import (
    edge_loss,
    union_pairs,
    view_contrast,
)

SIZES = [6, 4, 1, 2]
P = 3


def clients() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return embeddings with padding, the real rows, and each client's pairs."""
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(len(SIZES), max(SIZES), P, generator=draw)
    real = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    edges = [torch.randint(n, (2, 2 * n), generator=draw) for n in SIZES]
    edges[3] = torch.tensor([[0], [1]])  # all pairs are edges
    pairs = [union_pairs(n, e) for n, e in zip(SIZES, edges, strict=True)]
    return h.requires_grad_(), real, pairs


@pytest.mark.parametrize("block", [1 << 22, 80, 10])
def test_edge_losses_and_gradients_equal_those_of_each_client(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # blocks of all clients, of two clients, and of less than one
    monkeypatch.setattr(graph_views, "BLOCK", block)
    h, real, pairs = clients()
    flat = torch.cat([p + k * max(SIZES) for k, p in enumerate(pairs)], dim=1)
    client = torch.tensor([k for k, p in enumerate(pairs) for _ in range(p.shape[1])])
    found = edge_loss(h, flat, client, real)
    alone = [
        edge_loss(
            rows[None, :n],
            p,
            torch.zeros_like(p[0]),
            torch.ones(1, n, dtype=torch.bool),
        )
        for rows, n, p in zip(h, SIZES, pairs, strict=True)
    ]
    expected = torch.cat(alone)
    torch.testing.assert_close(found, expected)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    slopes = [
        torch.autograd.grad((loss * weight).sum(), h)[0] for loss in (found, expected)
    ]
    torch.testing.assert_close(*slopes)
    assert not slopes[0][~real].any()  # padding has no gradient


def test_view_contrasts_and_gradients_equal_those_of_each_client() -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(3, 4, P, generator=draw, requires_grad=True) for _ in range(2)
    )
    present = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]]).bool()
    found = view_contrast(first, second, present, tau=0.5)
    alone = [
        view_contrast(f[None, p], s[None, p], p[None, p], tau=0.5)
        for f, s, p in zip(first, second, present, strict=True)
    ]
    expected = torch.cat(alone)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sum(), (first, second)),
        torch.autograd.grad(expected.sum(), (first, second)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_absent_classes_that_are_zero_give_no_nan() -> None:
    means = torch.zeros(1, 3, P)
    means[0, 0] = 1.0
    means.requires_grad_()
    present = torch.tensor([[True, False, False]])
    loss = view_contrast(means, means, present, tau=0.5)
    (slope,) = torch.autograd.grad(loss.sum(), means)
    assert loss.tolist() == [0.0]
    assert torch.isfinite(slope).all()
