"""The tables of the docs are those of the committed cells."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import scipy.stats

from flower_fgl.lab.tables.cells import read_cells, write_cells
from tests.support.written_cells import make_row

ROOT = Path(__file__).parents[1]
CELLS = ROOT / "docs" / "results" / "cells"


def load(name: str) -> ModuleType:
    """Load a script, whose name has no suffix."""
    loader = SourceFileLoader(f"{name}_script", str(ROOT / "scripts" / name))
    spec = spec_from_loader(f"{name}_script", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("tables")


@pytest.mark.thorough
def test_no_table_of_the_docs_is_stale(script: ModuleType) -> None:
    assert script.Tables(ROOT / "docs").update(is_check=True) == []


def test_cells_hold_hashes_of_all_draws_and_no_path() -> None:
    for cell in read_cells(CELLS):
        path = cell.experiment
        text = cell.to_json()
        assert not re.search(r"/(home|root|opt|tmp|work|Users)/", text), path
        scored = sum(len(o) for draw in cell.draws for o in draw.owners.values())
        # settings and versions; scores of each draw, and of each of its owners
        most = 6_000 + 1_200 * len(cell.draws) + 100 * scored
        assert len(text) < most, f"{path} is larger than a cell should be"
        assert cell.commit or cell.source_sha256, path
        seeds: dict[str, set[int]] = {}
        for draw in cell.draws:
            assert re.fullmatch("[0-9a-f]{64}", draw.partition), path
            seeds.setdefault(draw.partition, set()).add(draw.partition_seed)
        shared = [found for found in seeds.values() if len(found) > 1]
        # METIS seeds C's generator, for which 0 and 1 are the same seed
        fine = [[], [{0, 1}]]
        # owners' files, and one part with the published split, are alike in all draws
        if cell.settings.get("owners") or cell.place["clients"] == 1:
            fine.append([{draw.partition_seed for draw in cell.draws}])
        assert shared in fine, path


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Return a folder with one page and the cells of two experiments."""
    folder = tmp_path / "docs"
    for experiment, dataset in (("x", "cora"), ("y", "citeseer")):
        cells = []
        for order, row in enumerate(("local", "good")):
            scores = [0.5 + 0.1 * order + 0.01 * k for k in range(5)]
            cell = make_row(
                row, scores, dataset=dataset, experiment=experiment, order=order
            )
            cells.append(cell)
        write_cells(cells, folder / "results" / "cells")
    (folder / "page.md").write_text(
        "Before.\n\n<!-- table: x y -->\nold\n<!-- end of table -->\n\nAfter.\n"
    )
    return folder


def test_a_table_is_written_between_its_markers(script: ModuleType, docs: Path) -> None:
    tables = script.Tables(docs)
    assert tables.update(is_check=True) == [
        "docs/page.md has a stale table. Run scripts/tables."
    ]
    assert tables.update(is_check=False) == []
    text = (docs / "page.md").read_text()
    assert text.startswith("Before.\n\n<!-- table: x y -->\n\n|  | cora | citeseer |")
    assert text.endswith("\n\n<!-- end of table -->\n\nAfter.\n")
    assert "| local | 52.00 ± 1.58 |" in text
    assert tables.update(is_check=True) == []


def test_a_changed_cell_or_number_makes_a_table_stale(
    script: ModuleType, docs: Path
) -> None:
    script.Tables(docs).update(is_check=False)
    page, kept = docs / "page.md", (docs / "page.md").read_text()
    page.write_text(kept.replace("52.00", "53.00"))
    assert "stale" in script.Tables(docs).update(is_check=True)[0]
    page.write_text(kept)
    path = docs / "results" / "cells" / "x.jsonl"
    path.write_text(path.read_text().replace("0.54", "0.55"))
    assert "stale" in script.Tables(docs).update(is_check=True)[0]


def test_missing_markers_cells_and_pages_are_named(
    script: ModuleType, docs: Path
) -> None:
    page = docs / "page.md"
    page.write_text("<!-- table: x -->\n")
    first, *unused = script.Tables(docs).update(is_check=True)
    assert first == "docs/page.md: a table lacks the marker <!-- end of table -->."
    assert [text.partition(":")[0] for text in unused] == [
        "docs/results/cells/x.jsonl", "docs/results/cells/y.jsonl",
    ]  # fmt: skip
    page.write_text("<!-- table: x y z -->\n<!-- end of table -->\n")
    (problem,) = script.Tables(docs).update(is_check=True)
    assert "cells/z.jsonl holds no cells" in problem
    page.write_text("<!-- table: x y --row best -->\n<!-- end of table -->\n")
    (problem,) = script.Tables(docs).update(is_check=True)
    assert 'The table has no row "best"' in problem


def test_a_picture_of_the_ranks_is_part_of_the_check(
    script: ModuleType, docs: Path
) -> None:
    cells = docs / "results" / "cells"
    shutil.rmtree(cells)
    for number, dataset in enumerate("abcde"):
        rows = [
            make_row(
                row,
                [0.5 + 0.1 * order + 0.01 * number],
                dataset=dataset,
                experiment=f"r-{dataset}",
            )
            for order, row in enumerate(("one", "two", "three"))
        ]
        write_cells(rows, cells)
    (docs / "page.md").write_text(
        "<!-- table: r-* --ranks ranks.svg -->\n<!-- end of table -->\n"
    )
    tables = script.Tables(docs)
    assert tables.update(is_check=False) == []
    assert "![Average ranks](ranks.svg)" in (docs / "page.md").read_text()
    assert tables.update(is_check=True) == []
    picture = docs / "ranks.svg"
    picture.write_text(picture.read_text().replace("(1.00)", "(1.20)"))
    assert tables.update(is_check=True) == [
        "ranks.svg is stale or missing. Run scripts/tables."
    ]


def test_the_leads_of_opfgl_over_fedavg_are_those_of_the_cells() -> None:
    cells = read_cells(CELLS / "opfgl-table1-cora.jsonl")
    rows = {cell.row: cell for cell in cells if cell.place["clients"] == 10}
    page = (ROOT / "docs" / "results" / "opfgl.md").read_text("utf-8")
    draws = [rows[row].draws for row in ("opfgl", "fedavg, fine-tuned")]
    for title, metric in {"accuracy": "accuracy", "macro-F1": "macro_f1"}.items():
        scores = [
            [100 * draw.scores["own"]["test"][metric] for draw in row] for row in draws
        ]
        leads = [one - other for one, other in zip(*scores, strict=True)]
        printed = " | ".join(f"{lead:.1f}" for lead in [*leads, statistics.mean(leads)])
        assert f"| {title}, O-pFGL above FedAvg | {printed} |" in page
        half = scipy.stats.sem(leads) * scipy.stats.t.ppf(0.975, len(leads) - 1)
        mean = statistics.mean(leads)
        unit = " points" if metric == "accuracy" else ""
        interval = f"{mean - half:.1f} to {mean + half:.1f}{unit} of {title}"
        assert interval in " ".join(page.split())


def test_the_picture_of_gains_shows_the_cells() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gains"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gains_are_the_paired_differences_of_the_cells() -> None:
    gains = load("gains")
    found = gains.gains(CELLS)
    file = CELLS / "leaderboard-cora-metis-tuned.jsonl"
    rows = {cell.row: cell for cell in read_cells(file)}
    scores = {
        row: [100 * draw.scores["own"]["test"]["accuracy"] for draw in rows[row].draws]
        for row in ("fedavg", "local")
    }
    apart = [a - b for a, b in zip(scores["fedavg"], scores["local"], strict=True)]
    mean, half = found["fedavg"]["cora", "metis"]
    assert mean == pytest.approx(statistics.mean(apart))
    assert half == pytest.approx(2.2622 * statistics.stdev(apart) / 10**0.5, rel=1e-4)
    assert gains.stamp(found) in gains.PICTURE.read_text("utf-8")
    found["fedavg"]["cora", "metis"] = mean + 0.1, half
    assert gains.stamp(found) not in gains.PICTURE.read_text("utf-8")
