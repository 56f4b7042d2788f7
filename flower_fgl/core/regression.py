"""Scores of predicted numbers: of one client, and pooled over clients.

All numbers are in the units of the file, in float64. A record holds the numbers of each
target, from which the server computes the scores, so that pooled RMSE and MAE are exactly
those of all items together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = ["ACROSS", "INTERVALS", "WIDE", "NumberScores", "PerTarget", "pool_numbers"]
__all__ += ["mean_of_known", "number_losses", "rank_correlation", "regression_loss"]
__all__ += ["score_numbers"]

WIDE = 200
"""Largest number of targets whose MAE, spread and ranks are in a record."""
ACROSS = ("nrmse", "mae", "r2", "spearman")
"""Means over the targets in a record of more than :data:`WIDE` targets."""
INTERVALS = ("coverage", "interval")
"""Scores of conformal intervals."""


@dataclass(frozen=True)
class PerTarget:
    """What one client's predictions of T targets show, each of length T.

    ``n`` counts the known values; ``mse`` and ``mae`` are mean squared and absolute errors,
    NaN without any; ``sst`` is the sum of squared deviations of the values from their mean;
    ``spearman`` is the rank correlation, NaN with fewer than two values, or if values or
    predictions are all equal. The last three are empty in a record of many targets.
    """

    n: tuple[int, ...]
    mse: tuple[float, ...]
    mae: tuple[float, ...] = ()
    sst: tuple[float, ...] = ()
    spearman: tuple[float, ...] = ()

    @property
    def rmse(self) -> list[float]:
        """Root mean squared errors."""
        return [math.sqrt(value) for value in self.mse]

    @property
    def r2(self) -> list[float]:
        """Coefficients of determination, NaN where the values do not vary."""
        sse = (n * mse for n, mse in zip(self.n, self.mse, strict=True))
        return [_r2(*pair) for pair in zip(sse, self.sst, strict=True)]


@dataclass(frozen=True)
class NumberScores:
    """Scores of one model on one set of items with T numbers each, NaN where undefined.

    The last two are of conformal intervals, and omitted from records without any.
    """

    num_nodes: int  # items with a known value of any target
    targets: PerTarget
    std: tuple[
        float, ...
    ]  # spread of each target; empty if the server does not know it
    nrmse: float  # mean over the targets with values of RMSE / spread
    mae: float  # this one and the next two: means over the targets
    r2: float  # about the mean of the same values
    spearman: float
    coverage: float = math.nan  # share of the known values that lie in their interval
    interval: float = math.nan  # mean width of the intervals, in spreads

    @classmethod
    def of(
        cls, num_nodes: int, targets: PerTarget, std: tuple[float, ...]
    ) -> NumberScores:
        """Compute the means over the targets."""
        scaled = [
            error / spread for error, spread in zip(targets.rmse, std, strict=True)
        ]
        nrmse, mae = _mean_error(scaled, targets.n), _mean_error(targets.mae, targets.n)
        r2, spearman = _mean(targets.r2), _mean(targets.spearman)
        return cls(num_nodes, targets, std, nrmse, mae, r2, spearman)

    @classmethod
    def empty(cls, std: tuple[float, ...]) -> NumberScores:
        """Return the scores of no items, with the spread of each target."""
        none = (math.nan,) * len(std)
        counts = (0,) * len(std)
        return cls.of(0, PerTarget(counts, none, none, (0.0,) * len(std), none), std)

    @property
    def rmse(self) -> float:
        """Mean over the targets of the root mean squared error, NaN without values."""
        return _mean_error(self.targets.rmse, self.targets.n)

    def selected(self, main_score: str) -> float:
        """Return the score by which models are selected, ``RunConfig.main_score``.

        Of several targets ``rmse`` stands for ``nrmse``, since their units differ.
        """
        is_several = main_score == "rmse" and len(self.targets.n) > 1
        return float(getattr(self, "nrmse" if is_several else main_score))

    def as_dict(self) -> dict[str, Any]:
        """Return the scores by name, and under ``targets`` those of each target."""
        found = self.targets
        each: dict[str, Sequence[float]] = {"num_values": found.n, "rmse": found.rmse}
        if found.mae:
            each |= {"mae": found.mae, "sst": found.sst, "r2": found.r2}
            each |= {"spearman": found.spearman}
        names = ("num_nodes", "rmse", *ACROSS)
        return (
            {name: getattr(self, name) for name in names}
            | self.intervals
            | {"targets": {name: list(values) for name, values in each.items()}}
        )

    @property
    def intervals(self) -> dict[str, float]:
        """Coverage and width of the intervals, empty without any."""
        found = {name: getattr(self, name) for name in INTERVALS}
        return {} if math.isnan(self.coverage) else found

    def as_record(self) -> dict[str, Any]:
        """Return what is sent: 40T bytes for T targets, 16T for more than 200."""
        found = self.targets
        if len(found.n) > WIDE:
            across = {name: getattr(self, name) for name in ACROSS}
            each = {"n": list(found.n), "mse": list(found.mse)}
            return {"num_nodes": self.num_nodes, **across, **self.intervals, **each}
        names = ("n", "mse", "mae", "sst", "spearman")
        each = {name: list(getattr(found, name)) for name in names}
        one = {"num_nodes": self.num_nodes, "nrmse": self.nrmse}
        return {**one, **self.intervals, **each}

    def rounded(self) -> NumberScores:
        """Round all numbers to two significant digits, and the counts not at all."""
        targets = PerTarget(
            self.targets.n, *(_round(each) for each in astuple(self.targets)[1:])
        )
        found = NumberScores.of(self.num_nodes, targets, self.std)
        widths = _round([*self.intervals.values()])
        more: dict[str, Any] = dict(zip(self.intervals, widths, strict=True))
        return replace(found, nrmse=float(f"{found.nrmse:.2g}"), **more)

    def with_enough(self, least: int) -> NumberScores:
        """Remove the targets that have values, but fewer than ``least``."""
        parts = self.targets
        is_kept = [number >= least for number in parts.n]
        each: list[Any] = [
            tuple(x if keep else gone for x, keep in zip(values, is_kept, strict=True))
            for values, gone in zip(
                astuple(parts), (0, math.nan, math.nan, 0.0, math.nan), strict=True
            )
        ]
        kept: dict[str, Any] = self.intervals if all(is_kept) else {}
        found = NumberScores.of(self.num_nodes, PerTarget(*each), self.std)
        return replace(found, **kept)


def score_numbers(
    predicted: Tensor, values: Tensor, mask: Tensor, std: Tensor
) -> NumberScores:
    """Score predicted numbers (N, T) on the items of a mask (N,), in the units of the file.

    ``values`` (N, T) are NaN if unknown, and items without a known value are ignored.
    ``nrmse`` is normalised by ``std`` (T,), 1 without a scale. With a prediction that is
    not finite, the error of its target is NaN.
    """
    chosen = mask & ~values.isnan().all(dim=1)
    outputs = predicted[chosen].to(torch.float64).cpu()
    truth = values[chosen].to(torch.float64).cpu()
    each: list[tuple[int, float, float, float, float]] = []
    for column, wanted in zip(outputs.T, truth.T, strict=True):
        known = ~wanted.isnan()
        y, error = wanted[known], column[known] - wanted[known]
        n = int(known.sum())
        is_finite = bool(error.isfinite().all())
        sst = float((y - y.mean()).square().sum()) if n and y.min() < y.max() else 0.0
        each.append(
            (
                n,
                float(error.square().mean()) if n and is_finite else math.nan,
                float(error.abs().mean()) if n and is_finite else math.nan,
                sst,
                rank_correlation(y, column[known]) if is_finite else math.nan,
            )
        )
    targets = PerTarget(*zip(*each, strict=True))
    return NumberScores.of(int(chosen.sum()), targets, tuple(std.tolist()))


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's ρ of n pairs: Pearson's correlation of their ranks.

    Equal values share their mean rank. NaN with n < 2, or if one side is constant.
    """
    ranks = [_ranks(one), _ranks(other)]
    first, second = (rank - rank.mean() for rank in ranks)
    spread = float(first.square().sum() * second.square().sum()) ** 0.5
    return float(first @ second) / spread if spread > 0 else math.nan


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value, of equal ones their mean."""
    found: tuple[Tensor, ...] = torch.unique(
        values, return_inverse=True, return_counts=True
    )
    _, place, count = found
    return count.cumsum(0)[place] - (count[place] - 1).to(torch.float64) / 2


def pool_numbers(scores: Sequence[NumberScores]) -> dict[str, Any]:
    """Pool the scores of the clients that have values.

    Returns ``num_nodes`` (the sum), the scores of all items together, their unweighted
    means over the clients as ``mean_rmse``, …, and under ``targets`` the numbers of each
    target.

    Notes
    -----
    1. RMSE and MAE are those of all items together, not means over clients.
    2. R² is 1 − Σ SSE / Σ SST over the clients that have one, each about its own mean: a
       model gets no credit for the differences between the clients' means.
    3. Ranks cannot be pooled: Spearman's ρ is the mean over the clients that have one,
       weighted by values.
    4. Of more than 200 targets, MAE, R² and ρ are means over clients, weighted by items.
    """
    counted = [entry for entry in scores if entry.num_nodes > 0]
    each: dict[str, list[float]] = {"num_values": [], "rmse": []}
    is_wide = any(not entry.targets.mae for entry in counted)
    nrmse = []
    for t in range(len(scores[0].targets.n)):
        own = [entry for entry in counted if entry.targets.n[t]]
        weights = [entry.targets.n[t] for entry in own]
        squares = [entry.targets.mse[t] for entry in own]
        error = _weighted(squares, weights) ** 0.5
        each["num_values"].append(sum(weights))
        each["rmse"].append(error)
        if all(entry.std for entry in own):
            parts = [mse / e.std[t] ** 2 for mse, e in zip(squares, own, strict=True)]
            nrmse.append(_weighted(parts, weights) ** 0.5)
        if not is_wide:
            for name, value in _pool_target(t, own, weights).items():
                each.setdefault(name, []).append(value)
    sizes = [entry.num_nodes for entry in counted]
    across = {
        name: _weighted([getattr(entry, name) for entry in counted], sizes)
        if name not in each
        else _mean(each[name])
        for name in ACROSS
    }
    if all(entry.std for entry in counted):
        across["nrmse"] = _mean(nrmse)
    out: dict[str, Any] = {"num_nodes": sum(sizes), "rmse": _mean(each["rmse"])}
    out |= across
    for name in ("rmse", *ACROSS):
        out[f"mean_{name}"] = _mean([getattr(entry, name) for entry in counted])
    if any(entry.intervals for entry in counted):
        for name in INTERVALS:
            each_client = [getattr(entry, name) for entry in counted]
            out[name] = _weighted(each_client, sizes)
            out[f"mean_{name}"] = _mean(each_client)
    return out | {"targets": each}


def _pool_target(
    t: int, own: Sequence[NumberScores], weights: Sequence[int]
) -> dict[str, float]:
    """Pool MAE, spread, R² and ρ of one target over the clients that have values."""
    spread = [entry for entry in own if entry.targets.sst[t] > 0]
    sse = math.fsum(entry.targets.n[t] * entry.targets.mse[t] for entry in spread)
    sst = math.fsum(entry.targets.sst[t] for entry in spread)
    return {
        "mae": _weighted([entry.targets.mae[t] for entry in own], weights),
        "sst": sst,
        "r2": _r2(sse, sst),
        "spearman": _weighted([entry.targets.spearman[t] for entry in own], weights),
    }


def _r2(sse: float, sst: float) -> float:
    """Return the coefficient of determination, NaN if the values do not vary."""
    return 1 - sse / sst if sst > 0 else math.nan


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, NaN without any."""
    return _weighted(values, [1] * len(values))


def _mean_error(values: Sequence[float], n: Sequence[int]) -> float:
    """Return the mean over the targets with values: NaN if one of them is, or without."""
    found = [value for value, number in zip(values, n, strict=True) if number]
    return math.fsum(found) / len(found) if found else math.nan


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the weighted mean of the values that are not NaN, NaN without any."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if not math.isnan(v)]
    total = sum(weight for _, weight in pairs)
    return math.fsum(v * w for v, w in pairs) / total if total else math.nan


def _round(values: Sequence[float]) -> tuple[float, ...]:
    """Round numbers to two significant digits."""
    return tuple(float(f"{value:.2g}") for value in values)


def regression_loss(
    output: Tensor,
    z: Tensor,
    *,
    loss: str = "mse",
    delta: float = 1.0,
    target_weight: str = "entries",
) -> Tensor:
    """Return the mean loss of the known ones of standardised numbers (b, T), 0 if none is.

    ``z`` is NaN where unknown. ``loss`` is ``mse`` (e²), ``mae`` (|e|), or ``huber``
    (e²/2 up to δ = ``delta``, then δ·(|e| − δ/2)) of the errors e = output − z. With
    ``target_weight`` ``entries`` each known number counts equally, with ``targets`` each
    target that has one.

    Notes
    -----
    1. Unknown numbers are replaced before the subtraction: the gradient of
       ``torch.where(isnan, 0, (output - z) ** 2)`` is NaN.
    """
    losses = number_losses(output, z.nan_to_num(), loss=loss, delta=delta)
    return mean_of_known(losses, ~z.isnan(), by_target=target_weight == "targets")


def number_losses(output: Tensor, z: Tensor, *, loss: str, delta: float) -> Tensor:
    """Return the loss of each number (b, T), see :func:`regression_loss`; all are known."""
    if loss == "huber":
        return F.huber_loss(output, z, reduction="none", delta=delta)
    power = F.mse_loss if loss == "mse" else F.l1_loss
    return power(output, z, reduction="none")


def mean_of_known(values: Tensor, is_known: Tensor, *, by_target: bool) -> Tensor:
    """Average the known entries (b, T), or, ``by_target``, the means of the targets."""
    values = values * is_known
    if by_target:
        count = is_known.sum(dim=0)
        means = values.sum(dim=0) / count.clamp(min=1)
        return means.sum() / (count > 0).sum().clamp(min=1)
    return values.sum() / is_known.sum().clamp(min=1)
