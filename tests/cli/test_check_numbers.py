"""Notes of ``check-graph`` on a file with numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.leaving import describe_leaving, said_once
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import INFO

NODES = 200
SETTINGS = {"target-kind": "numbers"}


def write(folder: Path) -> Path:
    """Write targets with holes, equal values, few values, and one value far away."""
    draw, ring = np.random.default_rng(0), np.arange(NODES)
    y = draw.normal(size=(NODES, 5))
    y[:50, 0] = np.nan
    y[:, 1] = 7.0
    y[4:, 2] = np.nan
    y[3, 3] = 4321.0
    y[:5, 4] = -9999.0
    np.savez(
        folder / "a.npz",
        x=draw.normal(size=(NODES, 3)).astype(np.float32),
        edges=np.stack([ring, (ring + 1) % NODES], axis=1),
        y=y,
        target_names=np.array(["holes", "equal", "few", "far", "marked"]),
        target_units=np.array(["g", "", "", "", ""]),
    )
    return folder / "a.npz"


def test_notes_name_unknown_few_equal_and_far_values_but_no_value(
    tmp_path: Path,
) -> None:
    report = inspect_graph(write(tmp_path), SETTINGS)
    assert not report.problems
    text = " ".join(report.notes)
    assert '"holes" is unknown for 25.0% of the nodes.' in text
    assert 'All 200 known values of "equal" are equal.' in text
    assert '"few" has ' in text
    assert "training values, fewer than 5." in text
    far = 'The {} value of "{}" ({} times) is more than 10 standard deviations from'
    assert far.format("largest", "far", 1) in text
    assert far.format("smallest", "marked", 5) in text  # 7 deviations with them
    assert text.count("standard deviations from") == 2
    assert "4321" not in text


def test_notes_on_a_set_are_about_all_of_its_graphs(tmp_path: Path) -> None:
    number = np.arange(NODES)
    np.savez(
        tmp_path / "a.npz",
        x=np.ones((NODES, 1), dtype=np.float32),
        edges=np.empty((0, 2), dtype=np.int64),
        graph_of_node=number,
        y=np.where(number % 4, 7.0, np.nan)[:, None] * [1, 0] + [0, 1],
        target_names=np.array(["equal", "one"]),
        graph_ids=number.astype(np.str_),
    )
    report = inspect_graph(tmp_path / "a.npz", SETTINGS | {"setting": "graph"})
    assert not report.problems
    text = " ".join(report.notes)
    assert 'All 150 known values of "equal" are equal.' in text


def test_what_leaves_names_all_fields_and_the_statistics(tmp_path: Path) -> None:
    report = inspect_graph(write(tmp_path), {**SETTINGS, "weight-by": "entries"})
    assert report.description is not None
    config = parse_config({**SETTINGS, "weight-by": "entries"})
    said = said_once(report.description, config)
    sent = report.description.to_record().config_records[INFO]
    assert set(sent) <= set(" ".join(said).split())
    assert said["target-units"] == "their units: g, none, none, none, none"
    shared = "mean and standard deviation of its values"
    for scale in ("shared", "own"):
        settings = {**SETTINGS, "target-scale": scale}
        lines = " ".join(describe_leaving(report.description, settings))
        assert (shared in lines) == (scale == "shared")
