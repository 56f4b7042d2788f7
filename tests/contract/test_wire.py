"""Rejected messages: pickles, garbage, another method's payload, oversized messages."""

from __future__ import annotations

import ast
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import flower_fgl
from flower_fgl import METHODS, simulate
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.core.errors import RunError
from flower_fgl.protocols.base import write_tensors
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.client_apps.runtime.test_owners import saved
from tests.contract.test_methods import Stage, settings, stage  # noqa: F401  stage needs it
from tests.support.methods import collected
from tests.support.owners import owner_graphs, run_owners

__all__ = ["stage"]  # a fixture

UPLOADING = sorted(set(METHODS) - {"local"})

# methods of one round: the action of the exchange that follows it
LATER = {"opfgl": "personalise", **collected("LATER")}


class Bomb:
    """A pickle that records whether it was opened."""

    opened = False

    def __reduce__(self) -> Any:
        return (Bomb._open, ())

    @staticmethod
    def _open() -> Bomb:
        Bomb.opened = True
        return Bomb()


def pickled() -> Array:
    """Declare the bytes as a pickle."""
    return Array("object", (1,), "pickle", pickle.dumps(Bomb()))


def disguised() -> Array:
    """Declare a pickle as an array."""
    return Array("float32", (1,), "numpy.ndarray", pickle.dumps(Bomb()))


def of_objects() -> Array:
    """Put the pickle into an .npy file of objects."""
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb()], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", stream.getvalue())


PICKLES = (pickled, disguised, of_objects)


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
                assert call not in ("torch.load", "torch.save", "eval", "exec"), path
                for keyword in node.keywords:
                    if keyword.arg == "allow_pickle":
                        assert ast.unparse(keyword.value) == "False", path
                if call in ("np.load", "numpy.load"):
                    assert "allow_pickle" in {k.arg for k in node.keywords}, path


def replaced(content: RecordDict, make: Callable[[], Array]) -> RecordDict:
    """Replace the first array of a message."""
    out = RecordDict(dict(content))
    name = next(iter(content.array_records))
    arrays = dict(content.array_records[name])
    arrays[next(iter(arrays))] = make()
    out[name] = ArrayRecord(arrays)
    return out


@pytest.mark.parametrize("make", PICKLES)
@pytest.mark.parametrize("method", UPLOADING)
def test_a_pickled_upload_is_rejected_unopened_and_logged(
    method: str, stage: Stage, make: Callable[[], Array]
) -> None:
    Bomb.opened = False
    replies = stage.replies(1)
    replies[1].content = replaced(replies[1].content, make)
    uploads = stage.strategy.read_uploads(replies)
    assert sorted(uploads) == [0, 2]
    (failure,) = stage.strategy.loop.log.failures
    assert failure.partition_id == 1
    assert not Bomb.opened


@pytest.mark.parametrize("make", PICKLES)
@pytest.mark.parametrize("method", UPLOADING)
def test_a_pickled_download_is_rejected_unopened(
    method: str, stage: Stage, make: Callable[[], Array]
) -> None:
    Bomb.opened = False
    stage.strategy.aggregate_train(1, list(stage.replies(1).values()))
    action = LATER.get(method, "")
    sent = stage.strategy.train_messages(2, [0], action=action)
    assert sent[0].content.array_records
    sent[0].content = replaced(sent[0].content, make)
    exchange = send_receive(stage.grid, {0: sent[0]}, timeout=60)
    assert not exchange.replies
    reason = exchange.failures[0].reason
    assert "holds no plain array" in reason or "is stored as pickle" in reason
    assert not Bomb.opened


def nothing(content: RecordDict) -> RecordDict:
    return RecordDict({"metrics": content["metrics"]})


def random_bytes(content: RecordDict) -> RecordDict:
    return replaced(
        content, lambda: Array("f", (1,), "numpy.ndarray", bytes(range(256)))
    )


def truncated(content: RecordDict) -> RecordDict:
    name = next(iter(content.array_records))
    first = next(iter(content.array_records[name].values()))
    short = Array(first.dtype, first.shape, first.stype, first.data[:-3])
    return replaced(content, lambda: short)


def a_config_in_its_place(content: RecordDict) -> RecordDict:
    name = next(iter(content.array_records))
    return RecordDict({**content, name: ConfigRecord({"x": 1})})


def one_array_too_many(content: RecordDict) -> RecordDict:
    name = next(iter(content.array_records))
    arrays = {**content.array_records[name], **write_tensors({"more": torch.ones(1)})}
    return RecordDict({**content, name: ArrayRecord(arrays)})


def an_empty_text(content: RecordDict) -> RecordDict:
    """Make Flower's byte count fail on an empty text."""
    return RecordDict({**nothing(content), "odd": ConfigRecord({"x": ""})})


def an_empty_list(content: RecordDict) -> RecordDict:
    """Make Flower's byte count fail on an empty list."""
    return RecordDict({**nothing(content), "odd": ConfigRecord({"x": []})})


def another_methods(content: RecordDict) -> RecordDict:
    other = write_tensors({"conv.weight": torch.ones(3, 3)})
    return RecordDict({"metrics": content["metrics"], "elsewhere": other})


GARBAGE = (
    nothing,
    random_bytes,
    truncated,
    a_config_in_its_place,
    one_array_too_many,
    an_empty_text,
    an_empty_list,
    another_methods,
)


@pytest.mark.parametrize("method", UPLOADING)
def test_malformed_uploads_are_rejected_and_logged(method: str, stage: Stage) -> None:
    replies = stage.replies(1)
    whole = replies[1].content
    for spoil in GARBAGE:
        stage.strategy.loop.log = RoundLog(1)
        replies[1].content = spoil(whole)
        assert sorted(stage.strategy.read_uploads(replies)) == [0, 2], spoil
        (failure,) = stage.strategy.loop.log.failures
        assert failure.partition_id == 1


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
