"""CPUs, GPUs and worker processes: what a run asks for, and what the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from flower_fgl.core.errors import ConfigError, RunError

__all__ = [
    "check_client_gpus",
    "check_workers",
    "fitting_workers",
    "num_cpus",
    "on_cluster",
]

SMALLEST_SHARE = 1e-4
"""Smallest share of a GPU that Ray distinguishes from 0."""


def check_workers(workers: int) -> None:
    """Raise ConfigError if a number of worker processes is no whole number from 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(
            f"workers must be a whole number and at least 1, got {workers!r}."
        )


def check_client_gpus(client_gpus: float) -> None:
    """Reject a number of GPUs per worker process that Ray cannot give.

    These are negative numbers, those that are not finite, below Ray's smallest share,
    or above 1 but not whole.
    """
    is_share = client_gpus == 0 or SMALLEST_SHARE <= client_gpus <= 1
    is_number = math.isfinite(client_gpus) and client_gpus > 1
    if not is_share and not (is_number and client_gpus == int(client_gpus)):
        raise ConfigError(
            f"client_gpus must be 0, a fraction from {SMALLEST_SHARE:g} to 1, or a whole "
            f"number, because Ray can only share a single GPU. Got {client_gpus}."
        )


def fitting_workers(client_cpus: int, client_gpus: float, workers: int | None) -> int:
    """Return ``workers``, or by default how many the machine has resources for.

    ``client_cpus`` and ``client_gpus`` are those of each worker process. Raises a
    RunError if the machine has too few CPUs or GPUs.
    """
    cpus = num_cpus()
    wanted = client_cpus * (workers or 1)
    if wanted > cpus:
        raise RunError(
            f"{workers or 1} clients at once with {client_cpus} CPUs each need "
            f"{wanted} CPUs; this process may use {cpus}. Use fewer workers or fewer CPUs "
            "per client."
        )
    fitting = cpus // client_cpus
    if client_gpus > 0:
        gpus = _num_gpus()
        if client_gpus * (workers or 1) > gpus:
            raise RunError(
                f"{workers or 1} clients at once with {client_gpus:g} GPUs each need "
                f"more than the {gpus} GPUs that torch finds here. Use fewer workers or a "
                "smaller share, or train on CPU: --client-gpus 0."
            )
        fitting = min(fitting, _gpu_slots(gpus, client_gpus))
    return workers or fitting


def _gpu_slots(gpus: int, client_gpus: float) -> int:
    """Return how many clients fit on the GPUs; fractions of two GPUs are not combined."""
    if client_gpus > 1:
        return gpus // int(client_gpus)
    return gpus * int(1 / client_gpus + 1e-9)  # 1 / 0.1 may fall just below 10


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_gpus() -> int:
    """Return the number of GPUs that torch finds."""
    import torch  # takes seconds to import, and most runs do not need it

    return torch.cuda.device_count()


def on_cluster(environment: Mapping[str, str]) -> bool:
    """Return whether ``RAY_ADDRESS`` names an existing Ray cluster."""
    return environment.get("RAY_ADDRESS", "") not in ("", "local")
