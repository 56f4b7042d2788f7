"""Shared fixtures: a six-node toy graph, a generator, the folder of real data."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flower_fgl.core import extensions
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from tests.support.short_runs import SMALL

# workers share the cores
torch.set_num_threads(
    max(1, torch.get_num_threads() // int(os.getenv("PYTEST_XDIST_WORKER_COUNT", "1")))
)

# each search for cyclic garbage visits all modules and tests, and finds next to nothing
gc.set_threshold(20_000, 50, 100)


# a shell starts jobs in the background without Ctrl-C, and their children inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give each test the same random weights in any order and on any worker."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_pictures(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write reports without pictures, whose drawing takes most of their time."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr("flower_fgl.lab.plots.to_svg", lambda _: b"<svg/>")
        monkeypatch.setattr("flower_fgl.lab.report.page.draw_narrow", lambda _: {})


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers, which other tests of the process would find."""
    rows = {kind: dict(known) for kind, known in extensions._registered.items()}
    monkeypatch.setattr(extensions, "_registered", rows)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def toy() -> NodeDataset:
    """Two triangles joined by one edge, one class each."""
    pairs = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (3, 5), (4, 5)]
    both = sorted(pairs + [(v, u) for u, v in pairs])
    return NodeDataset(
        name="toy",
        x=torch.eye(6),
        edge_index=torch.tensor(both).T.contiguous(),
        y=torch.tensor([0, 0, 0, 1, 1, 1]),
        target=Target.classes(("left", "right")),
    )


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("FLOWER_FGL_DATA")
    if not folder:
        pytest.skip("FLOWER_FGL_DATA is not set: no real data at hand")
    return Path(folder).resolve()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what the tests compute away from the user's cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("FLOWER_FGL_CACHE")
    os.environ["FLOWER_FGL_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["FLOWER_FGL_CACHE"]
    else:
        os.environ["FLOWER_FGL_CACHE"] = before


@pytest.fixture
def small(tmp_path: Path) -> dict[str, object]:
    """Settings of a run that takes a moment."""
    return {**SMALL, "clients": 3, "output_dir": str(tmp_path / "runs")}
