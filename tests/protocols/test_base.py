from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import (
    check_tensor,
    read_metrics,
    read_tensors,
    record_bytes,
    write_scores,
    write_tensors,
)
from flower_fgl.protocols.describe import ClassAgreement, Description, Rejection
from flower_fgl.protocols.fedavg import Weights


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
        elements=st.floats(-1e6, 1e6, width=32),
    )
)
def test_tensors_come_back_bit_for_bit(array: np.ndarray) -> None:
    tensor = torch.from_numpy(array.copy())
    content = RecordDict({"r": write_tensors({"a": tensor})})
    back = read_tensors(content, "r", {"a": tuple(tensor.shape)})["a"]
    assert torch.equal(back, tensor)


def test_training_in_place_leaves_the_message_and_its_source_as_they_were() -> None:
    source = torch.zeros(5)
    content = RecordDict({"r": write_tensors({"a": source})})
    source.add_(1.0)
    read_tensors(content, "r", {"a": (5,)})["a"].add_(1.0)
    assert read_tensors(content, "r", {"a": (5,)})["a"].tolist() == [0.0] * 5


def test_an_array_is_written_as_flower_would_write_it() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    ours = write_tensors({"a": torch.from_numpy(array)})["a"]
    assert ours == Array(array)


def test_a_transposed_tensor_keeps_its_values() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    content = RecordDict({"r": write_tensors({"a": tensor})})
    assert torch.equal(read_tensors(content, "r")["a"], tensor)


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=allow_pickle)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (Array("object", (1,), "numpy.ndarray", npy(np.array([{}]), allow_pickle=True)),
         "no plain array"),
        (Array("float32", (2,), "pickle", b"x"), "pickle"),
        (Array("float32", (2,), "numpy.ndarray", b"garbage"), "no plain array"),
        (Array("float32", (2,), "numpy.ndarray",
               npy(np.zeros(2, np.float32))[:-3]), "no plain array"),
        (Array("float64", (2,), "numpy.ndarray", npy(np.zeros(2))), "float32"),
        (Array("float32", (3,), "numpy.ndarray", npy(np.zeros(3, np.float32))),
         r"shape \(2,\), got \(3,\)"),
        (Array("float32", (2,), "numpy.ndarray",
               npy(np.array([1, np.nan], np.float32))), "1 non-finite"),
    ],
)  # fmt: skip
def test_a_malformed_array_is_refused_by_name(array: Array, words: str) -> None:
    content = RecordDict({"weights": ArrayRecord({"layer": array})})
    with pytest.raises(PayloadError, match=words) as error:
        Weights.from_record(content, {"layer": (2,)})
    assert "layer" in str(error.value)


def test_a_missing_or_unexpected_entry_is_named() -> None:
    content = RecordDict({"weights": write_tensors({"b": torch.zeros(1)})})
    with pytest.raises(PayloadError, match=r"\['a', 'b'\]"):
        Weights.from_record(content, {"a": (1,)})
    with pytest.raises(PayloadError, match="no array record"):
        Weights.from_record(RecordDict(), {"a": (1,)})


def test_large_finite_numbers_are_not_taken_for_infinite() -> None:
    tensor = torch.full((4,), 1e15)
    assert check_tensor("x", tensor) is tensor
    with pytest.raises(PayloadError, match=r"size 3e\+38, expected at most 1e\+15"):
        check_tensor("x", torch.full((4,), 3e38))


def test_scores_come_back_and_other_metrics_stay_out() -> None:
    val = {"num_nodes": 3.0, "accuracy": 0.5, "macro_f1": 0.4, "macro_recall": 0.3}
    scores = {"local": {"val": val}}
    flat = write_scores(scores)
    assert read_metrics(MetricRecord({**flat, "loss": 1.0})).scores == scores


def test_an_area_under_the_curve_may_be_among_the_scores() -> None:
    test = {"num_nodes": 3.0, "accuracy": 0.5, "macro_f1": 0.4, "macro_recall": 0.3}
    more = {"auroc": 0.25, "reliability": [0.5] * 90}
    scores = {"local": {"test": {**test, **more}, "val": test}}
    assert read_metrics(MetricRecord(dict(write_scores(scores)))).scores == scores


@pytest.mark.parametrize(
    "change",
    [
        {"num_nodes": 2.5},
        {"num_nodes": -1.0},
        {"num_nodes": math.nan},
        {"accuracy": 1e9},
        {"accuracy": math.nan},
        {"num_nodes": 0.0},
        {"auroc": 1.5},
        {"auroc": math.nan},
        {"extra": 1.0},
        {"reliability": [0.5] * 89},
        {"reliability": [-1.0] * 90},
        {"reliability": [math.nan] * 90},
        {"reliability": 0.5},
    ],
)
def test_scores_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    val = {"num_nodes": 3.0, "accuracy": 0.5, "macro_f1": 0.4, "macro_recall": 0.3}
    flat = write_scores({"local": {"val": {**val, **change}}})
    with pytest.raises(PayloadError, match="local/val"):
        read_metrics(MetricRecord(dict(flat)))


def test_scores_of_no_node_are_not_numbers() -> None:
    none = {"accuracy": math.nan, "macro_f1": math.nan, "macro_recall": math.nan}
    flat = write_scores({"local": {"val": {"num_nodes": 0, **none}}})
    assert (
        read_metrics(MetricRecord(dict(flat))).scores["local"]["val"]["num_nodes"] == 0
    )


@pytest.mark.parametrize(
    "loss", [{"loss": math.nan}, {"loss": math.inf}, {"loss": [1.0]}]
)
def test_a_loss_that_cannot_be_is_refused(loss: dict[str, object]) -> None:
    with pytest.raises(PayloadError, match="loss"):
        read_metrics(MetricRecord(loss))  # type: ignore[arg-type]


def test_a_loss_may_be_withheld() -> None:
    assert math.isnan(read_metrics(MetricRecord({"worker": 1})).loss)


def test_a_large_loss_names_the_largest_number() -> None:
    message = r'"loss" is 3\.45e\+37: numbers may be at most 1e\+15 .*feature-norm'
    with pytest.raises(PayloadError, match=message):
        read_metrics(MetricRecord({"loss": 3.45e37}))


def test_bytes_are_counted_per_record() -> None:
    content = RecordDict(
        {"weights": write_tensors({"a": torch.zeros(100)}), "c": ConfigRecord({"x": 1})}
    )
    counted = record_bytes(content)
    assert set(counted) == {"weights", "c"}
    assert 400 < counted["weights"] < 700


def description(**changes: object) -> Description:
    values = {
        "partition_id": 1, "num_partitions": 3, "num_nodes": 10, "num_edges": 9,
        "num_train": 2, "num_val": 4, "num_test": 4, "num_features": 5,
        "class_names": ("a", "b"), "class_counts": (1, 1), "model": "gcn",
        "partition_sha256": "ff",
    }  # fmt: skip
    return Description(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(1, 1), ()])
def test_a_description_comes_back(counts: tuple[int, ...]) -> None:
    sent = description(class_counts=counts)
    assert Description.from_record(sent.to_record()) == sent


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num-nodes", -1),
        ("num-nodes", True),
        ("num-nodes", 1.5),
        ("class-names", [1, 2]),
        ("class-names", ["a", "a"]),
        ("class-names", ["a", "b" * 301]),
        ("class-names", []),
        ("name", "two\nlines"),
        ("partition-id", -2),
        ("partition-id", -1),  # as of an owner that the server numbers
        ("class-counts", [1, 2, 3]),
        ("class-counts", [1, -2]),
        ("class-counts", ["1", "2"]),
        ("partition-id", 3),
        ("model", 3),
    ],
)
def test_a_malformed_description_is_refused(key: str, value: object) -> None:
    content = description().to_record()
    content["info"][key] = value  # type: ignore[index]
    with pytest.raises(PayloadError, match=key.partition("-")[0]):
        Description.from_record(content)


def test_an_owner_may_leave_its_number_to_the_server() -> None:
    sent = description(
        partition_id=-1, num_partitions=0, partition_sha256="", name="hospital-a"
    )
    got = Description.from_record(sent.to_record())
    assert got == sent
    assert got.is_owned
    assert not description().is_owned


def test_a_client_that_does_not_fit_says_so() -> None:
    sent = Rejection("hospital-b", "its file is damaged")
    assert Rejection.is_in(sent.to_record())
    assert not Rejection.is_in(description().to_record())
    assert Rejection.from_record(sent.to_record()) == sent
    assert sent.num_bytes == 10 + 19


def test_an_agreement_comes_back() -> None:
    sent = ClassAgreement(1, 3, ("flu", "Grippe ohne Fieber"))
    assert ClassAgreement.from_record(sent.to_record()) == sent
    assert sent.num_bytes == 16 + 3 + 18


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition-id", 3),
        ("partition-id", True),
        ("num-partitions", "3"),
        ("class-names", ["a", "a"]),
    ],
)
def test_a_malformed_agreement_is_refused(key: str, value: object) -> None:
    content = ClassAgreement(1, 3, ("a", "b")).to_record()
    content["agreement"][key] = value  # type: ignore[index]
    with pytest.raises(PayloadError):
        ClassAgreement.from_record(content)
