"""CPUs, GPUs and worker processes: what a run asks for, and what machine or cluster has."""

import contextlib
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from flower_fgl.core.errors import ConfigError, RunError

__all__ = ["REMEDY", "check_client_gpus", "fitting_workers", "num_cpus"]
__all__ += ["on_cluster", "require_cluster"]

SMALLEST_SHARE = 1e-4
"""Smallest share of a GPU that Ray distinguishes from 0."""

CONNECT_SECONDS = 10.0
"""Seconds within which the cluster must answer."""
REMEDY = (
    "Unset RAY_ADDRESS, or set RAY_ADDRESS=local, to run without a cluster; or start the "
    "cluster, and set RAY_ADDRESS to the host and port that `ray start` prints."
)


def check_client_gpus(client_gpus: float) -> None:
    """Reject a number of GPUs per worker process that Ray cannot give."""
    is_share = client_gpus == 0 or SMALLEST_SHARE <= client_gpus <= 1
    is_number = math.isfinite(client_gpus) and client_gpus > 1
    if not is_share and not (is_number and client_gpus == int(client_gpus)):
        raise ConfigError(
            f"client_gpus must be 0, a fraction from {SMALLEST_SHARE:g} to 1, or a whole "
            f"number, because Ray can only share a single GPU. Got {client_gpus}."
        )


def fitting_workers(client_cpus: int, client_gpus: float, workers: int | None) -> int:
    """Return ``workers``, or by default how many the machine has resources for."""
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
        import torch  # takes seconds to import, and most runs do not need it

        gpus = torch.cuda.device_count()
        if client_gpus * (workers or 1) > gpus:
            raise RunError(
                f"{workers or 1} clients at once with {client_gpus:g} GPUs each need "
                f"more than the {gpus} GPUs that torch finds here. Use fewer workers or a "
                "smaller share, or train on CPU: --client-gpus 0."
            )
        # fractions of two GPUs are not combined, and 1 / 0.1 may fall just below 10
        shares = gpus * int(1 / client_gpus + 1e-9)
        fitting = min(fitting, gpus // int(client_gpus) if client_gpus > 1 else shares)
    return workers or fitting


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def on_cluster(environment: Mapping[str, str]) -> bool:
    """Return whether ``RAY_ADDRESS`` names an existing Ray cluster."""
    return environment.get("RAY_ADDRESS", "") not in ("", "local")


def require_cluster(environment: Mapping[str, str]) -> None:
    """Raise a RunError if ``RAY_ADDRESS`` is no address, or nothing answers there.

    Ray itself would wait for minutes, and its error names neither variable nor address.
    """
    if not on_cluster(environment):
        return
    text = environment["RAY_ADDRESS"]
    address = text
    if text == "auto":  # Ray reads the address of the last cluster from a file
        file = Path(environment.get("RAY_TMPDIR") or "/tmp", "ray/ray_current_cluster")
        if not file.is_file():
            return  # without it Ray searches the processes, and fails at once
        address = file.read_text(encoding="utf-8").strip()
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise RunError(
            f'RAY_ADDRESS = "{text}" is no address of a Ray cluster, HOST:PORT. {REMEDY}'
        )
    if not _answers(host.strip("[]"), int(port), environment):
        where = "" if address == text else f" ({address})"
        raise RunError(
            f'RAY_ADDRESS = "{text}"{where}, but no Ray cluster answers there within '
            f"{CONNECT_SECONDS:g} s. {REMEDY}"
        )


def _answers(host: str, port: int, environment: Mapping[str, str]) -> bool:
    """Return whether a gRPC server answers; with TLS, whether any server does."""
    if environment.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        with (
            contextlib.suppress(OSError, OverflowError),
            socket.create_connection((host, port), timeout=CONNECT_SECONDS),
        ):
            return True
        return False
    # takes a moment, and most runs join no cluster
    import grpc  # type: ignore[import-untyped]

    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(place, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            return False
    return True
