"""Random seeds and generators derived from (seed, round, partition-id, purpose)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive_seed", "numpy_generator", "seeded", "torch_generator"]

SERVER = -1
"""Partition-id of the server's random draws."""


def derive_seed(seed: int, server_round: int, partition_id: int, purpose: str) -> int:
    """Derive an independent 63-bit seed, the same in every process and on every machine.

    Parameters
    ----------
    seed : int
        Seed of the run or of the partition.
    server_round : int
        Round; 0 before the first round.
    partition_id : int
        Client, or ``SERVER`` for the server.
    purpose : str
        What the numbers are for, e.g. ``"dropout"``; each purpose has its own stream.

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
    """Return a torch CPU generator for one purpose, see :func:`derive_seed`."""
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
    """Seed torch's global generators for a block, and restore them afterwards.

    Dropout, initialisation and PyG's attention dropout can only draw from torch's global
    generator.
    """
    is_cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda and device else []):
        torch.default_generator.manual_seed(seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
