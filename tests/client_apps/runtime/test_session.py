"""The memory allocator of processes that train."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from flower_fgl.client_apps.runtime.session import Session

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        kept = [torch.ones(3_000_000) for _ in range(8)]  # 12 MB each
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
Session()
faults()
print(first, faults())
"""


def faults(**environment: str) -> tuple[int, int]:
    """Return the page faults of 40 tensors, before and after a session was built."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**plain, **environment},
    )
    first, second = map(int, done.stdout.split())
    return first, second


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_process_that_trains_reuses_the_memory_of_freed_tensors() -> None:
    pages = 40 * 12_000_000 // 4096
    first, second = faults()
    assert second < pages / 10 < first
    # who sets the allocator's options in the environment keeps them
    _, second = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert second > pages / 2
