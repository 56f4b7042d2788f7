"""Which parts of Flower the package uses, and that they are where it looks for them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)

from flower_fgl.core import flower_internals
from flower_fgl.core.flower_internals import (
    answer_message,
    message_like,
    plain_array,
    plain_content,
    plain_metrics,
    plain_record,
    recorddict_to_proto,
    reply_with,
)
from flower_fgl.simulation.local_grid import task_identity

ROOT = Path(flower_internals.__file__).parents[2]
HOME = Path(flower_internals.__file__)
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
PUBLIC |= {"flwr.simulation"}
PRIVATE = {
    "flwr.common.config": {"parse_config_args"},
    "flwr.common.constant": {"ErrorCode"},
    "flwr.common.serde": {
        "context_from_proto",
        "context_to_proto",
        "message_from_proto",
        "message_to_proto",
        "recorddict_from_proto",
        "recorddict_to_proto",
    },
    "flwr.proto.message_pb2": {"Context", "Message"},
    "flwr.proto.recorddict_pb2": {"RecordDict"},
    "flwr.supercore.exit": {"add_exit_handler"},
    "flwr.supercore.run": {"Run"},
    "flwr.supercore.task_identity": {"TaskIdentity"},
}


def flower_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import from Flower in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = str(node.module)
            if module.partition(".")[0] == "flwr":
                yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "flwr":
                    yield alias.name, ""


def test_one_module_imports_what_flower_does_not_document() -> None:
    found: dict[str, set[str]] = {}
    for module, name in flower_imports(HOME):
        if module not in PUBLIC:
            found.setdefault(module, set()).add(name)
    assert found == PRIVATE


@pytest.mark.thorough
def test_all_other_files_import_documented_names_only() -> None:
    folders = ("flower_fgl", "benchmarks", "examples", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert HOME in files
    for path in files:
        for module, name in flower_imports(path) if path != HOME else ():
            assert module in PUBLIC, f"{path}: {module}"
            assert name in importlib.import_module(module).__all__, f"{path}: {name}"


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in PRIVATE.items() for n in sorted(names)]
)
def test_flower_has_the_undocumented_name(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.thorough
def test_all_other_files_leave_the_attributes_of_flowers_objects_alone() -> None:
    builders = {"Array", "ArrayRecord", "ConfigRecord", "MetricRecord", "RecordDict"}
    builders |= {"Message", "Metadata", "Context", "Error"}
    inner = {"_data", "_metadata", "_content", "_message_id", "_created_at"}
    for path in (ROOT / "flower_fgl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if path == HOME:
                continue
            if isinstance(node, ast.Attribute) and node.attr == "__new__":
                assert getattr(node.value, "id", "") not in builders, path
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                assert node.slice.value not in inner, f"{path}:{node.lineno}"


# ------------------------------------------- objects built without the constructors
def about(message: Message) -> dict[str, Any]:
    """Return the metadata without the times."""
    known = vars(message.metadata)
    return {n: v for n, v in known.items() if n not in ("_created_at", "_ttl")}


def fields_of(record: object) -> dict[str, Any]:
    """Return the fields of a record without the mark that Flower adds at the first use."""
    return {n: v for n, v in vars(record).items() if n != "_is_dirty"}


def test_messages_are_those_of_flowers_constructor() -> None:
    content = RecordDict({"c": ConfigRecord({"n": 1})})
    with task_identity(9):
        sent = Message(content, 5, "train", group_id="3", dst_task_id=8)
        other = Message(content, 6, "train", group_id="3", dst_task_id=8)
        like = message_like(sent, content, dst_node_id=6)
        reply = answer_message(sent, "m", content)
        expected = Message(content, reply_to=sent)
        failed = answer_message(sent, "m", Error(2, "no power"))
    assert failed.error.reason == "no power"
    assert about(failed) == about(expected)
    for made, right in ((like, other), (reply, expected)):
        assert vars(made).keys() == vars(right).keys()
        assert about(made) == about(right)
        assert made.content is content
        assert not made.has_error()
        assert made.metadata.ttl == pytest.approx(right.metadata.ttl, abs=1)
        assert made.metadata.created_at == pytest.approx(
            right.metadata.created_at, abs=1
        )


def test_a_reply_says_nothing_of_the_delivery_of_its_message() -> None:
    content = RecordDict({"c": ConfigRecord({"n": 1})})
    with task_identity(9):
        sent = Message(content, 5, "train")
        sent.metadata.delivered_at = "2026-01-01T00:00:00"  # as by a SuperLink
        reply, right = reply_with(sent, content), Message(content, reply_to=sent)
    assert reply.metadata.delivered_at == ""
    assert about(reply) == about(right)


def test_records_are_those_of_flowers_constructors() -> None:
    array = Array("float32", (2,), "numpy.ndarray", b"1234")
    made = plain_array("float32", (2,), b"1234")
    assert vars(made) == vars(array)
    records = ArrayRecord({"a": array}), MetricRecord({"x": 1, "y": 0.5})
    plain = plain_record({"a": made}), plain_metrics({"x": 1, "y": 0.5})
    for one, other in zip(plain, records, strict=True):
        assert fields_of(one) == fields_of(other)
        assert one.object_id == other.object_id  # what a deployment transmits
    whole = plain_content({"r": plain[0], "m": plain[1]})
    same = RecordDict({"r": records[0], "m": records[1]})
    assert fields_of(whole) == fields_of(same)
    assert whole.object_id == same.object_id
    assert recorddict_to_proto(whole) == recorddict_to_proto(same)
    with pytest.raises(TypeError):
        plain_metrics({"x": "text"})  # type: ignore[dict-item]
