from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn.mutual_information import (
    MIEstimator,
    club_bound,
    residual_loss,
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_the_bound_of_one_dimension_is_the_covariance() -> None:
    mean, flat = column(1, -1), column(0, 0)
    # own terms: 1 and 1; means over both nodes: (1 + 9) / 2 = 5; ½ (5 − 1) = 2
    assert float(club_bound(mean, flat, column(2, -2))) == pytest.approx(2)
    # anti-correlated: −2, which would be rewarded without limit
    assert float(club_bound(mean, flat, column(-2, 2))) == 0


def test_the_printed_bound_sums_over_all_pairs() -> None:
    # each node: −1 + 9; summed over both
    bound = club_bound(column(1, -1), column(0, 0), column(2, -2), norm="literal")
    assert float(bound) == pytest.approx(16)
    least = club_bound(column(1, 1), column(0, 0), column(2, 2), norm="literal")
    assert float(least) == 0


@pytest.mark.parametrize("norm", ["mean", "literal"])
def test_the_bound_equals_a_loop_over_pairs(
    norm: str, generator: torch.Generator
) -> None:
    mean, local = torch.randn(2, 6, 3, generator=generator)
    mean = mean + 2 * local  # correlated, so that nothing is clamped
    log_variance = torch.randn(6, 3, generator=generator).tanh()
    total = 0.0
    for v in range(6):
        for d in range(3):
            precision = math.exp(-float(log_variance[v, d]))
            squares = [float((mean[v, d] - local[u, d]) ** 2) for u in range(6)]
            if norm == "mean":
                total += 0.5 * precision * (sum(squares) / 6 - squares[v]) / 6
            else:
                total += precision * (sum(squares) - 2 * squares[v])
    bound = club_bound(mean, log_variance, local, norm=norm)
    assert float(bound) == pytest.approx(total, rel=1e-5)


def test_the_residual_loss_is_least_at_the_variance_of_the_residuals() -> None:
    variance = 0.7  # its logarithm lies in [−1, 1]
    mean, local = column(0, 0), column(math.sqrt(variance), -math.sqrt(variance))
    log_variance = torch.zeros(2, 1, requires_grad=True)
    optimizer = torch.optim.SGD([log_variance], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        residual_loss(mean, log_variance, local).backward()
        optimizer.step()
    torch.testing.assert_close(
        log_variance.detach(), torch.full((2, 1), math.log(variance))
    )


def test_the_residual_loss_by_hand() -> None:
    # (1 − 3)² / e + 1 and (0 − 1)² / 1 + 0, mean of both
    loss = residual_loss(column(1, 0), column(1, 0), column(3, 1))
    assert float(loss) == pytest.approx((4 / math.e + 1 + 1) / 2)


def test_the_estimator_halves_the_width_and_bounds_the_variance(
    generator: torch.Generator,
) -> None:
    estimator = MIEstimator(6)
    shared = 50 * torch.randn(9, 6, generator=generator)
    mean, log_variance = estimator(shared)
    assert mean.shape == log_variance.shape == (9, 6)
    assert float(log_variance.detach().abs().max()) <= 1
    assert estimator.mean[0].out_features == 3


def test_the_bound_has_a_gradient_for_both_branches(
    generator: torch.Generator,
) -> None:
    estimator = MIEstimator(4)
    shared = torch.randn(8, 4, generator=generator, requires_grad=True)
    local = shared.detach().clone().requires_grad_()
    for _ in range(300):  # an untrained estimator gives the bound 0
        estimator.zero_grad()
        residual_loss(*estimator(shared.detach()), local.detach()).backward()
        with torch.no_grad():
            for p in estimator.parameters():
                p -= 0.05 * p.grad
    bound = club_bound(*estimator(shared), local)
    bound.backward()
    assert float(bound.detach()) > 0
    assert float(shared.grad.abs().sum()) > 0
    assert float(local.grad.abs().sum()) > 0
