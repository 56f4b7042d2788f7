"""Contract of a method's messages: pickles and malformed uploads are rejected."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flower_fgl.protocols.base import write_tensors
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.testing.case import MethodCase, applies_to
from flower_fgl.testing.exchanges import Stage, StageContract

__all__ = ["GARBAGE", "PICKLES", "WireContract"]

uploads = applies_to(lambda case: case.row.uploads, "the method uploads nothing")


class Bomb:
    """Records whether a pickle was opened."""

    opened = False


def open_bomb() -> None:
    """Record that the pickle was opened, which calls this function."""
    Bomb.opened = True


PICKLE = f"c{open_bomb.__module__}\n{open_bomb.__name__}\n)R.".encode()
"""A pickle that calls ``open_bomb()``: GLOBAL, EMPTY_TUPLE, REDUCE, STOP."""


def pickled() -> Array:
    """Declare the bytes as a pickle."""
    return Array("object", (1,), "pickle", PICKLE)


def disguised() -> Array:
    """Declare a pickle as an array."""
    return Array("float32", (1,), "numpy.ndarray", PICKLE)


def of_objects() -> Array:
    """Put the pickle into an .npy file of objects."""
    stream = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    np.lib.format.write_array_header_1_0(stream, header)
    data = stream.getvalue() + PICKLE
    return Array("object", (1,), "numpy.ndarray", data)


PICKLES = (pickled, disguised, of_objects)


def replaced(content: RecordDict, make: Callable[[], Array]) -> RecordDict:
    """Replace the first array of a message."""
    out = RecordDict(dict(content))
    name = next(iter(content.array_records))
    arrays = dict(content.array_records[name])
    arrays[next(iter(arrays))] = make()
    out[name] = ArrayRecord(arrays)
    return out


def nothing(content: RecordDict) -> RecordDict:
    """Leave the upload out."""
    return RecordDict({"metrics": content["metrics"]})


def random_bytes(content: RecordDict) -> RecordDict:
    """Replace the first array by bytes that are no array."""
    return replaced(
        content, lambda: Array("f", (1,), "numpy.ndarray", bytes(range(256)))
    )


def truncated(content: RecordDict) -> RecordDict:
    """Leave out the last bytes of the first array."""
    name = next(iter(content.array_records))
    first = next(iter(content.array_records[name].values()))
    short = Array(first.dtype, first.shape, first.stype, first.data[:-3])
    return replaced(content, lambda: short)


def a_config_in_its_place(content: RecordDict) -> RecordDict:
    """Put a config under the name of the first arrays."""
    name = next(iter(content.array_records))
    return RecordDict({**content, name: ConfigRecord({"x": 1})})


def one_array_too_many(content: RecordDict) -> RecordDict:
    """Add an array to the first ones."""
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
    """Put the upload of another method into its place."""
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


class WireContract(StageContract):
    """No pickle is opened, and a malformed upload costs one client one round."""

    @uploads
    def test_a_pickled_upload_is_rejected_unopened_and_logged(
        self, case: MethodCase, stage: Stage
    ) -> None:
        Bomb.opened = False
        replies = stage.replies(1)
        whole = replies[1].content
        for make in PICKLES:
            stage.strategy.loop.log = RoundLog(1)
            replies[1].content = replaced(whole, make)
            assert sorted(stage.strategy.read_uploads(replies)) == [0, 2], make
            (failure,) = stage.strategy.loop.log.failures
            assert failure.partition_id == 1
            assert not Bomb.opened, make

    @uploads
    def test_a_pickled_download_is_rejected_unopened(
        self, case: MethodCase, stage: Stage
    ) -> None:
        Bomb.opened = False
        stage.strategy.aggregate_train(1, list(stage.replies(1).values()))
        for make in PICKLES:
            sent = stage.strategy.train_messages(2, [0], action=case.download_action)
            assert sent[0].content.array_records
            sent[0].content = replaced(sent[0].content, make)
            exchange = send_receive(stage.grid, {0: sent[0]}, timeout=60)
            assert not exchange.replies, make
            reason = exchange.failures[0].reason
            assert "holds no plain array" in reason or "is stored as pickle" in reason
            assert not Bomb.opened, make

    @uploads
    def test_malformed_uploads_are_rejected_and_logged(
        self, case: MethodCase, stage: Stage
    ) -> None:
        replies = stage.replies(1)
        whole = replies[1].content
        for spoil in GARBAGE:
            stage.strategy.loop.log = RoundLog(1)
            replies[1].content = spoil(whole)
            assert sorted(stage.strategy.read_uploads(replies)) == [0, 2], spoil
            (failure,) = stage.strategy.loop.log.failures
            assert failure.partition_id == 1
