"""Randomness derived from (seed, round, partition-id, purpose), never from global state."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive_seed", "numpy_generator", "seeded", "torch_generator"]

SERVER = -1
"""Partition-id under which the server half draws."""


def derive_seed(seed: int, server_round: int, partition_id: int, purpose: str) -> int:
    """Derive an independent 63-bit seed, the same in every process and place.

    Parameters
    ----------
    seed : int
        The run's (or partition's) seed.
    server_round : int
        Round, 0 before the first.
    partition_id : int
        Client, or ``SERVER``.
    purpose : str
        What is drawn, e.g. ``"dropout"``; different purposes never share a stream.

    Returns
    -------
    int in [0, 2**63)
    """
    text = f"{seed}/{server_round}/{partition_id}/{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(
    seed: int, server_round: int, partition_id: int, purpose: str
) -> torch.Generator:
    """Return a CPU generator for one purpose, see :func:`derive_seed`."""
    generator = torch.Generator()
    generator.manual_seed(derive_seed(seed, server_round, partition_id, purpose))
    return generator


def numpy_generator(
    seed: int, server_round: int, partition_id: int, purpose: str
) -> np.random.Generator:
    """Return a NumPy generator for one purpose, see :func:`derive_seed`."""
    return np.random.default_rng(derive_seed(seed, server_round, partition_id, purpose))


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run a block on freshly seeded global torch generators, then put them back.

    Layers (dropout, initialisation, attention dropout inside PyG) can only draw from
    torch's global generator; forking it keeps their draws a function of ``seed`` and
    leaves no trace outside the block.
    """
    is_cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda and device else []):
        torch.default_generator.manual_seed(seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
