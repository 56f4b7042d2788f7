"""Tests that share a method's run are given to the same worker."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests that compare runs with the method's reference run."""
    for item in items:
        if "reference_run" in getattr(item, "fixturenames", ()):
            name = item.callspec.params["case"].name  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.xdist_group(f"runs of {name}"))
