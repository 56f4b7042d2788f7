from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.secure_aggregation.quantization import (
    decode,
    encode,
    largest_steps,
)

SHAPES = {"b": (2,), "a": (1, 3), "n": ()}


def tensors(values: list[float]) -> dict[str, torch.Tensor]:
    flat = torch.tensor(values, dtype=torch.float64)
    return {"b": flat[:2], "a": flat[2:5].reshape(1, 3), "n": flat[5]}


def test_numbers_by_hand() -> None:
    # with 2 bits a step is 1/4: 1.3 is nearest to 5 steps, -0.5 is -2 steps
    vector = encode({"a": torch.tensor([1.3, -0.5])}, fraction_bits=2, summands=3)
    assert vector.tolist() == [5, 2**64 - 2]
    back = decode(vector, {"a": (2,)}, fraction_bits=2)["a"]
    assert back.tolist() == [1.25, -0.5]


@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 9), st.just(6)),
        elements=st.floats(-1e6, 1e6),
    ),
    st.integers(1, 32),
)
@example(np.array([[-194306.98218297] * 6, *[[-999999.36401311] * 6] * 4]), 32)
def test_a_decoded_sum_is_off_by_at_most_half_a_step_per_client(
    rows: np.ndarray, bits: int
) -> None:
    total = np.zeros(6, dtype=np.uint64)
    for row in rows:
        total += encode(tensors(row.tolist()), fraction_bits=bits, summands=len(rows))
    back = decode(total, SHAPES, fraction_bits=bits)
    half_steps = Fraction(len(rows), 2 ** (bits + 1))
    for index, name, place in [(0, "b", 0), (4, "a", (0, 2)), (5, "n", ())]:
        plain = sum(Fraction(float(row[index])) for row in rows)
        decoded = float(back[name][place])
        # a sum of more than 2^53 steps is rounded to the nearest double
        rounding = Fraction(float(np.spacing(abs(decoded)))) / 2
        assert abs(Fraction(decoded) - plain) <= half_steps + rounding


def test_whole_numbers_are_exact() -> None:
    counts = torch.tensor([0, 7, 2_400_000])
    vector = encode({"counts": counts}, fraction_bits=24, summands=100)
    back = decode(vector, {"counts": (3,)}, fraction_bits=24)["counts"]
    assert torch.equal(back, counts.double())


@pytest.mark.parametrize("summands", [1, 2, 3, 7, 100, 1000])
def test_the_largest_numbers_do_not_wrap_around(summands: int) -> None:
    steps = int(largest_steps(summands))
    assert steps * summands <= 2**63 - 1
    value = torch.tensor([float(steps), -float(steps)], dtype=torch.float64) / 2
    vector = encode({"a": value}, fraction_bits=1, summands=summands)
    total = np.zeros(2, dtype=np.uint64)
    for _ in range(summands):
        total += vector
    assert total.view(np.int64).tolist() == [steps * summands, -steps * summands]


def test_a_number_out_of_range_is_named_with_the_range() -> None:
    # (2^63 - 1)/4 steps of 2^-24 are 2^37 = 137,438,953,472
    value = torch.tensor([1.0, -2e11], dtype=torch.float64)
    with pytest.raises(PayloadError, match='"big" holds a number') as caught:
        encode({"big": value}, fraction_bits=24, summands=4)
    assert "[-1.37438953e+11, 1.37438953e+11]" in str(caught.value)
    assert "24 fractional bits and 4 clients" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(PayloadError, match='"w" has non-finite'):
        encode({"w": torch.tensor([0.0, value])}, fraction_bits=24, summands=3)


def test_the_order_of_the_tensors_does_not_matter() -> None:
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    other = {"b": torch.tensor([2.0]), "a": torch.tensor([1.0])}
    first, second = (encode(x, fraction_bits=8, summands=3) for x in (one, other))
    assert np.array_equal(first, second)


def test_a_sum_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        decode(np.zeros(5, dtype=np.uint64), SHAPES, fraction_bits=8)
