"""The memory allocator of processes that train."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flower_fgl.client_apps.runtime.session import keep_freed_memory

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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_process_that_trains_reuses_the_memory_of_freed_tensors() -> None:
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
        env=plain,
    )
    first, second = map(int, done.stdout.split())  # page faults of 40 tensors
    pages = 40 * 12_000_000 // 4096
    assert second < pages / 10 < first


def test_who_sets_the_allocators_options_in_the_environment_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory.__wrapped__()
