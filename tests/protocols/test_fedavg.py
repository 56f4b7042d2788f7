"""Arrays of many clients, packed and read at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.protocols.fedavg import Weights, read_alike, write_stacked
from flower_fgl.protocols.weights import EmbeddedWeights

SHAPES = {"w": (2, 3), "b": (3,), "s": (), "none": (0, 2)}


@pytest.fixture
def stacked(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the tensors of four clients; ``w`` is transposed in memory."""
    found = {n: torch.randn(4, *s, generator=generator) for n, s in SHAPES.items()}
    return {**found, "w": torch.randn(4, 3, 2, generator=generator).transpose(1, 2)}


def clients(stacked: dict[str, torch.Tensor]) -> dict[int, RecordDict]:
    records = write_stacked(stacked, 4)
    return {7 + k: RecordDict({"r": record}) for k, record in enumerate(records)}


def test_stacked_tensors_are_written_as_those_of_each_client(
    stacked: dict[str, torch.Tensor],
) -> None:
    alone = [write_tensors({n: t[k] for n, t in stacked.items()}) for k in range(4)]
    assert write_stacked(stacked, 4) == alone
    weights = [Weights({n: t[k] for n, t in stacked.items()}) for k in range(4)]
    packed = Weights.stacked_records(4, stacked)
    assert packed == [w.to_record() for w in weights]


def test_the_arrays_of_many_clients_are_read_bit_for_bit(
    stacked: dict[str, torch.Tensor],
) -> None:
    contents = clients(stacked)
    found = read_alike(contents, "r", SHAPES)
    assert list(found) == [7, 8, 9, 10]
    for pid, content in contents.items():
        alone = read_tensors(content, "r", SHAPES)
        assert list(found[pid]) == list(alone)
        for name, tensor in alone.items():
            assert torch.equal(found[pid][name], tensor)
            assert found[pid][name].dtype == torch.float32


def array_of(values: object, **changed: object) -> Array:
    array = write_tensors({"a": torch.as_tensor(values)})["a"]
    for name, value in changed.items():
        array.__dict__[name] = value
    return array


ONES = torch.ones(3)
BAD: dict[str, Callable[[], RecordDict]] = {
    "nan": lambda: with_b(array_of([1.0, float("nan"), 1.0])),
    "infinite": lambda: with_b(array_of([1.0, float("inf"), 1.0])),
    "too large": lambda: with_b(array_of([1.0, -1e16, 1.0])),
    "shape": lambda: with_b(array_of(torch.ones(4))),
    "other shape of that size": lambda: with_b(array_of(torch.ones(3, 1))),
    "type": lambda: with_b(array_of(ONES.double())),
    "integers": lambda: with_b(array_of(torch.ones(3, dtype=torch.int32))),
    "declared shape": lambda: with_b(array_of(ONES, shape=(1, 3))),
    "declared type": lambda: with_b(array_of(ONES, dtype="float64")),
    "storage": lambda: with_b(array_of(ONES, stype="pickle")),
    "short": lambda: with_b(array_of(ONES, data=array_of(ONES).data[:-1])),
    "long": lambda: with_b(array_of(ONES, data=array_of(ONES).data + b"0")),
    "big-endian": lambda: with_b(Array(np.ones(3, dtype=">f4"))),
    "other header": lambda: with_b(
        array_of(ONES, data=array_of(ONES).data.replace(b" \n", b"\n ", 1))
    ),
    "extra": lambda: with_b(array_of(ONES), c=array_of(ONES)),
    "missing": lambda: RecordDict({"r": ArrayRecord({"b": array_of(ONES)})}),
    "no record": RecordDict,
    "other record": lambda: RecordDict({"r": ConfigRecord({"b": 1})}),
}


def with_b(b: Array, **more: Array) -> RecordDict:
    """Return a content that is correct but for ``b`` and further entries."""
    record = write_tensors({n: torch.zeros(s) for n, s in SHAPES.items()})
    return RecordDict({"r": ArrayRecord({**record, "b": b, **more})})


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_record_is_left_to_the_reader_that_refuses_it(
    name: str, stacked: dict[str, torch.Tensor]
) -> None:
    contents = clients(stacked)
    good = read_alike(contents, "r", SHAPES)
    contents[8] = BAD[name]()
    found = read_alike(contents, "r", SHAPES)
    assert list(found) == [7, 9, 10]
    for pid, tensors in found.items():
        assert all(torch.equal(t, good[pid][n]) for n, t in tensors.items())
    with pytest.raises(PayloadError):
        read_tensors(contents[8], "r", SHAPES)


@pytest.mark.parametrize("entry", ["shape", "data"])
def test_an_error_in_one_record_does_not_reach_the_others(
    entry: str, stacked: dict[str, torch.Tensor]
) -> None:
    contents = clients(stacked)
    record = contents[8].array_records["r"]
    record["b"].__dict__[entry] = None
    assert list(read_alike(contents, "r", SHAPES)) == [7, 9, 10]


def test_no_client_and_no_entry_are_read() -> None:
    assert read_alike({}, "r", SHAPES) == {}
    assert read_alike({1: RecordDict({"r": ArrayRecord({})})}, "r", {}) == {}


def test_payloads_of_several_records_are_packed_and_read_as_each() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(5, 3, 2, generator=generator)}
    embedding = torch.randn(5, 4, generator=generator)
    each = [EmbeddedWeights({"w": weights["w"][k]}, embedding[k]) for k in range(5)]
    packed = EmbeddedWeights.stacked_records(5, weights, embedding)
    assert packed == [one.to_record() for one in each]
    packed[2]["embedding"] = write_tensors({"mean": torch.full((4,), torch.nan)})
    packed[3]["weights"] = write_tensors({"w": torch.zeros(2, 3)})
    found = EmbeddedWeights.read_alike(dict(enumerate(packed)), ({"w": (3, 2)}, (4,)))
    assert list(found) == [0, 1, 4]
    for pid, payload in found.items():
        assert torch.equal(payload.tensors["w"], each[pid].tensors["w"])
        assert torch.equal(payload.embedding, each[pid].embedding)


def test_payloads_with_checks_of_their_own_are_read_one_by_one() -> None:
    class Checked(Weights):
        @classmethod
        def from_record(cls, content: RecordDict, spec: Any) -> Self:
            raise PayloadError("refused")

    packed = Weights.stacked_records(2, {"w": torch.zeros(2, 3)})
    assert len(Weights.read_alike(dict(enumerate(packed)), {"w": (3,)})) == 2
    assert Checked.read_alike(dict(enumerate(packed)), {"w": (3,)}) == {}
