"""Random seeds, from (seed, round, partition-id, purpose), and secret random numbers."""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["derive_seed", "hidden_normal", "hidden_uniform", "numpy_generator"]
__all__ += ["seeded", "torch_generator"]

SERVER = -1
"""Partition-id of the server's random draws."""


def derive_seed(seed: int, server_round: int, partition_id: int, purpose: str) -> int:
    """Derive an independent 63-bit seed, the same in every process and on every machine.

    The round is 0 before the first one, the partition-id ``SERVER`` for the server. Each
    ``purpose``, e.g. ``"dropout"``, has its own stream.
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


def hidden_normal(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw standard normal numbers, without a generator from the operating system.

    On the CPU, by inversion of a half of the distribution with 52 bits, and a sign.
    """
    if generator is not None:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)
    bits = _bits(shape)
    tail = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-53
    sign = np.where(bits & np.uint64(1), -1.0, 1.0)
    lower = torch.special.ndtri(torch.from_numpy(tail))
    values: Tensor = (lower * torch.from_numpy(sign)).reshape(tuple(shape))
    return values.to(dtype)


def hidden_uniform(
    shape: Sequence[int], *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw float64 numbers between 0 and 1, see :func:`hidden_normal`."""
    if generator is not None:
        return torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    values = (_bits(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(values).reshape(tuple(shape))


def _bits(shape: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return 64 random bits for each element."""
    return np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
