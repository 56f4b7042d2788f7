from __future__ import annotations

import dataclasses

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.adpfedgnn import MaskedWeights, SharedWeights, Sizes
from flower_fgl.protocols.base import write_tensors

SIZES = Sizes({"w": (3, 5), "b": (4,)}, {"n": (2,)}, weight=7.0)
P = 19


def upload_of(mask: Tensor) -> MaskedWeights:
    return MaskedWeights(
        torch.arange(1.0, P + 1) * mask, mask, {"n": torch.tensor([0.5, -1.0])}, 7
    )


def half() -> Tensor:
    return torch.arange(P) % 2 == 0  # 10 of 19


def test_masked_weights_come_back_and_have_the_stated_size() -> None:
    upload = upload_of(half())
    content = upload.to_record()
    back = MaskedWeights.from_record(content, SIZES)
    assert torch.equal(back.values, upload.values)
    assert torch.equal(back.mask, upload.mask)
    assert torch.equal(back.networks["n"], upload.networks["n"])
    assert back.weight == 7.0
    # 10 values, 19 bits in 3 bytes, 2 numbers of networks, n_i
    assert upload.num_bytes == 4 * 10 + 3 + 4 * 2 + 4
    arrays = content.array_records
    sent = [a.numpy() for record in arrays.values() for a in record.values()]
    assert sum(a.nbytes for a in sent) == upload.num_bytes


def test_a_large_number_of_nodes_comes_back_exactly() -> None:
    number = 2**24 + 1  # no float32
    upload = dataclasses.replace(upload_of(half()), weight=number)
    spec = SIZES._replace(weight=float(number))
    assert MaskedWeights.from_record(upload.to_record(), spec).weight == number


def test_a_mask_of_ones_is_not_sent() -> None:
    upload = upload_of(torch.ones(P, dtype=torch.bool))
    assert upload.num_bytes == 4 * P + 4 * 2 + 4
    back = MaskedWeights.from_record(upload.to_record(), SIZES)
    assert bool(back.mask.all())


def test_a_mask_of_zeros_sends_no_value() -> None:
    upload = upload_of(torch.zeros(P, dtype=torch.bool))
    back = MaskedWeights.from_record(upload.to_record(), SIZES)
    assert not back.mask.any()
    assert upload.num_bytes == 3 + 4 * 2 + 4


def changed(name: str, value: Tensor | None) -> RecordDict:
    content = upload_of(half()).to_record()
    record = content.array_records["masked"]
    if value is None:
        del record[name]
    else:
        record[name] = write_tensors({name: value})[name]
    return content


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bits", torch.zeros(4, dtype=torch.uint8), r"shape \(3,\), got \(4,\)"),
        ("bits", torch.zeros(3), "must be torch.uint8"),
        ("bits", torch.tensor([0, 0, 1], dtype=torch.uint8), "beyond the 19"),
        ("values", torch.zeros(9), r"shape \(10,\)"),
        ("values", torch.full((10,), torch.nan), "non-finite"),
        (
            "num-examples",
            torch.tensor([8], dtype=torch.int32),
            "must be 7, as in the client's description",
        ),
        ("values", None, "exactly the entries"),
    ],
)
def test_a_malformed_upload_is_refused(
    name: str, value: Tensor | None, message: str
) -> None:
    with pytest.raises(PayloadError, match=message):
        MaskedWeights.from_record(changed(name, value), SIZES)


def test_shared_weights_come_back_and_have_the_stated_size() -> None:
    weights = {"w": torch.randn(3, 5), "b": torch.randn(4)}
    shared = SharedWeights(weights, {"n": torch.randn(2)})
    assert shared.num_bytes == 4 * (P + 2)
    back = SharedWeights.from_record(shared.to_record(), SIZES)
    assert all(torch.equal(back.weights[name], weights[name]) for name in weights)
    wrong = SharedWeights({**weights, "b": torch.zeros(5)}, shared.networks)
    with pytest.raises(PayloadError, match="shape"):
        SharedWeights.from_record(wrong.to_record(), SIZES)


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta", 1.5), ("beta", -0.1), ("q", 1.01), ("k", 0), ("gamma-rl", 1.0)],
)
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"adpfedgnn.{key} must be"):
        parse_config({"method": "adpfedgnn", f"adpfedgnn.{key}": value})


def test_the_defaults_are_those_of_the_paper() -> None:
    method_config = parse_config({"method": "adpfedgnn"}).method_config
    found = dataclasses.asdict(method_config)
    paper = {"beta": 0.5, "k": 10, "lambda_mi": 0.3, "lambda_reg": 0.003}
    assert {key: found[key] for key in paper} == paper
