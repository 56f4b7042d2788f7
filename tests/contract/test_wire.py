"""Rejected messages: oversized ones, and code that would open a pickle."""

from __future__ import annotations

import ast
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

import flower_fgl
from flower_fgl import simulate
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.core.errors import RunError
from flower_fgl.protocols.base import write_tensors
from flower_fgl.testing.exchanges import PICKLE, Bomb, of_objects
from tests.client_apps.runtime.test_owners import saved
from tests.support.owners import owner_graphs, run_owners


@pytest.mark.thorough
def test_nothing_in_the_package_reads_a_pickle() -> None:
    root = Path(flower_fgl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = {
                ast.Import: lambda n: [a.name for a in n.names],
                ast.ImportFrom: lambda n: [n.module or ""],
            }.get(type(node), lambda n: [])(node)
            bad = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
            assert not bad & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ("torch.save", "eval", "exec"), path
                if call == "torch.load":
                    safe = {ast.unparse(k) for k in node.keywords}
                    assert "weights_only=True" in safe, path
                for keyword in node.keywords:
                    if keyword.arg == "allow_pickle":
                        assert ast.unparse(keyword.value) == "False", path
                if call in ("np.load", "numpy.load"):
                    assert "allow_pickle" in {k.arg for k in node.keywords}, path


def test_the_pickles_of_the_contract_would_go_off() -> None:
    assert not Bomb.opened
    pickle.loads(PICKLE)
    assert Bomb.opened
    Bomb.opened = False
    np.load(io.BytesIO(of_objects().data), allow_pickle=True)
    assert Bomb.opened
    Bomb.opened = False


def test_an_oversized_upload_is_rejected_and_logged(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Any) -> Message:
        reply = original(app, message, context)
        if message.metadata.message_type == "train" and (
            context.node_config["partition-id"] == 1
        ):
            reply.content["more"] = write_tensors({"x": torch.zeros(300_000)})
        return reply

    monkeypatch.setattr(Dispatcher, "__call__", call)
    run = simulate(**small, max_message_mb=1.0)
    assert [row["replies"] for row in run.rounds] == [2, 2]
    (failure,) = run.rounds[0]["failures"]
    assert failure["partition_id"] == 1
    assert "1.2 MB arrived, more than max-message-mb = 1" in failure["reason"]


def test_an_oversized_download_is_rejected(small: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=r"more than max-message-mb = 0\.001; raise"):
        simulate(**{**small, "rounds": 1}, max_message_mb=0.001)


def test_a_data_owner_may_set_a_smaller_message_limit(tmp_path: Path) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    nodes[1]["max-message-mb"] = 0.001
    run = run_owners(nodes, tmp_path / "run")
    assert [row["replies"] for row in run.rounds] == [2, 2]
    assert "max-message-mb = 0.001" in run.rounds[0]["failures"][0]["reason"]
    nodes[1]["max-message-mb"] = "much"
    with pytest.raises(RunError, match="max-message-mb must be of type float"):
        run_owners(nodes[1:2], tmp_path / "again", clients=1)


def test_a_run_cannot_set_the_state_folder_of_a_data_owner(tmp_path: Path) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    elsewhere = tmp_path / "elsewhere"
    run_owners(nodes, tmp_path / "run", state_dir=str(elsewhere))
    assert not elsewhere.exists()
