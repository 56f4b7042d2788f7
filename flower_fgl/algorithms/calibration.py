"""Calibrated probabilities, conformal sets and intervals, from validation items.

Temperature scaling follows Guo et al., "On Calibration of Modern Neural Networks", ICML
2017. Sets hold the classes whose score is at most a quantile of the scores of the true
classes: LAC (Sadinle, Lei and Wasserman, JASA 2019), APS (Romano, Sesia and Candès, NeurIPS
2020), RAPS (Angelopoulos et al., ICLR 2021) and DAPS (Zargarbashi, Antonelli and
Bojchevski, "Conformal Prediction Sets for Graph Neural Networks", ICML 2023). The threshold
of several owners follows from a histogram of all scores, as in Lu et al., "Federated
Conformal Predictors for Distributed Uncertainty Quantification", ICML 2023, who use
quantile sketches. Locally scaled intervals follow Lei et al., "Distribution-Free Predictive
Inference for Regression", JASA 2018, section 5.2.

Letters: n items, N nodes, C classes, T targets, G temperatures, B bins.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flower_fgl.core.calibration import (
    DIFFUSED,
    LABEL,
    RESIDUAL,
    SCALED,
    Calibration,
    Knots,
    least_items,
)
from flower_fgl.nn.sparse import index_sum

__all__ = ["BINS", "SCORE_BINS", "TEMPERATURES", "Surroundings", "best_place"]
__all__ += ["bin_errors", "brier", "calibrated", "calibration_error", "class_scores"]
__all__ += ["class_sums", "diffused", "fit", "half_widths", "histogram_threshold"]
__all__ += ["in_intervals", "in_sets", "isotonic_map", "local_errors", "number_shapes"]
__all__ += ["number_sums"]
__all__ += ["probabilities", "reliability", "reliability_rows"]
__all__ += ["score_histogram", "shared_classes", "shared_numbers"]
__all__ += ["sum_shapes", "temperature_nll", "threshold"]

TEMPERATURES = tuple(2 ** (k / 8) for k in range(-32, 33))
"""Temperatures from 1/16 to 16 among which the best one is chosen, 9 % apart. The grid is
fixed, so that the losses of several owners can be added up."""
BINS = 15
"""Bins of confidence of a reliability diagram, of equal width."""
SCORE_BINS = 512
"""Bins of conformal scores, of equal width."""
ERROR_STEPS = 64
"""Bins of absolute errors in which they double."""
ERROR_BINS = 20 * ERROR_STEPS + 2
"""Bins of absolute errors, from 2⁻¹² to 2⁸ standard deviations of a target; the last one
holds larger errors."""
DIFFUSIONS = tuple(k / 10 for k in range(10))
"""Weights of the neighbours' mean among which DAPS chooses, 0 to 0.9."""
LOCAL_ITEMS, MOST_LOCAL, LEAST_LOCAL = 30, 16, 0.05
"""Items of one mean of errors, number of these means, and the smallest one as a share of
the error of all items."""
LARGEST_LOSS = 1e9
"""Largest sum of losses that a client sends: a class without a logit has no finite one."""
RAPS_PENALTY, RAPS_FREE = 0.1, 1
"""λ that RAPS adds for each class after the first k_reg, and k_reg."""


def probabilities(logits: Tensor, temperature: float, *, is_free: bool) -> Tensor:
    """Return probabilities (n, C), float64; ``is_free``: of labels, each of its own."""
    scaled = logits.to(torch.float64) / temperature
    return scaled.sigmoid() if is_free else scaled.softmax(dim=1)


def isotonic_map(probability: Tensor, y: Tensor) -> tuple[Knots, ...]:
    """Fit an increasing map of the probability of each class, Zadrozny and Elkan, KDD 2002.

    ``probability`` (n, C) are those of n items, at least one, and ``y`` their classes
    (n,), or labels (n, C) 0 and 1, NaN if unknown. Returns the knots of each class, see
    :class:`~flower_fgl.core.calibration.Calibration`. A label that is unknown everywhere
    keeps its probability.
    """
    from sklearn.isotonic import IsotonicRegression

    is_free = y.dim() == 2
    truth = y if is_free else functional.one_hot(y, probability.shape[1])
    out = []
    for p, wanted in zip(probability.T.cpu(), truth.double().T.cpu(), strict=True):
        known = ~wanted.isnan()
        if not bool(known.any()):
            out.append(((0.0, 1.0), (0.0, 1.0)))
            continue
        found = IsotonicRegression(y_min=0, y_max=1)
        found.fit(p[known].double().numpy(), wanted[known].numpy())
        x, to = found.X_thresholds_, found.y_thresholds_
        out.append((tuple(x.tolist()), tuple(to.tolist())))
    return tuple(out)


def calibrated(logits: Tensor, found: Calibration, *, is_free: bool) -> Tensor:
    """Return calibrated probabilities (n, C), float64; ``is_free``: of labels.

    Isotonic maps of classes are applied one by one; then rows are divided by their sums.
    """
    p = probabilities(logits, found.temperature, is_free=is_free)
    if not found.knots:
        return p
    mapped = _interpolated(p, found.knots)
    if is_free:
        return mapped
    total = mapped.sum(dim=1, keepdim=True)
    return torch.where(total > 0, mapped / total.clamp(min=1e-300), p)


def _interpolated(values: Tensor, knots: Sequence[Knots]) -> Tensor:
    """Interpolate each column (n, C) between its knots."""
    columns = [_interpolate(v, *own) for v, own in zip(values.T, knots, strict=True)]
    return torch.stack(columns, dim=1)


def _interpolate(p: Tensor, x: tuple[float, ...], y: tuple[float, ...]) -> Tensor:
    """Interpolate linearly between knots (x, y), constant beyond them."""
    found = np.interp(p.detach().cpu().numpy(), x, y)
    return torch.from_numpy(found).to(p.device)


def temperature_nll(logits: Tensor, y: Tensor) -> Tensor:
    """Sum the negative log-likelihood of the items at each temperature, Guo et al. §4.2.

    ``logits`` are (n, C), and ``y`` the classes (n,), or labels (n, C) 0 and 1, NaN if
    unknown. The result (G,), float64, has one sum for each of :data:`TEMPERATURES`.
    """
    logits = logits.to(torch.float64)
    loss: Callable[..., Tensor] = functional.cross_entropy
    if y.dim() == 2:
        known = ~y.isnan()
        logits, y = logits[known], y[known].to(torch.float64)
        loss = functional.binary_cross_entropy_with_logits
    return torch.stack([loss(logits / t, y, reduction="sum") for t in TEMPERATURES])


def best_place(nll: Tensor) -> int:
    """Return the place of the smallest sum (G,), among equal ones that nearest to T = 1."""
    smallest = (nll <= nll.min() + 1e-12 * nll.min().abs()).nonzero().flatten()
    nearest = (smallest - len(TEMPERATURES) // 2).abs().argmin()
    return int(smallest[nearest])


def reliability(confidence: Tensor, is_right: Tensor) -> Tensor:
    """Sum up a reliability diagram; the sums of several owners can be added.

    ``confidence`` (n,) is the probability of what was predicted, ``is_right`` (n,)
    whether it is true, or to which share. The rows of the result (3, BINS), float64, are
    the number of items, the sum of confidences, and the number of true predictions of
    each bin.
    """
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    one = torch.ones_like(confidence, dtype=torch.float64)
    rows = torch.stack([one, confidence.to(torch.float64), is_right.to(torch.float64)])
    sums = torch.zeros(3, BINS, dtype=torch.float64, device=confidence.device)
    return sums.index_add_(1, place, rows)


def calibration_error(sums: Tensor) -> float:
    """Return the expected calibration error of a reliability diagram, NaN without items.

    It is the mean over the items of |accuracy − confidence| of their bin, Guo et al. (3).
    """
    number, confidence, right = sums
    total = float(number.sum())
    return float((right - confidence).abs().sum()) / total if total else math.nan


def brier(probability: Tensor, y: Tensor) -> float:
    """Return the Brier score in [0, 1], half the squared distance from the truth.

    With two classes it is the usual (p − y)². ``y`` (n,) are classes; or (n, C) labels,
    NaN if unknown, of which (p − y)² is averaged over the known ones.
    """
    if y.dim() == 2:
        return float((probability - y)[~y.isnan()].square().mean())
    truth = functional.one_hot(y, probability.shape[1])
    return float((probability - truth).square().sum(dim=1).mean() / 2)


def bin_errors(probability: Tensor, y: Tensor) -> Tensor:
    """Return the reliability diagram of the predicted class, or of all labels."""
    if y.dim() == 2:
        known = ~y.isnan()
        return reliability(probability[known], y[known])
    best = probability.max(dim=1)
    return reliability(best.values, best.indices == y)


def class_scores(probability: Tensor, score: str, u: Tensor) -> Tensor:
    """Return the conformal score of each class of each item; a small one fits well.

    The rows of ``probability`` (n, C) sum to 1, and ``u`` (n,) are uniform draws from [0,
    1). The ``score`` is ``lac``: 1 − p; ``aps``: the probabilities of all more probable
    classes, plus u·p, which makes coverage exact instead of too high; ``raps``: in
    addition λ for each class after the first ones; or ``daps``: as ``aps``, before
    :func:`diffused`. Scores (n, C) are from 0 to 1, with ``raps`` above.
    """
    if score == "lac":
        return 1 - probability
    order = probability.argsort(dim=1, descending=True, stable=True)
    ranked = probability.gather(1, order)
    found = ranked.cumsum(1) - ranked + u[:, None] * ranked
    if score == "raps":
        rank = torch.arange(1, ranked.shape[1] + 1, device=ranked.device)
        found = found + RAPS_PENALTY * (rank - RAPS_FREE).clamp(min=0)
    return torch.empty_like(found).scatter_(1, order, found)


class Surroundings(NamedTuple):
    """The whole graph of nodes that are scored: ``rows`` (n,) are these nodes.

    ``logits`` are (N, C), ``edge_index`` (2, E), and ``u`` (N,) uniform draws.
    """

    logits: Tensor
    edge_index: Tensor
    u: Tensor
    rows: Tensor


def diffused(scores: Tensor, edge_index: Tensor, weight: float) -> Tensor:
    """Mix the scores of each node with their neighbours' mean, as in DAPS.

    ``scores`` are (N, C), ``edge_index`` (2, E). A node without neighbours keeps its own.
    """
    source, target = edge_index
    total = index_sum(scores.index_select(0, source), target, len(scores))
    number = torch.bincount(target, minlength=len(scores))[:, None]
    mean = torch.where(number > 0, total / number.clamp(min=1), scores)
    return (1 - weight) * scores + weight * mean


def _scores_around(found: Calibration, around: Surroundings) -> Tensor:
    """Return the scores (N, C) of all nodes of a graph before they are diffused."""
    p = calibrated(around.logits, found, is_free=False)
    return class_scores(p, DIFFUSED, around.u)


def in_sets(
    probability: Tensor,
    found: Calibration,
    u: Tensor,
    around: Surroundings | None = None,
) -> Tensor:
    """Return which classes, or labels, are in the set of each item, (n, C), bool.

    ``probability`` (n, C) is calibrated, and ``u`` (n,) are uniform draws. With the score
    ``daps`` both are those of ``around``.
    """
    limits = probability.new_tensor(found.thresholds)
    if found.score == LABEL:
        return 1 - probability <= limits
    if around is None:
        return class_scores(probability, found.score, u) <= limits
    every = _scores_around(found, around)
    every = diffused(every, around.edge_index, found.diffusion)
    return every[around.rows] <= limits


def threshold(scores: Tensor, coverage: float) -> float:
    """Return the ⌈(n + 1)·coverage⌉-th smallest of n scores, infinite with too few."""
    if len(scores) < least_items(coverage):
        return math.inf
    k = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return float(scores.kthvalue(k).values)


def score_histogram(scores: Tensor, largest: float) -> Tensor:
    """Count scores (n,) in [0, largest] by bin, (SCORE_BINS,), upper edges included."""
    place = (scores / largest * SCORE_BINS).ceil().long().clamp(1, SCORE_BINS) - 1
    return torch.bincount(place, minlength=SCORE_BINS).to(torch.float64)


def histogram_threshold(counts: Tensor, edges: Tensor, coverage: float) -> float:
    """Return the upper edge of the bin that holds :func:`threshold`, which is no smaller.

    ``counts`` (B,) are numbers of scores, ``edges`` (B,) the upper edges of the bins.
    """
    n = round(float(counts.sum()))
    if n < least_items(coverage):
        return math.inf
    k = math.ceil((n + 1) * coverage - 1e-9)
    place = int(torch.searchsorted(counts.round().cumsum(0), k - 0.5))
    return float(edges[place])


def local_errors(predicted: Tensor, error: Tensor) -> Knots:
    """Estimate the absolute error (n,) of items by their predicted number (n,).

    Items are sorted by prediction and cut into parts of equal size; a knot has the mean
    prediction and the mean error of a part. Without items the local error is 1.
    """
    if not len(error):
        return (0.0,), (1.0,)
    order = predicted.argsort(stable=True)
    number = min(max(len(order) // LOCAL_ITEMS, 1), MOST_LOCAL)
    parts = order.tensor_split(number)
    least = max(LEAST_LOCAL * float(error.mean()), 1e-12)
    x = tuple(float(predicted[part].mean()) for part in parts)
    return x, tuple(max(float(error[part].mean()), least) for part in parts)


def half_widths(predicted: Tensor, found: Calibration) -> Tensor:
    """Return half the width of the interval of each predicted number (n, T), float64."""
    half = torch.tensor(found.thresholds, dtype=torch.float64, device=predicted.device)
    if found.score != SCALED:
        return half.expand(predicted.shape)
    return _interpolated(predicted, found.knots) * half


def in_intervals(
    predicted: Tensor, values: Tensor, found: Calibration
) -> tuple[Tensor, Tensor]:
    """Return which known values (n, T) lie in their interval, and which are known."""
    known = ~values.isnan()
    half = half_widths(predicted, found)
    return ((predicted - values).abs() <= half) & known, known


def fit(
    outputs: Tensor,
    y: Tensor,
    u: Tensor,
    *,
    coverage: float,
    score: str,
    has_numbers: bool = False,
    is_isotonic: bool = False,
    around: Surroundings | None = None,
) -> Calibration:
    """Calibrate a model with the items of one owner.

    ``outputs`` are logits (n, C), or with ``has_numbers`` numbers (n, T) in their units,
    and ``y`` the classes (n,), or labels or numbers, NaN if unknown. ``u`` (n,) are the
    draws of :func:`class_scores`, and ``score`` is one of its scores, or ``scaled`` of
    numbers. ``coverage``, in (0, 1), is that of sets and intervals; of several labels, of
    the items that have a label. With ``is_isotonic`` probabilities also get an isotonic
    map. ``daps`` needs the graph ``around`` the items; its draws then replace ``u``.

    Notes
    -----
    1. A temperature is one number, so that the same items also give the threshold. An
       isotonic map has many and fits its items too well: half of them, drawn by a bit of
       ``u``, give the map, and the other half the threshold. Likewise one half gives the
       local errors of ``scaled`` and the weight of ``daps``, which is the one with the
       smallest sets among :data:`DIFFUSIONS`.
    """
    n = len(y)
    u = u if around is None else around.u[around.rows]
    kept = torch.ones(n, dtype=torch.bool, device=y.device)
    if is_isotonic or score in (DIFFUSED, SCALED):
        kept = (u * 2**20).long() % 2 == 1
    if has_numbers:
        return _fit_numbers(outputs.to(torch.float64), y, kept, coverage, score)
    if not n:
        return Calibration("owner", 0)
    temperature = TEMPERATURES[best_place(temperature_nll(outputs, y))]
    is_free = y.dim() == 2
    found = Calibration("owner", n, temperature)
    if is_isotonic:
        p = probabilities(outputs[~kept], temperature, is_free=is_free)
        if len(p):
            found = replace(found, knots=isotonic_map(p, y[~kept]))
    p = calibrated(outputs[kept], found, is_free=is_free)
    if is_free:
        missed = zip((1 - p).T, (y[kept] == 1).T, strict=True)
        each = tuple(threshold(one[has], coverage) for one, has in missed)
        if all(map(math.isinf, each)):
            return found
        return replace(found, coverage=coverage, score=LABEL, thresholds=each)
    if int(kept.sum()) < least_items(coverage):
        return found
    if around is None:
        scores = class_scores(p, score, u[kept])
    else:
        weight, every = _best_diffusion(found, around, y, ~kept, coverage)
        found, scores = replace(found, diffusion=weight), every[kept]
    limit = threshold(scores.gather(1, y[kept][:, None])[:, 0], coverage)
    return replace(found, coverage=coverage, score=score, thresholds=(limit,))


def _best_diffusion(
    found: Calibration, around: Surroundings, y: Tensor, chosen: Tensor, coverage: float
) -> tuple[float, Tensor]:
    """Return the weight with the smallest sets of chosen items, and all scores (n, C)."""
    every, sizes = _scores_around(found, around), []
    for weight in DIFFUSIONS:
        scores = diffused(every, around.edge_index, weight)[around.rows]
        own = scores[chosen].gather(1, y[chosen][:, None])[:, 0]
        is_in = scores[chosen] <= threshold(own, coverage)
        sizes.append(int(is_in.sum()))
    best = DIFFUSIONS[sizes.index(min(sizes))]
    return best, diffused(every, around.edge_index, best)[around.rows]


def _fit_numbers(
    predicted: Tensor, y: Tensor, kept: Tensor, coverage: float, score: str
) -> Calibration:
    """Find intervals of numbers (n, T) by kept items, and local errors by the others."""
    errors, each, knots = (predicted - y).abs(), [], []
    for column, error in zip(predicted.T, errors.T, strict=True):
        known = ~error.isnan()
        e = error[kept & known]
        if score == SCALED:
            others = ~kept & known
            knots.append(local_errors(column[others], error[others]))
            e = e / _interpolate(column[kept & known], *knots[-1])
        each.append(threshold(e, coverage))
    if all(map(math.isinf, each)):
        return Calibration("owner", len(y))
    name = SCALED if knots else RESIDUAL
    return Calibration("owner", len(y), 1.0, coverage, name, tuple(each), tuple(knots))


def class_sums(logits: Tensor, y: Tensor, u: Tensor, score: str) -> dict[str, Tensor]:
    """Sum up what the common calibration of several owners needs, at each temperature.

    Arguments are those of :func:`fit`; the score is ``lac``, ``aps`` or ``raps``. Returns
    ``items`` (1,), ``nll`` (G,), ``brier`` (G,) and ``bins`` (G, 3, BINS); of classes
    also ``scores`` (G, SCORE_BINS); all float64. The sums of several owners can be added.
    """
    is_free, n = y.dim() == 2, len(y)
    largest = _largest_score(score, logits.shape[1])
    found: dict[str, list[Tensor]] = {"brier": [], "bins": [], "scores": []}
    for temperature in TEMPERATURES:
        p = probabilities(logits, temperature, is_free=is_free)
        found["brier"].append(torch.tensor(brier(p, y) * n if n else 0.0))
        found["bins"].append(bin_errors(p, y))
        if not is_free:
            own = class_scores(p, score, u).gather(1, y[:, None])[:, 0]
            found["scores"].append(score_histogram(own, largest))
    nll = temperature_nll(logits, y).clamp(max=LARGEST_LOSS)
    sums = {"items": torch.tensor([float(n)]), "nll": nll}
    sums |= {name: torch.stack(each) for name, each in found.items() if each}
    return {name: each.to(torch.float64).cpu() for name, each in sums.items()}


def sum_shapes(*, is_free: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of :func:`class_sums`, of several labels if ``is_free``."""
    number = len(TEMPERATURES)
    shapes: dict[str, tuple[int, ...]] = {"items": (1,), "nll": (number,)}
    shapes |= {"brier": (number,), "bins": (number, 3, BINS)}
    return shapes if is_free else shapes | {"scores": (number, SCORE_BINS)}


def number_shapes(num_targets: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of :func:`number_sums`."""
    return {"items": (1,), "errors": (num_targets, ERROR_BINS)}


def reliability_rows(
    sums: dict[str, Tensor], temperature: float
) -> dict[str, list[list[float]]]:
    """Return the diagrams (3, BINS) of :func:`class_sums` before and after calibration."""
    places = {"before": 1.0, "after": temperature}
    return {
        name: sums["bins"][TEMPERATURES.index(t)].tolist() for name, t in places.items()
    }


def shared_classes(
    sums: dict[str, Tensor], *, num_classes: int, coverage: float, score: str
) -> Calibration:
    """Calibrate by the added :func:`class_sums` of several owners."""
    n = round(float(sums["items"]))
    place = best_place(sums["nll"])
    temperature = TEMPERATURES[place] if n else 1.0
    if "scores" not in sums or n < least_items(coverage):
        return Calibration("shared", n, temperature)
    edges = torch.arange(1, SCORE_BINS + 1, dtype=torch.float64) / SCORE_BINS
    edges *= _largest_score(score, num_classes)
    limit = histogram_threshold(sums["scores"][place], edges, coverage)
    return Calibration("shared", n, temperature, coverage, score, (limit,))


def number_sums(predicted: Tensor, values: Tensor, std: Tensor) -> dict[str, Tensor]:
    """Count the absolute errors of each target by size, in steps of 4.4 %.

    ``predicted`` and ``values`` are (n, T), NaN if unknown, ``std`` (T,) the spread of each
    target. Returns ``items`` (1,) and ``errors`` (T, ERROR_BINS), float64.
    """
    known = ~values.isnan()
    size = ((predicted - values).abs() / std).log2() + 12
    place = (size.nan_to_num(0.0) * ERROR_STEPS).ceil().long().clamp(0, ERROR_BINS - 1)
    counts = torch.zeros(len(std), ERROR_BINS, dtype=torch.float64)
    counts.scatter_add_(1, place.T.cpu(), known.T.to(torch.float64).cpu())
    number = known.any(dim=1).sum().to(torch.float64).cpu()
    return {"items": number[None], "errors": counts}


def shared_numbers(
    sums: dict[str, Tensor], std: Tensor, *, coverage: float
) -> Calibration:
    """Find intervals by the added :func:`number_sums` of several owners."""
    n = round(float(sums["items"]))
    steps = torch.arange(ERROR_BINS, dtype=torch.float64)
    edges = 2 ** (steps / ERROR_STEPS - 12)
    edges[-1] = math.inf
    each = [
        histogram_threshold(counts, edges * spread, coverage)
        for counts, spread in zip(sums["errors"], std, strict=True)
    ]
    if all(map(math.isinf, each)):
        return Calibration("shared", n)
    return Calibration("shared", n, 1.0, coverage, RESIDUAL, tuple(each))


def _largest_score(score: str, num_classes: int) -> float:
    """Return the largest conformal score that a class can have."""
    most = RAPS_PENALTY * max(num_classes - RAPS_FREE, 0)
    return 1.0 + (most if score == "raps" else 0.0)
