"""FGSSL's losses by hand and against a loop, and its views."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedgen import mean_divergence
from flower_fgl.client_apps.fgssl import (
    edge_differences,
    mask_columns,
    node_contrast,
    random_view,
)
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import csr_matrix

PAIRS = torch.tensor([[0, 1], [1, 2]])


def in_csr(dense: Tensor) -> Tensor:
    row, column = dense.nonzero().T
    return csr_matrix(row, column, dense[row, column], (len(dense), dense.shape[1]))


def test_the_contrast_by_hand() -> None:
    # node 0: positives 0 and 1 with cosines 1 and 0, negative 2 with cosine −1
    z = torch.tensor([[2.0, 0.0]] * 3)
    received = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 0, 1])
    one = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-1))) / 2
    last = math.log(1 + math.exp(1) * (math.exp(1) + 1))
    found = node_contrast(z, received, labels, tau=1.0)
    assert found.item() == pytest.approx((2 * one + last) / 3, rel=1e-6)


def test_the_contrast_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    z, received = (torch.randn(6, 4, generator=generator) for _ in range(2))
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    losses = []
    for i in range(6):
        e = [
            math.exp(float(torch.cosine_similarity(z[i], g, dim=0)) / 0.5)
            for g in received
        ]
        others = sum(e[k] for k in range(6) if labels[k] != labels[i])
        own = [
            -math.log(e[p] / (e[p] + others))
            for p in range(6)
            if labels[p] == labels[i]
        ]
        losses.append(sum(own) / len(own))
    found = node_contrast(z, received, labels, tau=0.5)
    assert found.item() == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_the_contrast_of_clients_at_once_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(1)
    z, received = (torch.randn(3, 5, 4, generator=generator) for _ in range(2))
    z.requires_grad_()
    # the last two have padding, and the last a single class
    labels = torch.tensor([[0, 0, 1, 2, 1], [2, 0, 2, 0, -1], [1, 1, 1, -1, -1]])
    found = node_contrast(z, received, labels, tau=0.5)
    found.sum().backward()
    alone = [
        node_contrast(z[k, :n], received[k, :n], labels[k, :n], tau=0.5)
        for k, n in ((0, 5), (1, 4))
    ]
    torch.testing.assert_close(found, torch.stack([*alone, torch.zeros(())]))
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())
    assert bool((z.grad[1, 4:] == 0).all())


def test_both_losses_have_a_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    received = torch.randn(3, 4, generator=generator)
    labels = torch.tensor([0, 1, 0])
    for kind in ("contrast", "edges"):
        z = torch.randn(3, 4, generator=generator).requires_grad_()
        if kind == "contrast":
            loss = node_contrast(z, received, labels, tau=0.1)
        else:
            own, other = (edge_differences(h, PAIRS) for h in (z, received))
            loss = mean_divergence(own, other, tau=0.1)
        loss.backward()
        assert z.grad is not None
        assert bool(z.grad.isfinite().all())
        assert float(z.grad.abs().max()) > 1e-4


def test_edges_that_are_alike_cost_nothing() -> None:
    h = torch.tensor([[0.0, 1.0], [0.3, 1.0], [0.3, 0.5]])
    found = edge_differences(h, PAIRS)
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.0], [0.0, 0.5]]))
    assert mean_divergence(found, found, tau=0.1).item() == pytest.approx(0, abs=1e-6)
    # softmaxes of (1, 0) and (0, 1): KL = (e − 1)/(e + 1)
    one, other = torch.tensor([[0.1, 0.0]]), torch.tensor([[0.0, 0.1]])
    value = (math.e - 1) / (math.e + 1)
    assert mean_divergence(one, other, tau=0.1).item() == pytest.approx(value, rel=1e-5)


def test_masked_columns_of_both_layouts() -> None:
    dense = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    kept = torch.tensor([True, True, False])
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    assert torch.equal(mask_columns(dense, kept), expected)
    sparse = mask_columns(in_csr(dense), kept)
    assert torch.equal(sparse.to_dense(), expected)
    assert sparse.values().numel() == 3


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_view_drops_edges_in_both_directions(is_sparse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    number = 400
    pairs = torch.stack([torch.arange(number - 1), torch.arange(1, number)])
    x = torch.ones(number, 50)
    graph = GraphInput(
        in_csr(x) if is_sparse else x, torch.cat([pairs, pairs.flip(0)], dim=1)
    )
    view = random_view(
        graph, pairs, [number - 1], [generator], edge_drop=0.8, feature_mask=0.5
    )
    one, other = view.edge_index
    half = len(one) // 2
    assert torch.equal(one[:half], other[half:])
    assert torch.equal(other[:half], one[half:])
    assert 0.1 < half / (number - 1) < 0.3
    columns = view.x.to_dense() if is_sparse else view.x
    assert torch.equal(columns, columns[:1].expand(number, 50))
    assert 10 < int(columns[0].sum()) < 40
