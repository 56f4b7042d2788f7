"""The example of banks: its generator, its tables and its scores."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.runs.saved_model import load_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "banks"
SMALL = {"banks": 3, "accounts": 120, "share": 0.2}


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import the modules of the example, and forget them afterwards."""
    names = ("generate", "federation", "pictures", "run", "transfers", "typed")
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


@pytest.fixture(scope="module")
def written(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small world and the folder of its tables."""
    folder = tmp_path_factory.mktemp("banks")
    return example["generate"].generate(folder, seed=1, **SMALL), folder


def test_the_patterns_are_those_of_the_page(example: Any) -> None:
    transfers = example["generate"].pattern_transfers
    members = [7, 1, 2, 3]
    assert transfers("fan-in", members) == [(1, 7, 0), (2, 7, 0), (3, 7, 0)]
    assert transfers("fan-out", members) == [(7, 1, 0), (7, 2, 0), (7, 3, 0)]
    assert transfers("cycle", members) == [(7, 1, 0), (1, 2, 1), (2, 3, 2), (3, 7, 3)]
    found = transfers("scatter-gather", members)
    assert found == [(7, 1, 0), (7, 2, 0), (1, 3, 1), (2, 3, 1)]
    with pytest.raises(ValueError, match="Unknown pattern"):
        transfers("ring", members)


def test_a_seed_gives_one_world_with_the_share_asked_for(example: Any) -> None:
    make = example["generate"].make_world
    one, same, other = (make(seed=seed, **SMALL) for seed in (1, 1, 2))
    assert np.array_equal(one.x, same.x)
    assert np.array_equal(one.source, same.source)
    assert not np.array_equal(one.x, other.x)
    assert np.isfinite(one.x).all()
    assert 0.2 <= one.is_laundering.mean() < 0.24
    assert set(one.pattern[one.is_laundering]) == {0, 1, 2, 3}
    # some patterns cross banks and some do not
    ends = one.is_laundering[one.source] & one.is_laundering[one.target]
    across = one.bank[one.source] != one.bank[one.target]
    assert (ends & across).any()
    assert (ends & ~across).any()


def test_the_tables_hold_every_edge_where_it_belongs(written: Any) -> None:
    world, folder = written
    pooled = load_graph_file(folder / "pooled")
    names = list(pooled.names)
    number = {name: i for i, name in enumerate(names)}
    whole = {tuple(edge) for edge in pooled.dataset.edge_index.T.tolist()}
    assert len(names) == len(world.bank) == 360
    found: set[tuple[int, int]] = set()
    outside = 0
    for folder_of_bank in sorted((folder / "banks").iterdir()):
        bank = load_graph_file(folder_of_bank)
        own = [number[name] for name in bank.names]
        edges = bank.dataset.edge_index.T.tolist()
        found |= {(own[a], own[b]) for a, b in edges}
        assert bank.outside is not None
        outside += len(bank.outside.own)
        assert set(bank.dataset.masks) == {"train", "val", "test"}
    assert found < whole
    # both owners list an edge between banks, as the whole graph has both directions
    assert len(found) + outside == len(whole)


def test_precision_counts_the_first_alerts(example: Any) -> None:
    precision = example["run"].precision_at
    scores = np.array([0.1, 0.9, 0.5, 0.4])
    truth = np.array([True, True, False, False])
    assert precision(scores, truth, 1) == 1.0
    assert precision(scores, truth, 2) == 0.5
    assert precision(scores, truth, 4) == 0.5


@pytest.mark.thorough
def test_the_example_runs(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "out"
    arguments = ["run.py", str(folder), "--rounds=2", "--draws=1", "--no-rehearsal"]
    monkeypatch.setattr(sys, "argv", arguments)
    example["run"].main()
    shown = capsys.readouterr().out
    assert "bank-b refuses the run" in shown
    assert "| fedgcn | " in shown
    assert len(list((folder / "draw-1" / "alerts").glob("*/*.csv"))) == 28
    assert {path.name for path in folder.glob("*.svg")} == {
        "patterns.svg",
        "scores.svg",
    }


def test_transfers_are_listed_in_order_and_described_by_earlier_ones(
    example: Any, tmp_path: Path
) -> None:
    transfers = example["transfers"]
    world = example["generate"].make_world(seed=1, **SMALL)
    transfers.write_transfers(tmp_path / "a", world, 0)
    graph = load_graph_file(tmp_path / "a", needs_labels=False)
    edges = graph.dataset.edges
    assert edges is not None
    assert edges.time is not None
    seen = (world.bank[world.source] == 0) | (world.bank[world.target] == 0)
    assert edges.num_edges == int(seen.sum())
    # the first days have no labels, all others have theirs
    assert torch.equal(edges.y < 0, edges.time < transfers.WARM_UP)
    assert int((edges.y == 1).sum()) == int(
        (world.is_odd & seen & (world.hour >= transfers.WARM_UP)).sum()
    )
    # later transfers change no feature of an account
    late = world.hour >= transfers.WARM_UP
    other = replace(world, amount=np.where(late, 1.0, world.amount))
    transfers.write_transfers(tmp_path / "b", other, 0)
    changed = load_graph_file(tmp_path / "b", needs_labels=False).dataset
    assert torch.equal(changed.x, graph.dataset.x)
    assert changed.edges is not None
    assert not torch.equal(changed.edges.x, edges.x)


def test_banks_train_on_their_transfers(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = example["transfers"]
    kept = {"fedavg": ("fedavg", "balanced"), "pooled": ("pooled", "none")}
    monkeypatch.setattr(transfers, "ROWS", kept)
    rows = transfers.one_draw(tmp_path, 2, 3, **SMALL)
    for row in rows:
        assert 0 < row["auprc"] <= 1
        assert list(row["banks"]) == ["bank-a", "bank-b", "bank-c"]
    assert transfers.table(rows).count("±") == 8
    assert transfers.bank_table(rows).count("±") == 6


def test_the_pooled_model_is_scored_as_in_its_run_where_one_bank_sees_all(
    example: Any, tmp_path: Path
) -> None:
    transfers = example["transfers"]
    world = example["generate"].make_world(seed=1, banks=1, accounts=300, share=0.2)
    transfers.write_transfers(tmp_path / "bank", world, 0)
    transfers.write_transfers(tmp_path / "all", world, None)
    for name in ("nodes.csv", "edges.csv"):
        both = [(tmp_path / place / name).read_text() for place in ("bank", "all")]
        assert both[0] == both[1]
    run = transfers.simulate(
        "fedavg", f"{tmp_path / 'all'}/", clients=1, rounds=3, evaluate="both",
        output_dir=str(tmp_path), **transfers.SETTINGS,
    )  # fmt: skip
    (found,) = transfers.score_banks(run, tmp_path / "all", world).values()
    row = run.rounds[load_model(run.path).card.round - 1]
    wanted = row["metrics"]["global"]["test"]
    for name in transfers.SCORES:
        assert getattr(found, name) == pytest.approx(wanted[name], abs=1e-6)


def test_typed_tables_hide_new_transfers_and_one_relation(
    example: Any, tmp_path: Path
) -> None:
    typed, world = example["typed"], example["generate"].make_world(seed=3, **SMALL)
    device = typed.draw_devices(world, 3)
    banks = [typed.Bank(world, device, number) for number in range(3)]
    lines = {}
    for bank in banks:
        for folder, is_new in (("banks", False), ("new", True)):
            bank.write(tmp_path / folder / bank.name, is_new=is_new)
            table = tmp_path / folder / bank.name / "nodes" / "transfer.csv"
            with table.open() as file:
                lines[folder, bank.name] = list(csv.DictReader(file))
        late = int((bank.hour >= typed.CUTS[1]).sum())
        before, after = lines["banks", bank.name], lines["new", bank.name]
        assert late > 0
        assert after[: len(before)] == before
        assert [line["label"] for line in after[len(before) :]] == [""] * late
        assert len(bank.flat()) == len(after)
        relations = (tmp_path / "banks" / bank.name / "relations.csv").read_text()
        assert ("yes" in relations) == (bank.name == typed.PRIVATE)
    used = [set(device[bank.own].tolist()) for bank in banks]
    assert used[0] & used[1]
