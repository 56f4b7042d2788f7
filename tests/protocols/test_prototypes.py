from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.prototypes import (
    CountedTable,
    LocalPrototypes,
    Prototypes,
    no_prototypes,
)

TABLE = (4, 3, 5)
COUNTED = CountedTable(TABLE, most=9)


def upload(counts: torch.Tensor) -> LocalPrototypes:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*counts.shape, 5, generator=generator)
    return LocalPrototypes(values * (counts > 0)[..., None], counts)


@given(
    classes=st.integers(1, 9),
    hops=st.integers(1, 4),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_uploads_come_back_bit_for_bit_and_have_the_stated_size(
    classes: int, hops: int, seed: int, share: float
) -> None:
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 1000, (classes, hops)) * (
        draw.random((classes, hops)) < share
    )
    sent = upload(torch.from_numpy(counts))
    record = sent.to_record()
    back = LocalPrototypes.from_record(
        record, CountedTable((classes, hops, 5), int(counts.sum()))
    )
    assert torch.equal(back.values, sent.values)
    assert torch.equal(back.counts, sent.counts)
    present = int((counts > 0).sum())
    assert sent.num_bytes == 4 * present * (5 + 1)
    stored = sum(
        len(array.data) for array in record.array_records["prototypes"].values()
    )
    bitmap = -(-classes * hops // 8)
    assert stored == sent.num_bytes + bitmap + 3 * 128  # .npy headers of 128 bytes

    down = Prototypes(sent.values, sent.counts > 0)
    back_down = Prototypes.from_record(down.to_record(), (classes, hops, 5))
    assert torch.equal(back_down.values, down.values)
    assert torch.equal(back_down.present, down.present)
    assert down.num_bytes == 4 * present * 5


def test_nothing_is_zero_bytes() -> None:
    empty = no_prototypes(TABLE)
    assert empty.num_bytes == 0
    assert not Prototypes.from_record(empty.to_record(), TABLE).present.any()


def test_missing_prototypes_are_not_sent_as_zeros() -> None:
    counts = torch.zeros(TABLE[:2], dtype=torch.int64)
    counts[1, 2] = 7
    record = upload(counts).to_record().array_records["prototypes"]
    assert record["values"].shape == (1, 5)
    assert record["counts"].numpy().tolist() == [7]


def broken(**arrays: np.ndarray) -> RecordDict:
    """Return a good upload of two prototypes with some arrays replaced."""
    counts = torch.zeros(TABLE[:2], dtype=torch.int64)
    counts[0, 0], counts[3, 2] = 2, 9
    record = upload(counts).to_record().array_records["prototypes"]
    merged = {**record, **{name: Array(array) for name, array in arrays.items()}}
    return RecordDict({"prototypes": ArrayRecord(merged)})


GOOD = np.ones((2, 5), dtype=np.float32)
NAN = GOOD.copy()
NAN[1, 3] = np.nan
BEYOND = np.array([0b10000000, 0b00001000], dtype=np.uint8)  # bit 12 of bits 0 to 11


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"values": NAN}, "1 non-finite"),
        ({"values": -3e38 * GOOD}, r"size 3e\+38, expected at most 1e\+15"),
        ({"values": np.ones((2, 6), np.float32)}, r"shape \(2, 5\), got \(2, 6\)"),
        ({"values": np.ones((3, 5), np.float32)}, r"shape \(2, 5\), got \(3, 5\)"),
        ({"values": np.ones((2, 5))}, "float32"),
        ({"counts": np.array([3, 0], np.int32)}, "positive, got 0"),
        ({"counts": np.array([2, 10], np.int32)}, "10 nodes in a hop, .* described 9"),
        ({"counts": np.full(2, 2**31 - 1, np.int32)}, "described 9"),
        ({"counts": np.array([3, -1], np.int32)}, "positive, got -1"),
        ({"counts": np.array([3], np.int32)}, r"shape \(2,\)"),
        ({"counts": np.array([3.0, 1.0], np.float32)}, "int32"),
        ({"present": np.zeros(5, np.uint8)}, r"shape \(2,\)"),
        ({"present": BEYOND}, "beyond the 12 agreed on"),
        ({"weights": GOOD}, "exactly the entries"),
    ],
)
def test_malformed_uploads_are_refused(
    arrays: dict[str, np.ndarray], message: str
) -> None:
    LocalPrototypes.from_record(broken(), COUNTED)
    with pytest.raises(PayloadError, match=message):
        LocalPrototypes.from_record(broken(**arrays), COUNTED)


def without(name: str) -> RecordDict:
    record = broken().array_records["prototypes"]
    kept = {key: array for key, array in record.items() if key != name}
    return RecordDict({"prototypes": ArrayRecord(kept)})


def damaged() -> RecordDict:
    content = broken()
    record = content.array_records["prototypes"]
    bad = Array("float32", (2, 5), "numpy.ndarray", b"no array at all")
    return RecordDict({"prototypes": ArrayRecord({**record, "values": bad})})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecordDict(), "no array record"),
        (lambda: without("counts"), "exactly the entries"),
        (damaged, "no plain array"),
    ],
)
def test_missing_and_damaged_records_are_refused(
    make: Callable[[], RecordDict], message: str
) -> None:
    with pytest.raises(PayloadError, match=message):
        LocalPrototypes.from_record(make(), COUNTED)


def test_prototypes_of_too_few_nodes_are_withheld() -> None:
    counts = torch.tensor([[9, 2, 0], [4, 4, 4], [3, 9, 9], [0, 0, 0]])
    shared = torch.tensor([True, False, True, False])
    told = upload(counts).withhold(shared, 3)
    assert told.counts.tolist() == [[9, 0, 0], [0, 0, 0], [3, 9, 9], [0, 0, 0]]
    assert torch.equal(told.values != 0, upload(told.counts).values != 0)
    assert told.num_bytes == 4 * 4 * (5 + 1)
