from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import ArrayPayload, check_ascending
from flower_fgl.protocols.base import pack_bits, unpack_bits


@dataclass(frozen=True)
class Rows(ArrayPayload):
    ids: Annotated[Tensor, torch.int64, "n", check_ascending]
    table: Annotated[Tensor, torch.uint8, "n", (2, 4)]
    records = ("rows",)


def rows(ids: list[int], *shape: int) -> Rows:
    return Rows(torch.tensor(ids), torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("width", [2, 4])
def test_arrays_come_back_with_each_allowed_size(width: int) -> None:
    sent = rows([1, 5, 9], 3, width)
    back = Rows.from_record(sent.to_record())
    assert torch.equal(back.ids, sent.ids)
    assert back.table.shape == (3, width)
    assert sent.num_bytes == 3 * 8 + 3 * width


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (rows([1, 5], 3, 2), r"shape \(2, 2\), got \(3, 2\)"),
        (rows([1, 5], 2, 3), r"shape \(2, 2\), got \(2, 3\)"),
        (rows([1, 5], 2), r"shape \(2, 2\), got \(2,\)"),
        (rows([5, 1], 2, 2), "strictly ascending"),
        (rows([5, 5], 2, 2), "strictly ascending"),
        (Rows(torch.ones(2), torch.ones(2, 2).byte()), "must be torch.int64"),
        (Rows(torch.tensor(1), torch.ones(1, 2).byte()), r"shape \(0,\), got \(\)"),
    ],
)
def test_other_sizes_types_and_orders_are_refused(sent: Rows, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        Rows.from_record(sent.to_record())


def test_a_size_that_is_known_is_demanded() -> None:
    content = rows([1, 5], 2, 2).to_record()
    Rows.from_record(content, {"n": 2})
    with pytest.raises(PayloadError, match=r"rows/ids.*shape \(3,\), got \(2,\)"):
        Rows.from_record(content, {"n": 3})


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_unpacking_bits_undoes_packing(entries: list[bool]) -> None:
    mask = torch.tensor(entries)
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == -(-len(entries) // 8)
    assert torch.equal(unpack_bits("mask", bits, len(entries)), mask)


def test_bits_of_another_length_are_rejected() -> None:
    bits = pack_bits(torch.ones(20, dtype=torch.bool))
    with pytest.raises(
        PayloadError, match=r'"mask" must have shape \(4,\), got \(3,\)'
    ):
        unpack_bits("mask", bits, 30)
    with pytest.raises(PayloadError, match="beyond the 18 agreed on"):
        unpack_bits("mask", bits, 18)
