"""Every method on a GPU: the machine's, or a pretended one, which refuses mixed devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl import METHODS, simulate
from flower_fgl.core.model_spec import TYPED
from flower_fgl.nn.models import MODELS
from flower_fgl.testing.pretended_gpu import gpu, is_on_gpu, pretended_gpu
from tests.support.short_runs import shortened

SMALL: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "local_epochs": 1,
    "synthetic": {"nodes": 150, "classes": 3, "features": 8, "blocks": 3},
}


def test_the_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    with pretended_gpu():
        there = torch.ones(3, device="cuda")
        here = torch.ones(3)
        assert there.device == torch.device("cuda:0")
        assert (2 * there[:2]).device.type == "cuda"
        assert there.cpu().device.type == "cpu"
        assert is_on_gpu(torch.nn.Linear(2, 2).to("cuda:0").weight)
        assert (there + torch.tensor(1.0)).sum() == 6
        for mixed in (
            lambda: there + here,
            lambda: torch.cat([here, there]),
            lambda: here[there.long()],
            lambda: there.numpy(),
            lambda: np.asarray(there),
            lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                mixed()
        assert here.to("cuda") is not here
        assert not is_on_gpu(here)
        torch.rand(2, device="cuda", generator=torch.Generator("cuda"))


def small_run(method: str, tmp_path: Path, **values: Any) -> None:
    """Run a method on the GPU, without a failed reply."""
    settings = {
        **shortened(method, SMALL),
        "device": "cuda",
        "output_dir": str(tmp_path),
    }
    with gpu():
        run = simulate(method, **{**settings, **values})
    assert run.status == "completed"
    assert not run.summary["failures"]


STACKABLE = [
    name for name, row in METHODS.items() if vars(row.load_client_app()).get("stacked")
]


@pytest.mark.thorough
@pytest.mark.parametrize("method", STACKABLE)
def test_stacked_clients_keep_their_tensors_on_the_device(
    method: str, tmp_path: Path
) -> None:
    small_run(method, tmp_path, stacked="true")


@pytest.mark.parametrize("model", sorted({*MODELS} - {"gine", *TYPED}))
def test_every_backbone_keeps_its_tensors_on_the_device(
    model: str, tmp_path: Path
) -> None:
    small_run("fedavg", tmp_path, model=model, stacked="false", rounds=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 5},
        {"batch_size": 5, "stacked": "true"},
        {"check_every": 1},
        {"participation": 0.5, "evaluate": "both"},
        {"participation": 0.5, "eval_policy": "refresh"},
        {"setting": "inductive"},
        {"aggregation": "median"},
        {"upload_clip": 1.0, "upload_noise": 0.5},
        {"secure_aggregation": True},
        {"optimizer": "sgd"},
        {"feature_norm": "columns"},
        {"checkpoint_every": 1, "keep_checkpoint": True},
    ],
    ids=str,
)
def test_every_option_keeps_its_tensors_on_the_device(
    values: dict[str, Any], tmp_path: Path
) -> None:
    small_run("fedavg", tmp_path, **values)
