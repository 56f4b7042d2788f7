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
    torch.ones(250_000)  # 1 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        kept = [torch.ones(250_000) for _ in range(8)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
Session()
faults()
print(first, faults())
"""


def faults(**environment: str) -> tuple[int, int]:
    """Return the page faults of 160 tensors, before and after a session was built."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **environment},
    )
    first, second = map(int, done.stdout.split())
    return first, second


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_process_that_trains_reuses_the_memory_of_freed_tensors() -> None:
    pages = 160 * 1_000_000 // 4096
    _, second = faults()
    assert second < pages / 10
    # who sets the allocator's options in the environment keeps them
    _, second = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert second > pages / 2
