"""FedAux's equations, by hand and against the dense form."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms import fedaux
from flower_fgl.algorithms.fedaux import (
    FedAuxNet,
    kernel_smooth,
    position_scores,
)
from flower_fgl.methods.fedaux import FedAuxSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.models import num_parameters

H = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])


def close(found: Tensor, expected: list[list[float]] | list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_scores_and_smoothed_embeddings_by_hand() -> None:
    scores = position_scores(H, torch.tensor([1.0, 0.0]))
    close(scores, [1.0, 0.0, 0.6])
    # κ_12 = .3679, κ_13 = .8521, κ_23 = .6977
    z = kernel_smooth(scores, H, sigma=1.0)
    close(z, [[0.6808, 0.4728], [0.3808, 0.7543], [0.5695, 0.5874]])


def test_narrow_and_wide_kernels() -> None:
    scores = position_scores(H, torch.tensor([1.0, 0.0]))
    close(kernel_smooth(scores, H, sigma=1e-3), H.tolist())
    close(kernel_smooth(scores, H, sigma=1e3), [H.mean(0).tolist()] * 3)


def test_both_kinds_of_score_differ() -> None:
    h = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    a = torch.tensor([1.0, 1.0])
    close(position_scores(h, a), [1.0, 0.5, 0.7])
    close(position_scores(h, a, kind="cosine"), [0.7071, 0.7071, 0.9899])


def test_the_kernel_is_the_slow_loop(generator: torch.Generator) -> None:
    h = torch.randn(12, 4, generator=generator)
    a = 3 * torch.randn(4, generator=generator)
    scores = position_scores(h, a)
    longest = max(float(row.norm()) for row in h)
    for i in range(12):
        assert float(scores[i]) == pytest.approx(float(h[i] @ a) / longest, abs=1e-5)
    found = kernel_smooth(scores, h, sigma=0.7)
    for i in range(12):
        weights = [math.exp(-(((float(scores[i] - s)) / 0.7) ** 2)) for s in scores]
        total = sum(weights)
        slow = [
            sum(w * float(h[j, k]) for j, w in enumerate(weights)) / total
            for k in range(4)
        ]
        close(found[i], slow)


def test_chunks_give_the_dense_values_and_gradients(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = torch.randn(30, 4, generator=generator)
    a = torch.randn(4, generator=generator)
    found = []
    for chunk in (100, 7):
        monkeypatch.setattr(fedaux, "CHUNK", chunk)
        x, direction = h.clone().requires_grad_(), a.clone().requires_grad_()
        z = kernel_smooth(position_scores(x, direction), x, sigma=1.0)
        z.square().sum().backward()
        found.append((z.detach(), x.grad, direction.grad))
    for dense, chunked in zip(*found, strict=True):
        torch.testing.assert_close(dense, chunked, atol=1e-5, rtol=1e-5)


def test_the_direction_has_a_gradient_unless_all_scores_are_equal() -> None:
    for h, is_zero in ((H, False), (torch.ones(3, 2), True)):
        a = torch.tensor([0.3, -0.2], requires_grad=True)
        logits = kernel_smooth(position_scores(h, a), h, sigma=1.0)
        F.cross_entropy(logits, torch.tensor([0, 1, 1])).backward()
        assert a.grad is not None
        assert (float(a.grad.abs().max()) < 1e-7) == is_zero


def test_the_number_of_parameters_and_permuted_nodes() -> None:
    sizes = {"num_features": 1433, "num_outputs": 7, "width": 256, "num_layers": 2}
    network = FedAuxNet(FedAuxSettings(), model="gcn", dropout=0.5, **sizes)  # type: ignore[arg-type]
    assert num_parameters(network) == 436_743
    x, edges = (
        torch.randn(5, 1433),
        torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]]),
    )
    order = torch.tensor([3, 0, 4, 1, 2])
    back = torch.argsort(order)
    network.eval()
    moved = network(GraphInput(x[order], back[edges]))
    torch.testing.assert_close(
        moved, network(GraphInput(x, edges))[order], atol=1e-4, rtol=1e-4
    )
