"""Clipping of uploads, Gaussian noise, and the resulting privacy loss ε.

Dwork & Roth, "The Algorithmic Foundations of Differential Privacy", 2014. Exact ε of the
Gaussian mechanism: Balle & Wang, "Improving the Gaussian Mechanism for Differential
Privacy", ICML 2018. Composition: Dong, Roth & Su, "Gaussian Differential Privacy",
JRSS B 2022.

Privacy is per client, and each upload is one release: any two graphs that a client might
have are neighbours. Both clipped uploads lie within the clipping norm S of the same point,
so they are at most 2·S apart. Noise of standard deviation z·S makes a release
(2/z)-Gaussian differentially private.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from scipy.special import log_ndtr
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import hidden_normal

__all__ = ["SENSITIVITY", "accounted_epsilon", "check_clipped", "clip_and_add_noise"]
__all__ += ["epsilon", "numbers_of", "origin_of", "pld_epsilon", "refuse_unbounded"]
__all__ += ["with_numbers"]

SENSITIVITY = 2.0
"""Largest distance between two clipped uploads, in multiples of the clipping norm."""
TAIL = 8.0
"""A standard normal vector of d numbers is longer than √d + 8 with probability below
e^-32 = 1.3e-14 (concentration of a Lipschitz function of Gaussians)."""
ROUNDING = 2e-7
"""Relative error of a float32 number, with room for the sums."""


def clip_and_add_noise(
    numbers: Sequence[Tensor],
    *,
    clip: float,
    noise: float = 0.0,
    origin: Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Clip an upload u to the L2 norm S = ``clip`` and add Gaussian noise, z = ``noise``.

    ``o + (u − o)·min(1, S/‖u − o‖₂) + z·S·N(0, I)``, with one norm over all tensors,
    which are on the CPU and keep their types. ``origin`` o has values that the server
    already knows, by default zero. The noise comes from the operating system, in tests
    from ``generator``.

    Raises a ValueError if a number is not finite, since its norm cannot be bounded.
    """
    start = [torch.zeros_like(u) for u in numbers] if origin is None else origin
    away = [u.double() - o.double() for u, o in zip(numbers, start, strict=True)]
    norm = math.sqrt(sum(float(t.square().sum()) for t in away))
    if not math.isfinite(norm):
        raise ValueError("an upload with numbers that are not finite cannot be clipped")
    factor = min(1.0, clip / norm) if norm else 1.0
    out = []
    for u, o, t in zip(numbers, start, away, strict=True):
        value = o.double() + factor * t
        if noise:
            drawn = hidden_normal(t.shape, generator=generator, dtype=torch.float64)
            value += noise * clip * drawn
        out.append(value.to(u.dtype))
    return out


def check_clipped(
    upload: Any, download: Any, *, clip: float, noise: float = 0.0
) -> None:
    """Reject an upload that :func:`clip_and_add_noise` cannot have produced.

    Raises a PayloadError if it is farther from its reference point than S, or with noise
    than S + z·S·(√d + 8) for d numbers; plus the rounding of float32.

    Notes
    -----
    1. With noise this bounds the length of the upload only. An honest upload exceeds
       the bound with probability below 1.3e-14.
    """
    numbers = numbers_of(upload)
    start = origin_of(numbers, numbers_of(download))
    away = size = count = 0.0
    for u, o in zip(numbers.values(), start, strict=True):
        away += float((u.double() - o.double()).square().sum())
        size += float(u.double().square().sum())
        count += u.numel()
    most = clip * (1 + noise * (math.sqrt(count) + TAIL)) if noise else clip
    norm, tolerance = math.sqrt(away), ROUNDING * (math.sqrt(size) + clip)
    if not norm <= most * (1 + ROUNDING) + tolerance:
        raise PayloadError(
            f"the upload has a norm of {norm:.6g}, at most {most:.6g} fits upload-clip = "
            f"{clip:g} and upload-noise = {noise:g}"
        )


def origin_of(
    numbers: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return the reference point around which each tensor of :func:`numbers_of` is clipped.

    For weights by name (entries of a mapping) it is the download's tensor of the same path
    and shape, for all other numbers zero.
    """
    return [
        known[place].detach().cpu()
        if place.count("/") > 1
        and place in known
        and known[place].shape == tensor.shape
        else torch.zeros_like(tensor, device="cpu")
        for place, tensor in numbers.items()
    ]


def epsilon(noise: float, releases: int, delta: float) -> float:
    """Return the ε of T ``releases`` with noise z (in clipping norms), Balle & Wang, Th. 8.

    The smallest ε with ``Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) ≤ δ``, where μ = 2·√T/z: T
    Gaussian releases equal one of √T times the sensitivity, even if each depends on the
    previous ones (Dong et al., Corollary 3.3).
    """
    if not releases:
        return 0.0
    from scipy.optimize import brentq  # takes 0.25 s; most runs have no noise

    mu = SENSITIVITY * math.sqrt(releases) / noise

    def excess(value: float) -> float:
        """Return log δ(ε) − log δ."""
        first = float(log_ndtr(mu / 2 - value / mu))
        # below 0, but for rounding where the noise is tiny
        ratio = min(0.0, value + float(log_ndtr(-mu / 2 - value / mu)) - first)
        return first + math.log(max(-math.expm1(ratio), 1e-300)) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-9))


def pld_epsilon(noise: float, releases: int, delta: float) -> float:
    """Return an upper bound of the ε of T releases, see :func:`epsilon`.

    ``dp-accounting`` rounds the privacy loss of one release up to a grid and composes it
    numerically (Doroshenko et al., "Connect the Dots", PETS 2022). An ImportError says
    that the package (``pip install 'flower-fgl[privacy]'``) is missing.
    """
    from dp_accounting.pld import privacy_loss_distribution

    if not releases:
        return 0.0
    # the grid keeps its relative width, so that a tiny noise needs no more memory
    exact = epsilon(noise, releases, delta)
    one = privacy_loss_distribution.from_gaussian_mechanism(
        noise / SENSITIVITY, value_discretization_interval=max(1e-4, exact * 1e-4)
    )
    return float(one.self_compose(releases).get_epsilon_for_delta(delta))


def accounted_epsilon(noise: float, releases: int, delta: float) -> tuple[float, str]:
    """Return ε by :func:`pld_epsilon` and ``pld``, or without it ε and ``exact``."""
    try:
        return pld_epsilon(noise, releases, delta), "pld"
    except ImportError:
        return epsilon(noise, releases, delta), "exact"


def numbers_of(value: Any, path: str = "") -> dict[str, Tensor]:
    """Collect all floating-point tensors of a payload by path.

    ``/tensors/conv.weight`` is an entry of the field ``tensors``. ``path`` is for nested
    calls.
    """
    if isinstance(value, Tensor):
        return {path: value} if value.is_floating_point() else {}
    found: dict[str, Tensor] = {}
    for name, part in _parts(value).items():
        found |= numbers_of(part, f"{path}/{name}")
    return found


def refuse_unbounded(value: Any, path: str = "") -> None:
    """Reject a payload with real numbers that :func:`numbers_of` does not find.

    Integers, masks and texts are neither clipped nor noised, see ``docs/security.md``.
    """
    if isinstance(value, Tensor):
        is_known = not value.is_complex()
    else:
        is_empty = getattr(value, "__dict__", None) == {}
        is_known = is_empty or isinstance(value, int | str | bytes | None)
    parts = _parts(value)
    for name, part in parts.items():
        refuse_unbounded(part, f"{path}/{name}")
    is_container = is_dataclass(value) or isinstance(value, Mapping | list | tuple)
    if not (is_known or is_container):
        raise TypeError(
            f"{path or 'the payload'} is a {type(value).__name__}: only real tensors in "
            "dataclasses, mappings and lists can be clipped and noised"
        )


def with_numbers(value: Any, numbers: Mapping[str, Tensor], path: str = "") -> Any:
    """Return a copy of a payload with other tensors at the paths of :func:`numbers_of`."""
    if isinstance(value, Tensor):
        return numbers.get(path, value)
    parts = {
        name: with_numbers(part, numbers, f"{path}/{name}")
        for name, part in _parts(value).items()
    }
    if isinstance(value, Mapping):
        return parts
    if isinstance(value, list | tuple):
        return type(value)(parts.values())
    return replace(value, **parts) if parts else value


def _parts(value: Any) -> dict[Any, Any]:
    """Return the elements of a container by key, index or field; empty for others."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return {}
