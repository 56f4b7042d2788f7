"""Mutations of a reply's content, each with the reason for which it may be accepted.

A mutation takes a random generator and a reply's content. It returns a new content and the
key of :data:`BENIGN` under which the server may accept it, or ``""`` if the server must
drop the reply; or ``None`` if it does not apply. Contents are never changed in place.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

BENIGN = {
    "numbers": "finite numbers of plausible size: any weights may be uploaded",
    "counts": "counts that fit the client's description",
    "scores": "scores in [0, 1] for the described number of nodes",
    "telemetry": "loss, seconds, terms and process number are only logged",
    "no scores": "a client may omit its scores, then it is asked again or not counted, and "
    "its loss",
    "description": "any plausible description may be sent, see docs/security.md",
    "mask": "a vector that is not masked, or a secret that is not shared, as agreed: with "
    "secure aggregation the server cannot read single uploads. The sum is wrong, or the "
    "round or a later one fails",
    "nothing": "a FedSage+ client without hidden neighbors sends no generator; a judge "
    "without a finite gradient sends none, and the client with that generator is left out",
    "round": "the round of a client's state; it only decides what is sent and logged",
    "unread": "an entry of a description that nothing reads",
}
"""Reasons for which a mutated reply may be accepted."""

Mutant = tuple[RecordDict, str] | None
NUMPY = "numpy.ndarray"
LONG = "\x1b[31mx\n" * 3000
HUGE = [2**31 - 1, 2**31, 2**53, 2**61, 2**62, 2**63 - 1, 10**8, 10**15, -1, -(2**62)]
ODD = [float("inf"), float("-inf"), float("nan"), 1e308, -1e308, 1e38, 1e16, -1e300]
WRONG = [LONG, "", b"\x00" * 40, [], [1, 2], ["a", "a"], True, -1.5, *HUGE, *ODD]


def arrays_of(content: RecordDict) -> list[tuple[str, str]]:
    """Return the names of all arrays with the names of their records."""
    return [(r, n) for r, record in content.array_records.items() for n in record]


def with_array(content: RecordDict, record: str, name: str, array: Array) -> RecordDict:
    """Replace one array."""
    arrays = {**content.array_records[record], name: array}
    return RecordDict({**content, record: ArrayRecord(arrays)})


def with_metrics(content: RecordDict, **changes: Any) -> RecordDict:
    """Change metrics; ``None`` removes one."""
    return _changed(content, "metrics", MetricRecord, changes)


def with_info(content: RecordDict, **changes: Any) -> RecordDict:
    """Change entries of the record of a description; ``None`` removes one."""
    return _changed(content, "info", ConfigRecord, changes)


def _changed(
    content: RecordDict, name: str, kind: Any, changes: dict[str, Any]
) -> RecordDict:
    merged = {**content[name], **changes}
    kept = kind({k: v for k, v in merged.items() if v is not None})
    return RecordDict({**content, name: kept})


def npy(array: np.ndarray) -> bytes:
    return Array(array).data


def header(text: str, version: bytes = b"\x01\x00") -> bytes:
    """Return an .npy header with any text."""
    raw = text.encode("latin1") + b" " * (-(len(text) + 11) % 64) + b"\n"
    size = len(raw).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + raw


# ---------------------------------------------------------------- bytes of an array
def a_changed_header(draw: random.Random, content: RecordDict) -> Mutant:
    """Write a header that the library does not write, or a shape that does not fit."""
    places = arrays_of(content)
    if not places:
        return None
    record, name = draw.choice(places)
    old = content.array_records[record][name]
    body = old.data[10 + int.from_bytes(old.data[8:10], "little") :]
    dtype = np.dtype(old.dtype).str
    shape = tuple(old.shape)
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    choices: list[bytes] = [
        old.data[: draw.randrange(len(old.data) - len(body))],
        header(text.replace("False", "True")),
        header(text.replace(str(shape), str((10**23, *shape)))) + body,
        header(text.replace(str(shape), str((0, 10**23)))) + body,
        header(text.replace(str(shape), "(" + "[" * 4000)) + body,
        header(text.replace(str(shape), "(" * 200 + "1" + ")" * 200)) + body,
        header(text.replace(dtype, "|O")) + pickle.dumps({}),
        header(text.replace(dtype, ">f4" if dtype != ">f4" else "<f4")) + body,
        header(text.replace(dtype, "<f2")) + body,
        header(text.replace(dtype, "<f8" if dtype != "<f8" else "<i8")) + body,
        header(text + " " * 9000) + body,
        header(text.replace("{", "{'more': 1, ")) + body,
        header(text.replace("'", '"')) + body,
        header(text, b"\x02\x00") + body,
        header("__import__('os')") + body,
        header(text + "\x00") + body,
        old.data + b"\x00" * draw.choice([1, 4, 4096]),
        old.data[: len(old.data) - len(body)] if body else b"",
        body,
        b"",
        bytes(draw.randrange(256) for _ in range(draw.choice([1, 9, 10, 11, 200]))),
    ]
    if body:
        choices.append(old.data[:-1])
    data = draw.choice(choices)
    return with_array(content, record, name, Array(old.dtype, shape, NUMPY, data)), ""


def a_flipped_byte(draw: random.Random, content: RecordDict) -> Mutant:
    """Flip a byte of an array, in its header or its data."""
    places = arrays_of(content)
    if not places:
        return None
    record, name = draw.choice(places)
    old = content.array_records[record][name]
    start = 10 + int.from_bytes(old.data[8:10], "little")
    place = draw.choice([draw.randrange(start), draw.randrange(len(old.data))])
    data = bytearray(old.data)
    data[place] ^= draw.randrange(1, 256)
    array = Array(old.dtype, tuple(old.shape), NUMPY, bytes(data))
    is_real = np.dtype(old.dtype).kind == "f"
    reason = "" if place < start else "numbers" if is_real else "counts"
    return with_array(content, record, name, array), reason


def a_false_declaration(draw: random.Random, content: RecordDict) -> Mutant:
    """Declare another type, shape or encoding beside the bytes."""
    places = arrays_of(content)
    if not places:
        return None
    record, name = draw.choice(places)
    old = content.array_records[record][name]
    dtype, shape, data = old.dtype, tuple(old.shape), old.data
    made = draw.choice(
        [
            Array("object", shape, "pickle", pickle.dumps({})),
            Array("float16", shape, NUMPY, data),
            Array(dtype, (*shape, 1), NUMPY, data),
            Array(dtype, (2**61,), NUMPY, data),
            Array(dtype, shape, LONG, data),
            Array(LONG, shape, NUMPY, data),
        ]
    )
    return with_array(content, record, name, made), ""


# ---------------------------------------------------------------- numbers of an array
def numbers_that_cannot_be(draw: random.Random, content: RecordDict) -> Mutant:
    """Put one number that is not finite, or is too large, into an array."""
    array = _number_array(draw, content, "f")
    if array is None:
        return None
    record, name, values = array
    values.reshape(-1)[draw.randrange(values.size)] = draw.choice(
        [np.nan, np.inf, -np.inf, 1e38, -1e38, 3e38, 1e16, 1e20]
    )
    return with_array(content, record, name, Array(values)), ""


def all_numbers_huge(draw: random.Random, content: RecordDict) -> Mutant:
    """Fill all real arrays with a huge number, as an attack on the average does."""
    out, number = content, draw.choice([1e38, -1e38, 3e38, 1e18])
    places = [
        (r, n)
        for r, n in arrays_of(content)
        if np.dtype(content.array_records[r][n].dtype).kind == "f"
        and content.array_records[r][n].numpy().size
    ]
    for record, name in places:
        values = content.array_records[record][name].numpy()
        made = np.full_like(values, number)
        out = with_array(out, record, name, Array(made))
    return (out, "") if places else None


def other_numbers(draw: random.Random, content: RecordDict) -> Mutant:
    """Scale, negate or redraw real numbers, up to the largest accepted ones."""
    array = _number_array(draw, content, "f")
    if array is None:
        return None
    record, name, values = array
    factor = draw.choice([-1.0, 0.0, 1.5, 100.0, 1e6, 1e12])
    made = (values * factor).astype(values.dtype)
    if draw.random() < 0.3:
        made = np.full_like(values, draw.choice([1e15, -1e15, 1e-38, 0.0]))
    return with_array(content, record, name, Array(made)), "numbers"


def other_counts(draw: random.Random, content: RecordDict) -> Mutant:
    """Change integers: counts, bitmaps, labels."""
    array = _number_array(draw, content, "iu")
    if array is None:
        return None
    record, name, values = array
    limits = np.iinfo(values.dtype)
    choices = [0, 1, 7, limits.max, limits.min, limits.max - 1]
    number = draw.choice(choices)
    if draw.random() < 0.3:
        values[...] = number
    else:
        values.reshape(-1)[draw.randrange(values.size)] = number
    return with_array(content, record, name, Array(values)), "counts"


def counts_beyond_the_description(draw: random.Random, content: RecordDict) -> Mutant:
    """Claim 2³¹ − 1 nodes behind a prototype or a statistic."""
    for record in ("prototypes", "statistics"):
        counts = content.array_records.get(record, {}).get("counts")
        if counts is not None and counts.numpy().size:
            values = counts.numpy().copy()
            values.reshape(-1)[draw.randrange(values.size)] = draw.choice(
                [2**31 - 1, 2**30, 100_000]
            )
            return with_array(content, record, "counts", Array(values)), ""
    return None


def _number_array(
    draw: random.Random, content: RecordDict, kinds: str
) -> tuple[str, str, np.ndarray] | None:
    """Draw a non-empty array of numbers; return a copy."""
    places = [
        (r, n)
        for r, n in arrays_of(content)
        if np.dtype(content.array_records[r][n].dtype).kind in kinds
        and content.array_records[r][n].numpy().size
    ]
    if not places:
        return None
    record, name = draw.choice(places)
    return record, name, content.array_records[record][name].numpy().copy()


# ---------------------------------------------------------------- records
def other_arrays(draw: random.Random, content: RecordDict) -> Mutant:
    """Remove, add, rename or reshape an array."""
    places = arrays_of(content)
    if not places:
        return None
    record, name = draw.choice(places)
    arrays = dict(content.array_records[record])
    array, kind = arrays[name], draw.randrange(5)
    values = array.numpy()
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[draw.choice(["more", "", LONG])] = array
    elif kind == 2:
        arrays |= {f"x{i}": Array(np.zeros(1, np.float32)) for i in range(2000)}
    elif kind == 3:
        arrays = {f"{n}'" if n == name else n: a for n, a in arrays.items()}
    else:
        arrays[name] = Array(np.ascontiguousarray(values[None]))
    return RecordDict({**content, record: ArrayRecord(arrays)}), ""


def other_records(draw: random.Random, content: RecordDict) -> Mutant:
    """Remove, add or exchange a record."""
    name = draw.choice(sorted(content)) if content else ""
    kept = {n: r for n, r in content.items() if n != name}
    array = ArrayRecord({"x": Array(np.zeros(3, np.float32))})
    config: Any = ConfigRecord({"x": draw.choice(["", LONG, 2**62])})
    if not name:
        return RecordDict({"odd": array}), ""
    made: dict[str, Any] = draw.choice(
        [
            kept,
            {**kept, name: config},
            {**kept, name: MetricRecord({"x": 1.0})},
            {**kept, name: array},
            {**kept, f"{name}2": content[name]},
            {**content, "odd": config},
            {**content, LONG: array},
            {**content, **{f"r{i}": MetricRecord({}) for i in range(500)}},
            {},
        ]
    )
    # a description is one record; further records are not read
    reason = (
        "unread" if "info" in content and made.get("info") == content["info"] else ""
    )
    if not made and set(content) in ({"generator", "nodes"}, {"gradient"}):
        reason = "nothing"
    return RecordDict(made), reason


# ---------------------------------------------------------------- metrics
MANY_TERMS = {f"terms/{i}": 1.0 for i in range(20_000)}


def metrics_that_cannot_be(draw: random.Random, content: RecordDict) -> Mutant:
    """Change the metrics of a reply in a way that no client does."""
    metrics = content.metric_records.get("metrics")
    if metrics is None:
        return None
    scored = sorted({k.rpartition("/")[0] for k in metrics if k.count("/") == 2})
    inf, nan = float("inf"), float("nan")
    choices: list[dict[str, Any]] = [
        {"worker": [1, 2]},
        {"worker": -1},
        {"worker": 1.5},
        {"seconds/train": [1.0, 2.0]},
        {"seconds/train": draw.choice([inf, nan, -1.0, 1e300])},
        {"terms/x": draw.choice([inf, nan, 1e300])},
        {"terms/x": [1, 2]},
        {"terms/" + "x" * draw.choice([65, 26_000]): 1.0},
        {"terms/\x1b[31m": 1.0},
        {"terms/": 1.0},
        {"terms/a/b/c": 1.0},
        MANY_TERMS,
        {f"seconds/{i}": 1.0 for i in range(300)},
        {"odd": 1.0},
        {LONG: 1.0},
        {"": 1.0},
        {
            f"best/val/{m}": 0.5
            for m in ("num_nodes", "accuracy", "macro_f1", "macro_recall")
        },
        {"local/val": 1.0},
    ]
    if "loss" in metrics:
        choices += [{"loss": v} for v in (inf, nan, -inf, 1e300, [1.0])]
    for where in scored:
        mode = where.partition("/")[0]
        count = metrics[f"{where}/num_nodes"]
        choices += [
            {f"{where}/num_nodes": v}
            for v in (inf, nan, -1.0, 1.5, 1e15, 2**62, count + 1, None, [1.0])
        ]
        choices += [{f"{where}/accuracy": v} for v in (inf, -0.1, 1.1, 1e9, None)]
        choices += [
            {
                f"{mode}/{draw.choice(['train', 'x', LONG])}/{m}": v
                for m, v in (
                    ("num_nodes", 5.0),
                    ("accuracy", 1.0),
                    ("macro_f1", 1.0),
                    ("macro_recall", 1.0),
                )
            },
            {f"{where}/more": 1.0},
        ]
    return with_metrics(content, **draw.choice(choices)), ""


def other_metrics(draw: random.Random, content: RecordDict) -> Mutant:
    """Change metrics in a way that a client may."""
    metrics = content.metric_records.get("metrics")
    if metrics is None:
        return None
    scores = [k for k in metrics if k.count("/") == 2 and metrics[k] == metrics[k]]
    scores = [k for k in scores if not k.endswith("num_nodes")]
    choices: list[tuple[dict[str, Any], str]] = [
        ({"seconds/train": draw.random() * 1e6}, "telemetry"),
        ({"worker": draw.randrange(2**62)}, "telemetry"),
        ({"worker": None}, "telemetry"),
        ({"terms/x": draw.gauss(0, 1e6)}, "telemetry"),
    ]
    if "loss" in metrics:
        choices.append(({"loss": draw.choice([-1e15, 1e15, 0, -3.5])}, "telemetry"))
        choices.append(({"loss": None}, "no scores"))
    if scores:
        choices.append(({draw.choice(scores): draw.random()}, "scores"))
        choices.append(({draw.choice(scores): draw.choice([0.0, 1.0])}, "scores"))
        mode = draw.choice(scores).partition("/")[0]
        gone = [k for k in metrics if k.startswith(f"{mode}/")]
        choices.append((dict.fromkeys(gone), "no scores"))
    changes, reason = draw.choice(choices)
    return with_metrics(content, **changes), reason


# ---------------------------------------------------------------- descriptions
COUNTS = ("num-nodes", "num-edges", "num-train", "num-val", "num-test")


def a_description_that_cannot_be(draw: random.Random, content: RecordDict) -> Mutant:
    """Change a description in a way that no client does."""
    info = content.config_records.get("info")
    if info is None or "num-nodes" not in info:
        return None
    names: Any = info["class-names"]
    number: Any = info["num-train"]
    key = draw.choice([*COUNTS, "partition-id", "num-partitions", "num-features"])
    text = draw.choice(["model", "partition-sha256", "name", "scale"])
    choices: list[dict[str, Any]] = [
        {key: draw.choice([2**61, 2**62, 2**63 - 1, 10**13, -2, -(2**62)])},
        {key: draw.choice(["1", 1.0, True, [1], b"1", None])},
        {"partition-id": info["num-partitions"]},
        {"num-partitions": 10**8},
        {"num-train": info["num-nodes"] + 1},  # type: ignore[operator]
        {"num-nodes": number - 1},
        {"class-names": [*names, names[0]]},
        {"class-names": [str(i) for i in range(20_000)]},
        {"class-names": [*names[:-1], "x" * 26_000]},
        {"class-names": [*names[:-1], "a\nb"]},
        {"class-names": draw.choice([[], [1, 2], "a", None, 3])},
        {"class-counts": [number + 1, *[0] * (len(names) - 1)]},
        {"class-counts": [2**62] * len(names)},
        {"class-counts": [1] * (len(names) + 1)},
        {"class-counts": [-1] * len(names)},
        {"class-counts": draw.choice([[1.0] * len(names), "a", None])},
        {text: draw.choice([LONG, "x" * 26_000, "a\x1b[0m", 1, None, ["a"]])},
        {"scale": "other"},
        {"public-key": draw.choice([b"\x00" * 31, b"\x00" * 10**6, "x", 1, None])},
    ]
    return with_info(content, **draw.choice(choices)), ""


def another_description(draw: random.Random, content: RecordDict) -> Mutant:
    """Change a description in a way that a lying client may."""
    info = content.config_records.get("info")
    if info is None or "num-nodes" not in info:
        return None
    number: Any = info["num-train"]
    choices: list[dict[str, Any]] = [
        {"num-edges": draw.randrange(10**9)},
        {"num-nodes": draw.randrange(number, 10**9)},
        {"num-val": draw.randrange(10**6)},
        {"num-train": number + 1, "num-nodes": 10**9},
        {"class-counts": []},
        {"partition-id": 0},
        {"num-features": 5},
        {"model": "gat"},
        {"partition-sha256": "0" * 64},
        {"class-names": [f"other {n}" for n in info["class-names"]]},  # type: ignore[union-attr]
    ]
    reason = "description"
    if draw.random() < 0.2:
        choices, reason = [{"odd": draw.choice(["", LONG, 2**62])}], "unread"
    return with_info(content, **draw.choice(choices)), reason


def another_round(draw: random.Random, content: RecordDict) -> Mutant:
    """Answer the resume query with another round, or with none."""
    info = content.config_records.get("info")
    if info is None or "round" not in info:
        return None
    return with_info(content, round=draw.choice([*WRONG, None, 0, 1, 2])), "round"


MUTATIONS: list[Callable[[random.Random, RecordDict], Mutant]] = [
    a_changed_header,
    a_flipped_byte,
    a_false_declaration,
    numbers_that_cannot_be,
    all_numbers_huge,
    other_numbers,
    other_counts,
    counts_beyond_the_description,
    other_arrays,
    other_records,
    metrics_that_cannot_be,
    other_metrics,
    a_description_that_cannot_be,
    another_description,
    another_round,
]


def same(one: RecordDict, other: RecordDict) -> bool:
    """Return whether two contents have the same bytes."""
    return repr(dict(one)) == repr(dict(other))


def mutate(name: str, seed: int, content: RecordDict) -> tuple[RecordDict, str]:
    """Apply a mutation to a content; the reason is as in :data:`Mutant`."""
    mutation = next(m for m in MUTATIONS if m.__name__ == name)
    made = mutation(random.Random(seed), content)
    return (content, "") if made is None else made


def mutants(draw: random.Random, content: RecordDict) -> Iterator[tuple[str, int, str]]:
    """Yield mutants without end: name and seed of the mutation, key of ``BENIGN``."""
    able = [m for m in MUTATIONS if m(random.Random(0), content) is not None]
    while able:
        mutation, seed = draw.choice(able), draw.randrange(2**62)
        made = mutation(random.Random(seed), content)
        if made is not None and not same(made[0], content):
            yield mutation.__name__, seed, made[1]
