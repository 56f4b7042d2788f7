"""Ranks over datasets: hand numbers, the library's p-values, and the diagram."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scikit_posthocs
from matplotlib.figure import Figure

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.tables.ranks import draw_ranks, rank_rows

SCORES = {
    "a": [0.9, 0.8, 0.9, 0.9, 0.8],
    "b": [0.8, 0.9, 0.8, 0.8, 0.7],
    "c": [0.7, 0.7, 0.7, 0.8, 0.6],
}


def test_average_ranks_are_those_worked_out_by_hand() -> None:
    found = rank_rows(SCORES)
    # ranks of a: 1, 2, 1, 1, 1; b: 2, 1, 2, 2.5, 2; c: 3, 3, 3, 2.5, 3
    assert found.average == pytest.approx({"a": 1.2, "b": 1.9, "c": 2.9})
    assert list(found.average) == ["a", "b", "c"]
    # Demšar 2006, Table 5: q = 2.343 for three classifiers; CD = q √(3 · 4 / (6 · 5))
    assert found.critical_difference == pytest.approx(
        2.343 * (12 / 30) ** 0.5, abs=1e-3
    )
    assert "a 1.20, b 1.90, c 2.90" in str(found)
    assert "a rough value with 5 datasets" in str(found)


def test_p_values_are_those_of_scikit_posthocs() -> None:
    found = rank_rows(SCORES)
    expected = scikit_posthocs.posthoc_nemenyi_friedman(pd.DataFrame(SCORES))
    pd.testing.assert_frame_equal(found.p_values, expected)


def test_too_few_datasets_are_not_testable(tmp_path: Path) -> None:
    few = {name: values[:4] for name, values in SCORES.items()}
    found = rank_rows(few)
    assert found.why_not == (
        "3 rows on 4 datasets, at least 3 rows on 5 datasets are needed"
    )
    assert "Not testable" in str(found)
    with pytest.raises(ConfigError, match="needs tested ranks: 3 rows on 4 datasets"):
        draw_ranks(found, tmp_path / "x.svg")
    two = {name: SCORES[name] for name in "ab"}
    assert rank_rows(two).why_not.startswith("2 rows on 5 datasets")


def test_the_diagram_names_all_rows_and_is_the_same_each_time(tmp_path: Path) -> None:
    found = rank_rows(SCORES)
    for name in ("one.svg", "other.svg", "x.png"):
        draw_ranks(found, tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "other.svg").read_bytes()
    # matplotlib writes each text as a comment too; the library chooses the side of a name
    for name, rank in (("a", "1.20"), ("b", "1.90"), ("c", "2.90")):
        assert f"{name} ({rank})".encode() in one or f"({rank}) {name}".encode() in one
    assert b"critical difference 1.48" in one
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_an_ending_is_an_svg_file(tmp_path: Path) -> None:
    assert draw_ranks(rank_rows(SCORES), tmp_path / "x") == tmp_path / "x.svg"
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    with pytest.raises(RunError, match=r"Cannot write .*r\.foo: .*not supported.* svg"):
        draw_ranks(rank_rows(SCORES), tmp_path / "r.foo")


def test_a_picture_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = draw_ranks(rank_rows(SCORES), tmp_path / "x.svg")
    before = path.read_bytes()

    def fail(self: Figure, file: Any, **_: Any) -> None:
        with file if hasattr(file, "write") else file.open("wb") as target:
            target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        draw_ranks(rank_rows(SCORES), path)
    assert path.read_bytes() == before
    monkeypatch.undo()
    with pytest.raises(RunError, match="does not exist: create it first"):
        draw_ranks(rank_rows(SCORES), tmp_path / "nowhere" / "x.svg")


def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scikit_posthocs", None)
    with pytest.raises(ConfigError, match=r"pip install 'flower-fgl\[ranks\]'"):
        draw_ranks(rank_rows(SCORES), tmp_path / "x.svg")


def test_rows_that_are_equal_everywhere_are_not_tested() -> None:
    found = rank_rows(dict.fromkeys("abc", [0.5] * 6))
    assert found.why_not == "the rows are equal on every dataset"
    assert set(found.average.values()) == {2.0}
