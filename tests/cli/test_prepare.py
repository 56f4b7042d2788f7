"""The ``prepare`` command, and the hash of the recipe in runs and predictions."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flower_fgl import simulate
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.leaving import said_once
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.tables.prepare import prepare_graph
from flower_fgl.methods import parse_config
from flower_fgl.runs.model_file import read_card
from flower_fgl.simulation.prediction import predict_graph
from tests.datasets.tables.layouts import RECIPE, VOCABULARY, bank
from tests.support.guides import ROOT, blocks, commands
from tests.support.owners import run_owners

OTHER = VOCABULARY.replace("18000", "17000")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def tables(seed: int) -> dict[str, str]:
    """Return the tables of a bank with 60 accounts."""
    draw = random.Random(seed)
    accounts = ["account,opened,balance,country,business,holder,fraud"]
    for i in range(60):
        fraud = draw.random() < 0.4
        balance = draw.uniform(100, 900) * (5 if fraud else 1)
        accounts.append(
            f"{seed}{i:018},2020-0{draw.randint(1, 9)}-11,{balance:.2f},"
            f"{draw.choice(['AT', 'DE', 'FR'])},{draw.choice(['yes', 'no'])},X,{int(fraud)}"
        )
    ends = [draw.sample(range(60), 2) for _ in range(120)]
    transfers = ["from,to,amount", *(f"{seed}{a:018},{seed}{b:018},5" for a, b in ends)]
    return {
        "accounts_csv": "\n".join([*accounts, ""]),
        "transfers_csv": "\n".join([*transfers, ""]),
    }


def graphs(folder: Path, vocabularies: list[str]) -> list[Path]:
    """Prepare the graph of one bank for each vocabulary."""
    found = []
    (folder / "graphs").mkdir()
    for number, vocabulary in enumerate(vocabularies, start=1):
        own = folder / f"bank-{number}"
        own.mkdir()
        recipe, paths = bank(own, vocabulary_toml=vocabulary, **tables(number))
        found.append(folder / "graphs" / f"bank-{number}")
        prepare_graph(recipe, paths, found[-1])
    return found


def test_a_bank_prepares_checks_trains_and_predicts(tmp_path: Path) -> None:
    paths = graphs(tmp_path, [VOCABULARY] * 2)
    recipe, own = bank(tmp_path, **tables(3))
    proposed = invoke("prepare", recipe, *own, "--propose", tmp_path / "proposed.toml")
    assert proposed.exit_code == 0
    assert "Read it before you send it" in proposed.output
    done = invoke("prepare", recipe, *own, "--output", tmp_path / "graphs" / "bank-3")
    assert done.exit_code == 0, done.output
    assert "accounts.csv: 60 nodes" in done.output
    assert "edges: 120, with 0 features" in done.output
    paths.append(tmp_path / "graphs" / "bank-3")
    sha256 = load_graph_file(paths[2]).prepared
    checked = invoke("check-graph", paths[2])
    assert f"prepared-sha256 = {sha256}" in checked.output
    run = run_owners(
        [{"graph": str(p)} for p in paths], tmp_path / "run", evaluate="both"
    )
    assert "refused" not in run.summary
    described = [client for client in run.clients if client["round"] == 0]
    assert {client["prepared"] for client in described} == {sha256}
    card = read_card(tmp_path / "run")
    assert card is not None
    assert card.prepared == sha256
    new = {
        name: "\n".join(line.rpartition(",")[0] for line in text.splitlines())
        for name, text in tables(4).items()
    }
    new["transfers_csv"] = tables(4)["transfers_csv"]
    bank(tmp_path, **new)
    recipe, own = (
        tmp_path / "recipe.toml",
        [tmp_path / "accounts.csv", tmp_path / "transfers.csv"],
    )
    done = invoke("prepare", recipe, *own, "--output", tmp_path / "new", "--no-labels")
    assert done.exit_code == 0, done.output
    output = tmp_path / "predicted.csv"
    done = invoke(
        "predict",
        "--model",
        tmp_path / "run",
        "--graph",
        tmp_path / "new",
        "--output",
        output,
    )
    assert done.exit_code == 0, done.output
    with output.open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["node"] for row in rows] == [f"4{i:018}" for i in range(60)]
    assert {row["predicted"] for row in rows} <= {"fraud", "ok"}


EDGES = """
[[nodes]]
from = "edges"
[[edges]]
table = "transfers.csv"
[edges.columns]
from = "source"
to = "target"
when = {kind = "time", format = "iso"}
amount = "number"
fraud = {kind = "label", classes = {1 = "fraud", 0 = "ok"}}
"""


@pytest.mark.parametrize("ending", ["", ".npz"])
def test_new_transfers_without_labels_keep_their_times(
    ending: str, tmp_path: Path
) -> None:
    draw, rows = random.Random(0), ["from,to,when,amount,fraud"]
    for i in range(120):
        one, other = draw.sample(range(20), 2)
        rows.append(f"{one},{other},2024-{1 + i // 28:02}-{1 + i % 28:02},{i},{i % 2}")
    recipe, table = tmp_path / "recipe.toml", tmp_path / "transfers.csv"
    recipe.write_text(EDGES, "utf-8")
    table.write_text("\n".join(rows), "utf-8")
    (tmp_path / "graphs").mkdir()
    for name in ("a", "b"):
        prepare_graph(recipe, [table], tmp_path / "graphs" / name)
    nodes = [{"graph": str(path)} for path in (tmp_path / "graphs").iterdir()]
    run_owners(nodes, tmp_path / "run", evaluate="both", setting="edge")
    table.write_text("\n".join(row.rpartition(",")[0] for row in rows), "utf-8")
    new = tmp_path / f"new{ending}"
    done = invoke("prepare", recipe, table, "--output", new, "--no-labels")
    assert done.exit_code == 0, done.output
    begin = 1711929600  # 2024-04-01: 3 · 28 transfers are before it
    assert len(predict_graph(tmp_path / "run", new)) == 120
    done = invoke(
        *("predict", "--model", tmp_path / "run", "--graph", new, "--from", begin),
        *("--output", tmp_path / "predicted.csv"),
    )
    assert done.exit_code == 0, done.output
    with (tmp_path / "predicted.csv").open() as file:
        times = [float(row["time"]) for row in csv.DictReader(file)]
    assert len(times) == 36
    assert min(times) == begin


def test_times_of_edges_without_listed_classes_are_left_out(tmp_path: Path) -> None:
    text = EDGES.replace(
        '{kind = "label", classes = {1 = "fraud", 0 = "ok"}}', '"label"'
    )
    (recipe := tmp_path / "recipe.toml").write_text(text, "utf-8")
    (table := tmp_path / "transfers.csv").write_text(
        "from,to,when,amount\n1,2,2024-01-01,3"
    )
    lines = prepare_graph(recipe, [table], tmp_path / "new", has_labels=False)
    note = "The times of edges are left out: for predict --from list the classes"
    assert any(line.startswith(note) for line in lines)
    edges = (tmp_path / "new" / "edges.csv").read_text()
    assert edges == "source,target,amount\n1,2,3.0\n"


def test_owners_with_another_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    paths = graphs(tmp_path, [VOCABULARY, OTHER, VOCABULARY])
    run = run_owners([{"graph": str(p)} for p in paths], tmp_path / "run")
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "bank-2"
    assert "another recipe or vocabulary" in refusal["reason"]
    with pytest.raises(
        DataError, match="bank-2: its features were prepared with another"
    ):
        simulate("fedavg", owners=str(tmp_path / "graphs"), rounds=1)
    with pytest.raises(RunError, match="prepared in different ways without a majority"):
        run_owners([{"graph": str(p)} for p in paths[:2]], tmp_path / "two")


def test_a_graph_made_in_another_way_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = graphs(tmp_path, [VOCABULARY] * 3)
    (paths[1] / "prepared.csv").unlink()
    run = run_owners([{"graph": str(p)} for p in paths], tmp_path / "run")
    assert "refused" not in run.summary
    assert "The graphs of bank-2 were not made by flower-fgl prepare" in caplog.text


def test_a_prediction_needs_the_vocabulary_of_the_training(tmp_path: Path) -> None:
    paths = graphs(tmp_path, [VOCABULARY, VOCABULARY, OTHER])
    run_owners(
        [{"graph": str(p)} for p in paths[:2]], tmp_path / "run", evaluate="both"
    )
    assert len(predict_graph(tmp_path / "run", paths[0])) == 60
    with pytest.raises(DataError, match="bank-3 was prepared with another recipe"):
        predict_graph(tmp_path / "run", paths[2])


def test_a_simulation_of_owners_saves_the_hash_with_its_model(tmp_path: Path) -> None:
    paths = graphs(tmp_path, [VOCABULARY] * 2)
    folder = str(tmp_path / "graphs")
    for number in range(2):  # built, then read from the cache
        simulate(
            "fedavg",
            owners=folder,
            rounds=1,
            run_dir=str(tmp_path / f"{number}"),
        )
        card = read_card(tmp_path / f"{number}")
        assert card is not None
        assert card.prepared == load_graph_file(paths[0]).prepared


def test_check_graph_says_that_a_hash_of_the_recipe_leaves(tmp_path: Path) -> None:
    recipe, own = bank(tmp_path)
    prepare_graph(recipe, own, tmp_path / "graph")
    description = inspect_graph(tmp_path / "graph", {}).description
    assert description is not None
    said = said_once(description, parse_config({}))
    assert "a hash of the recipe and vocabulary" in said["prepared-sha256"]
    (tmp_path / "graph" / "prepared.csv").write_text("sha256\nabc\n")
    (problem,) = inspect_graph(tmp_path / "graph", {}).problems
    assert 'hash of 64 digits as flower-fgl prepare writes it, got "abc"' in problem


def test_the_guide_prints_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = ROOT / "docs" / "prepare.md"
    monkeypatch.chdir(tmp_path)
    tables = zip(("accounts.csv", "transfers.csv"), blocks(guide, "csv"), strict=True)
    for name, block in tables:
        Path(name).write_text(block.text)
    recipe, vocabulary, typed, of_set = blocks(guide, "toml")
    Path(recipe.file).write_text(recipe.text)
    (printed,) = blocks(guide, "text")
    outputs = {}
    for block in blocks(guide, "bash"):
        for command in commands(block):
            if command.words[1] == "prepare":
                result = invoke(*command.words[1:])
                assert result.exit_code == 0, result.output
                outputs[command.words[-1]] = result.output
    assert Path("vocabulary.toml").read_text() == vocabulary.text.partition("\n")[2]
    assert outputs["bank-a"] == printed.text
    Path("vocabulary.toml").write_text(
        "[nodes.card.numbers]\nopened = {mean = 0, std = 1, median = 0}\n"
        '[nodes.card.categories]\nnetwork = ["visa"]\n'
    )
    Path(typed.file).write_text(typed.text)
    Path("cards.csv").write_text("card,opened,network,fraud\nc1,1970-01-03,visa,0\n")
    Path("payments.csv").write_text("card,device,amount\nc1,d1,5\nc1,d2,6\n")
    arguments = ("cards.csv", "payments.csv", "--output", "typed")
    result = invoke("prepare", typed.file, *arguments)
    assert result.exit_code == 0, result.output
    assert Path("typed/nodes/card.csv").read_text().splitlines() == [
        "id,label,opened,network=visa,network=(other)",
        "c1,ok,2.0,1,0",
    ]
    assert "device nodes: 2, with 0 features" in result.output
    Path("vocabulary.toml").write_text('[nodes.visit.categories]\nward = ["a"]\n')
    Path(of_set.file).write_text(of_set.text)
    Path("patients.csv").write_text("patient,household,back\np1,h1,1\np2,h1,0\n")
    Path("visits.csv").write_text("patient,visit,ward\np1,1,a\np2,1,b\n")
    Path("doses.csv").write_text("patient,visit,drug\np1,1,x\np2,1,x\n")
    names = ("patients.csv", "visits.csv", "doses.csv")
    result = invoke("prepare", of_set.file, *names, "--output", "set")
    assert result.exit_code == 0, result.output
    assert Path("set/graphs.csv").read_text().splitlines() == [
        "id,label,key",
        "p1,back,h1",
        "p2,well,h1",
    ]


def test_either_an_output_or_a_proposal_is_needed(tmp_path: Path) -> None:
    recipe, own = bank(tmp_path)
    both = ("--output", tmp_path / "graph", "--propose", tmp_path / "v.toml")
    for options in ((), both):
        result = invoke("prepare", recipe, *own, *options)
        assert isinstance(result.exception, ConfigError)
        assert "either --output" in str(result.exception)


def test_a_recipe_holds_the_vocabulary_or_names_its_file(tmp_path: Path) -> None:
    recipe, own = bank(
        tmp_path, recipe_toml=RECIPE.replace("vocabulary.toml", "lost.toml")
    )
    result = invoke("prepare", recipe, *own, "--output", tmp_path / "graph")
    assert isinstance(result.exception, DataError)
    assert "Cannot read" in str(result.exception)
    # a proposal needs none
    assert not invoke(
        "prepare", recipe, *own, "--propose", tmp_path / "lost.toml"
    ).exit_code
    assert not invoke("prepare", recipe, *own, "--output", tmp_path / "graph").exit_code
