"""Runs on the machine's GPU give the numbers of runs on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flower_fgl import Run, simulate
from flower_fgl.algorithms.fedlog import prompts
from flower_fgl.testing import MethodCase
from tests.contract.cases import CASES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU"
)


def losses(run: Run) -> list[float]:
    """Return the losses of the rounds that have one."""
    return [row["loss"] for row in run.rounds if row.get("loss") is not None]


STACKED = [case for case in CASES if vars(case.row.load_client_app()).get("stacked")]


@pytest.mark.parametrize(
    ("case", "stacked"),
    [(case, "false") for case in CASES] + [(case, "true") for case in STACKED],
    ids=lambda value: getattr(value, "name", f"stacked-{value}"),
)
def test_a_run_on_the_gpu_has_the_losses_of_the_cpu(
    case: MethodCase,
    stacked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # without dropout, whose random numbers differ between devices
    monkeypatch.setattr(prompts, "DROPOUT", 0.0)
    settings: dict[str, Any] = case.settings(dropout=0.0, output_dir=str(tmp_path))
    there, here = (
        simulate(**settings, stacked=stacked, device=device)
        for device in ("cuda", "cpu")
    )
    assert there.status == here.status == "completed"
    assert not there.summary["failures"]
    assert losses(here)
    assert losses(there) == pytest.approx(losses(here), rel=1e-3)
