"""The example of airlines: its tables, its split and its typed graphs."""

from __future__ import annotations

import gzip
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_fgl.datasets.graph_files.graph_file import load_graph_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "airlines"
PORTS = [f"P{letter}{digit}" for letter in "AB" for digit in range(6)]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import the modules of the example, and forget them afterwards."""
    names = ("tables", "prepare")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]


@pytest.fixture
def airlines(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return two airlines; one flies every pair both ways, one a few routes."""
    monkeypatch.setattr(example["tables"], "MIN_ROUTES", 10)
    routes = [("AA", a, b) for a in PORTS for b in PORTS if a != b]
    routes += [("NA", PORTS[0], b) for b in PORTS[1:]]
    files = {
        "routes": [
            f"{code},1,{a},1,{b},1,{'Y' if b == PORTS[1] else ''},0,320 XXX"
            for code, a, b in routes
        ],
        "airports": [
            f'{n},"x","y","Z","{p}","E{p}",{n}.0,{2 * n}.0,{100 * n},1,"E","t","a","o"'
            for n, p in enumerate(PORTS[:-1])
        ],
        "planes": ['"Airbus A320","320","A320"'],
    }
    for name, lines in files.items():
        with gzip.open(tmp_path / f"{name}.dat.gz", "wt") as file:
            file.write("\n".join([*lines, ""]))
    return example["tables"].read_airlines(tmp_path)


def test_codes_are_no_holes_and_unknown_airports_have_no_place(airlines: Any) -> None:
    assert list(airlines) == ["AA", "NA"]
    one = airlines["AA"]
    assert one.airports["is_known"].tolist() == [1.0] * 11 + [0.0]
    is_unknown = (one.ends == 11).any(axis=0)
    assert (one.routes["distance"].to_numpy()[is_unknown] == 0).all()
    assert (one.routes["distance"].to_numpy()[~is_unknown] > 0).all()
    assert one.routes["is_flown_back"].all()
    assert not airlines["NA"].routes["is_flown_back"].any()


def test_both_directions_of_a_pair_are_in_one_part_at_all_airlines(
    example: Any, airlines: Any
) -> None:
    masks, part = example["tables"].split_routes(airlines, 3), {}
    for code, one in airlines.items():
        assert np.stack(list(masks[code].values())).sum(axis=0).tolist() == [1] * len(
            one.pair
        )
        for name, mask in masks[code].items():
            for pair in np.array(one.pair)[mask].tolist():
                assert part.setdefault(pair, name) == name
    other = example["tables"].split_routes(airlines, 4)
    assert (masks["AA"]["train"] != other["AA"]["train"]).any()


@pytest.mark.parametrize("is_padded", [False, True])
def test_files_hold_routes_airports_and_planes(
    is_padded: bool, example: Any, airlines: Any, tmp_path: Path
) -> None:
    one = airlines["AA"]
    masks = example["tables"].split_routes(airlines, 0)["AA"]
    graph = example["prepare"].typed_graph(one, masks, is_padded=is_padded)
    example["prepare"].write(tmp_path / "AA.npz", graph)
    found = load_graph_file(tmp_path / "AA.npz").dataset
    assert found.schema is not None
    assert found.schema.node_types == ("route", "airport", "plane")
    widths = {width for _, width in found.schema.widths}
    assert len(widths) == (1 if is_padded else 3)
    labels = found.y[found.y >= 0].tolist()
    assert labels == one.label.tolist()
    assert sum(labels) == 11
    assert one.flat().shape == (132, 4 + 2 * one.airports.shape[1] + 7)
