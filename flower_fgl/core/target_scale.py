"""One scale for the numbers of all clients: their moments, combined exactly.

Training standardises each target to z = (y − μ)/σ. The moments of n values are their mean
and M2, the sum of their squared deviations from it; Chan, Golub and LeVeque, 1979, combine
those of disjoint sets without a difference of large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from flower_fgl.core.errors import RunError
from flower_fgl.core.settings import GeneralSettings, read_given

__all__ = ["Moments", "TargetScale", "agree_scale", "combine", "distances"]
__all__ += ["given_scale", "moments", "own_scale", "robust_combine"]

FAR, TOO_FAR = 10.0, 100.0
"""Spreads between a client and most others: for a warning, and to leave it out."""
FEWEST_COMPARED = 3
"""Clients from which one of them can be called far from most others. Of two either can be
in another unit."""
SMALLEST = 1e-9
"""Standard deviation, relative to the mean, below which values count as equal."""


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of the values of one target."""

    count: int
    mean: float
    m2: float

    @property
    def spread(self) -> float:
        """Standard deviation of the population, 0 without values."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    @property
    def size(self) -> float:
        """Root mean square of the values, which a change of unit multiplies."""
        return math.hypot(self.mean, self.spread)


@dataclass(frozen=True, eq=False)
class TargetScale:
    """Mean μ and standard deviation σ > 0 (T,), float64, of T targets, in their units."""

    mean: Tensor
    std: Tensor

    @classmethod
    def identity(cls, width: int) -> TargetScale:
        """Return the scale that leaves T targets as they are."""
        ones = torch.ones(width, dtype=torch.float64)
        return cls(torch.zeros_like(ones), ones)

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> TargetScale:
        """Return the scale with these (μ, σ), one pair per target."""
        mean, std = torch.tensor(list(pairs), dtype=torch.float64).T
        return cls(mean, std)

    def standardize(self, values: Tensor) -> Tensor:
        """Return z = (y − μ)/σ in float32 of values (n, T); unknown ones stay NaN."""
        mean, std = self.mean.to(values.device), self.std.to(values.device)
        return ((values.to(torch.float64) - mean) / std).to(torch.float32)

    def restore(self, output: Tensor) -> Tensor:
        """Return μ + σ·output in float64, predictions (n, T) in the units of the file."""
        mean, std = self.mean.to(output.device), self.std.to(output.device)
        return mean + std * output.to(torch.float64)


def moments(values: Tensor) -> list[Moments]:
    """Return the moments of each column of values (n, T), without unknown ones (NaN)."""
    found = []
    for column in values.detach().to("cpu", torch.float64).T:
        known = column[~column.isnan()].tolist()
        if not known:
            found.append(Moments(0, 0.0, 0.0))
            continue
        mean = math.fsum(known) / len(known)
        m2 = math.fsum((value - mean) ** 2 for value in known)
        # a mean that is rounded leaves a deviation from equal values
        found.append(Moments(len(known), mean, m2 if min(known) < max(known) else 0.0))
    return found


def combine(owners: Mapping[int, Moments]) -> tuple[float, float]:
    """Return μ and σ of all values of one target, exactly, in no order of the owners."""
    parts = [owners[pid] for pid in sorted(owners)]
    n = sum(part.count for part in parts)
    mean = math.fsum(part.count * part.mean for part in parts) / n
    between = math.fsum(part.count * (part.mean - mean) ** 2 for part in parts)
    return mean, math.sqrt((math.fsum(part.m2 for part in parts) + between) / n)


def robust_combine(owners: Mapping[int, Moments]) -> tuple[float, float]:
    """Return the median of the owners' means, and of their spreads about it."""
    mean = median(part.mean for part in owners.values())
    spreads = (math.hypot(p.spread, p.mean - mean) for p in owners.values())
    return mean, median(spreads)


def distances(owners: Mapping[int, Moments]) -> dict[int, float]:
    """Return how far each owner is from most others, in spreads.

    With M the median of the means, the distance is the larger of the owner's spread and
    ``|mean − M|``, divided by the larger of the medians of both (1 if that is 0).
    """
    centre = median(part.mean for part in owners.values())
    away = {pid: abs(part.mean - centre) for pid, part in owners.items()}
    unit = max(median(p.spread for p in owners.values()), median(away.values())) or 1.0
    return {pid: max(away[pid], part.spread) / unit for pid, part in owners.items()}


def agree_scale(
    names: Sequence[str],
    owners: Mapping[int, Sequence[Moments]],
    labels: Mapping[int, str],
    *,
    min_count: int,
    is_robust: bool = False,
    warn: Callable[[str], None],
) -> TargetScale:
    """Combine the moments of all clients to one scale.

    ``owners`` has the T moments of each client by partition-id; a count of 0 says
    nothing. With ``is_robust`` medians over the clients replace the exact mean and
    deviation. ``warn`` takes the text of each warning, which names a client by ``labels``
    and holds no value of the data.

    Raises a RunError if no client has ``min_count`` values of a target, or those of the
    only target are all equal.
    """
    pairs = []
    for place, name in enumerate(names):
        found = {pid: own[place] for pid, own in owners.items() if own[place].count}
        if not found:
            raise RunError(
                f"No owner has min-target-count = {min_count} training values of "
                f'"{name}". Lower it, set target-scale = "given", or leave the target out '
                "with target = …."
            )
        kept = _without_far(name, found, labels, warn)
        mean, std = (robust_combine if is_robust else combine)(kept)
        if _is_constant(mean, std):
            if len(names) == 1:
                raise RunError(
                    f'All training values of "{name}" are equal: there is nothing to '
                    "learn."
                )
            warn(f'All training values of "{name}" are equal: it is not scaled.')
            std = 1.0
        pairs.append((mean, std))
    return TargetScale.of(pairs)


def _without_far(
    name: str,
    found: Mapping[int, Moments],
    labels: Mapping[int, str],
    warn: Callable[[str], None],
) -> Mapping[int, Moments]:
    """Warn of clients far from most others; return those that are not too far.

    Values in a larger unit are near 0, and thus not far from others in spreads: they are
    found by their size.
    """
    sizes = {pid: part.size for pid, part in found.items() if part.size}
    if len(found) < FEWEST_COMPARED:
        ratio = max(sizes.values()) / min(sizes.values()) if len(sizes) > 1 else 1.0
        if ratio > FAR:
            one, other = (labels[pid] for pid in sorted(found))
            warn(
                f'{one} and {other}: their values of "{name}" differ by a factor of about '
                f"{ratio:,.0f}. Check that both have the same unit."
            )
        return found
    far = distances(found)
    typical = median(part.size for part in found.values())
    for pid, size in sorted(sizes.items()):
        if far[pid] <= FAR and typical / size > FAR:
            warn(
                f'{labels[pid]}: its values of "{name}" are about {typical / size:,.0f} '
                "times smaller than is typical of the owners. Check the unit."
            )
    for pid in sorted(found):
        if far[pid] > FAR:
            left_out = " Its values do not count in the scale." * (far[pid] > TOO_FAR)
            warn(
                f'{labels[pid]}: the values of "{name}" differ from those of most owners '
                f"(about {far[pid]:.0f} spreads apart). Check the unit.{left_out}"
            )
    return {pid: part for pid, part in found.items() if far[pid] <= TOO_FAR}


def own_scale(values: Tensor) -> TargetScale:
    """Return the scale of one client's training values (n, T); σ is 1 of equal ones."""
    found = moments(values)
    return TargetScale.of(
        (m.mean, 1.0 if _is_constant(m.mean, m.spread) else m.spread) for m in found
    )


def given_scale(settings: GeneralSettings, names: Sequence[str]) -> TargetScale:
    """Return the scale of ``target-scale`` = ``given`` or ``none`` for T targets.

    Raises a RunError unless ``target-mean`` has one number for each of the ``names``; that
    of a single target needs no name.
    """
    if settings.target_scale == "none":
        return TargetScale.identity(len(names))
    mean, std = map(read_given, (settings.target_mean, settings.target_std))
    if mean.keys() != set(names) and not (len(names) == 1 and "" in mean):
        raise RunError(
            "target-mean and target-std must have one number for each target, with its "
            f"name: {','.join(f'{name}=…' for name in names[:20])}. Got target-mean = "
            f"{settings.target_mean}."
        )
    keys = names if "" not in mean else [""]
    return TargetScale.of((mean[key], std[key]) for key in keys)


def _is_constant(mean: float, std: float) -> bool:
    """Return whether values differ by rounding only."""
    return std <= SMALLEST * abs(mean)
