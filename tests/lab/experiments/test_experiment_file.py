"""Experiment files, and the results tables made from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl import run_experiment
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.score_names import ScoreScale
from flower_fgl.lab.experiments.experiment_file import (
    read_experiment,
    read_tables,
)
from flower_fgl.lab.experiments.search_space import space_size
from flower_fgl.lab.results import Run
from flower_fgl.lab.tables.cells import read_cells
from flower_fgl.lab.tabulate import results_table
from flower_fgl.lab.tune.tuning import rows_to_tune
from flower_fgl.methods import parse_config
from flower_fgl.simulation.local import run_local

show_percent = ScoreScale().show_mean
FILES = sorted(
    path
    for path in (Path(__file__).parents[3] / "experiments").rglob("*.toml")
    if not path.stem.startswith("base")  # settings that other files extend
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_of_an_experiment_has_settings_that_parse(path: Path) -> None:
    experiment = read_experiment(path)
    runs = experiment.runs()
    for run in {run.row: run for run in runs}.values():  # draws differ in seeds only
        parse_config(run.settings)
    assert len({run.name for run in runs}) == len(runs)
    rows = {run.row for run in runs}
    for published in experiment.published.values():
        assert set(published) <= rows


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.stem.startswith("fedlog-")],
    ids=lambda path: path.stem,
)
def test_every_round_of_fedlogs_tables_is_scored(path: Path) -> None:
    # a selection among every fifth round moves missing classes by 12 points
    for run in {run.row: run for run in read_experiment(path).runs()}.values():
        assert parse_config(run.settings).evaluate_every == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.stem.startswith("fedpano-")],
    ids=lambda path: path.stem,
)
def test_every_few_shot_client_is_refreshed_before_it_is_scored(path: Path) -> None:
    for run in {run.row: run for run in read_experiment(path).runs()}.values():
        assert parse_config(run.settings).eval_policy == "refresh-all"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path",
    [path for path in FILES if "tune" in read_tables(path)],
    ids=lambda path: path.stem,
)
def test_every_row_of_a_tuned_table_can_use_the_same_budget(path: Path) -> None:
    for row in rows_to_tune(read_experiment(path)):
        # a space of fewer points would have fewer trials
        size = space_size(row.space, row.default)
        assert size is None or size >= 12, row.name


def test_the_tables_that_choose_fedlogs_optimizer_state_draw_partitions() -> None:
    tables = [
        path
        for path in FILES
        if path.stem.startswith("fedlog-table-") and not path.stem.endswith("-tuned")
    ]
    assert len(tables) == 14
    for experiment in map(read_experiment, tables):
        assert (
            experiment.draws >= 5
        )  # 46 missing-class nodes in one draw of the open set
        own = {f"fedlog.{key}" for key in ("optimizer-state", "lr", "beta")}
        assert own <= experiment.tune.keys()


FEW = """
[config]
dataset = "synthetic"
clients = 3
setting = "few-shot"
rounds = 1
synthetic.nodes = 400
synthetic.block-skew = 0.3
[[case]]
name = "a"
method = "local"
[grid]
partition-seed = [0, 1]
[published]
a = 50
[published-test-masked]
a = 61.25
"""


def test_a_settings_own_columns_stand_beside_what_is_published(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text(FEW)
    experiment = read_experiment(path)
    done = []
    for run in experiment.runs():
        place = str(tmp_path / run.name)
        done.append((run, run_local({**run.settings, "run-dir": place})))
    assert len({run.summary["partition_sha256"] for _, run in done}) == 2
    ((row,),) = results_table(experiment, done)
    best = [run.best["test_masked"] for _, run in done if run.best]
    assert row["own classes"] == show_percent([entry["accuracy"] for entry in best])
    assert row["mean, own classes"] == show_percent([e["mean_accuracy"] for e in best])
    assert row["published own classes"] == "61.25"
    for _, run in done:  # as if the runs had ended with fine-tuning
        run.summary["finetuned"] = run.summary["last"]
    ((tuned,),) = results_table(experiment, done)
    last = [run.last["test"]["accuracy"] for _, run in done if run.last]
    assert tuned["fine-tuned test acc"] == show_percent(last)
    assert {title: tuned[title] for title in row} == row
    for _, run in done:
        del run.summary["finetuned"]
    for _, run in done:  # as if the runs had 20 of the dataset's classes
        part = {"dataset": "amazon-clothing", "class_names": ["x"] * 20}
        run.summary.update(part)
    ((row,),) = results_table(experiment, done)
    assert row["published"] == row["published own classes"] == "– (20 of 77 classes)"
    assert "mean of clients" in row


def test_a_setting_of_the_grid_that_is_fixed_keeps_names_and_published_values(
    tmp_path: Path,
) -> None:
    path = tmp_path / "few.toml"
    few = FEW.replace("[grid]", "[grid]\nshots = [3, 5]").replace(
        "\na = ", '\n"a/5" = '
    )
    path.write_text(few)
    whole = read_experiment(path)
    part = whole.with_options({"shots": 5, "rounds": 2})
    names = [run.name for run in whole.runs()]
    assert [run.name for run in part.runs()] == names[2:]
    assert {run.settings["shots"] for run in part.runs()} == {5}
    assert {run.settings["rounds"] for run in part.runs()} == {2}
    assert [run.row for run in part.runs()] == [run.row for run in whole.runs()][2:]
    assert part.published == whole.published


def test_on_other_data_or_with_another_method_nothing_is_published(
    tmp_path: Path,
) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        f"{TWO}\n[published]\na = 1.0\nb = 2.0\n[published-macro-f1]\nb = 3.0\n"
        "[published-unseen]\nb = 4.0\n"
    )
    whole = read_experiment(path)
    other = whole.with_options({"dataset": "cora"})
    assert other.published == {}
    assert whole.published.keys() == {"accuracy", "macro_f1", "unseen"}
    assert whole.with_options({"label-sparsity": 0.5}).published == {}
    assert whole.with_options({"method": "fedavg"}).published["accuracy"] == {"b": 2.0}
    longer = whole.with_options({"rounds": 2, "dataset": "synthetic"})
    assert longer.published["accuracy"] == {"a": 1.0, "b": 2.0}


TWO = """
[config]
dataset = "synthetic"
clients = 3
rounds = 1
synthetic.nodes = 200
[[case]]
name = "a"
method = "local"
[[case]]
name = "b"
method = "fedavg"
"""


def test_an_option_takes_the_place_of_what_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        '[config]\nparticipants = 5\n[[case]]\nname = "a"\nparticipants = 4\n'
    )
    (run,) = read_experiment(path).with_options({"participation": 1.0}).runs()
    assert run.settings == {"participation": 1.0}


def test_a_published_value_of_no_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(f"{TWO}\n[published-unseen]\nA = 1.0\n")
    with pytest.raises(
        ConfigError, match=r'\[published-unseen\] names "A".*Known: a, b'
    ):
        read_experiment(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config = 3", r"\[config\] must be a table, got 3"),
        ("[config]\n[[grid]]\nlr = [0.1]", r"\[grid\] must be a table, got \[\{"),
        ("[config]\n[[published]]\nrun = 1", r"\[published\] must be a table"),
        ("[config]\n[published]\nrun = '81'", r'"run" must be a percentage .* \'81\''),
        ("[config]\n[published]\nrun = true", r"percentage from 0 to 100, got True"),
        ("[config]\n[published]\nrun = 810", r"percentage from 0 to 100, got 810"),
        (
            "[config]\n[published]\nlr.a = 80",
            r"A row with a dot in its name needs quotes",
        ),
        ("[config]\nlr = [0.1]", r"lr of \[config\] must be one value, got \[0.1\]"),
        (
            '[[case]]\nname="a"\nmethod=["local"]',
            r'method of case "a" must be one value',
        ),
        ("[grid]\nlr = [[0.1]]", r"value of grid.lr must be a single one, got \[0.1\]"),
        ("[grid]\nlr = []", r"grid.lr must be a list of values, got \[\]"),
        (
            '[grid]\nrounds = [1]\n[[case]]\nname = "a"\nrounds = 3',
            r'case "a" sets rounds, which \[grid\] varies. Remove one',
        ),
        ("title = 3\n[config]", "title must be a text, got 3"),
        ("output-dir = 4\n[config]", "output-dir must be a text, got 4"),
        ('output-dir = "a"\n[config]\noutput-dir = "b"', "output-dir is there twice"),
        ("[tuning]\nlr = [0.1]", r"lacks budget, .*search space is called \[tune\]"),
    ],
)
def test_a_part_of_another_type_is_named(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_experiment(path)


@pytest.mark.parametrize(
    ("file", "case", "message"),
    [
        ("odd", ".", r'odd.toml: the case "\." cannot be the name of a run folder'),
        ("odd", "..", r'the case "\.\." cannot be the name'),
        ("odd", "/", 'the case "/" cannot be the name'),
        ("odd", "", 'the case "" cannot be the name'),
        ("odd", r"a\nb", "the name of a case must be one line of text, got 'a.nb'"),
        ("..", "a", r'the experiment "\.\." cannot be the name'),
    ],
)
def test_no_run_folder_lies_outside_that_of_the_experiment(
    file: str, case: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{file}.toml"
    path.write_text(f'[[case]]\nname = "{case}"\nrounds = 1')
    with pytest.raises(ConfigError, match=message):
        read_experiment(path)


def test_a_row_that_cannot_name_a_folder_is_not_tuned(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        "draws = 2\n[config]\nrounds = 1\n[grid]\npositive-class = ['..']\n"
        "[tune]\nlr = [0.01, 0.1]"
    )
    with pytest.raises(ConfigError, match=r'odd: the row "\.\." cannot be the name'):
        rows_to_tune(read_experiment(path))


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[config]\nrounds = 7", encoding="utf-8-sig")
    assert read_experiment(path).config == {"rounds": 7}


TUNED = """
draws = 6
[tuning]
experiment = "e"
budget = 12
draws = [6]
metric = "validation accuracy"
study = "abc"
[tuning.trials]
a = 12
b = 12
[tuning.settings]
a = ["lr"]
b = ["lr"]
[config]
dataset = "synthetic"
clients = 3
rounds = 1
[[case]]
name = "a"
method = "local"
lr = 0.03
[[case]]
name = "b"
method = "fedavg"
lr = 0.01
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("draws = 6", "draws = 8", r"tuned on draw 6, so the table can .* 0 to 5 only"),
        ("draws = [6]", "draws = 6", r"\[tuning\] draws must be as .* wrote it, got 6"),
        ("draws = [6]", 'draws = ["6"]', "must be whole numbers"),
        ("budget = 12", 'budget = "x"', r"\[tuning\] budget must be as"),
        ("[tuning.trials]\na = 12\nb = 12", "trials = [1]", "trials must be as"),
        ('experiment = "e"\n', "", "lacks experiment"),
    ],
)
def test_a_tuned_file_that_somebody_edited_is_named(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "e-tuned.toml"
    path.write_text(TUNED.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_experiment(path)


def test_draws_for_tuning_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text("draws = 6\ntune-draws = [[6]]\n[config]\nrounds = 1")
    with pytest.raises(ConfigError, match="tune-draws must be a list of distinct"):
        read_experiment(path)


def test_a_row_whose_settings_an_option_changes_is_no_longer_tuned(
    tmp_path: Path,
) -> None:
    path = tmp_path / "e-tuned.toml"
    path.write_text(TUNED)
    whole = read_experiment(path)
    for options in ({"output-dir": "x"}, {"threads": 2}, {"rounds": 1}):
        assert whole.with_options(options).tuning == whole.tuning
    part = whole.with_options({"lr": 0.03})
    assert part.tuning["trials"] == {"a": 12}
    assert part.tuning["settings"] == {"a": ["lr"]}
    for options in ({"lr": 0.5}, {"rounds": 2}, {"dataset": "cora"}):
        assert whole.with_options(options).tuning == {}


def test_some_cases_of_a_file_are_run(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TWO)
    place = f"output-dir={tmp_path / 'out'}"
    words = ["run", str(path), "--engine", "local", "--quiet", "--set", place]
    result = CliRunner().invoke(app, [*words, "--case", "b"], catch_exceptions=False)
    assert result.exit_code == 0
    found = sorted(path.name for path in (tmp_path / "out" / "two").iterdir())
    assert found == ["b", "two.toml"]
    with pytest.raises(ConfigError, match='no case "c", "d"'):
        CliRunner().invoke(
            app, [*words, "--case", "c", "--case", "d"], catch_exceptions=False
        )
    with pytest.raises(ConfigError, match="--case selects from an experiment file"):
        CliRunner().invoke(app, ["run", "--case", "b"], catch_exceptions=False)


def test_columns_of_the_aggregated_model_stand_in_the_table_too(tmp_path: Path) -> None:
    path = tmp_path / "unseen.toml"
    text = FEW.replace("few-shot", "closed-set").replace('"local"', '"fedavg"')
    path.write_text(text.split("[published]")[0])
    experiment = read_experiment(path).with_options({"evaluate": "both"})
    planned = experiment.runs()[0]
    run = run_local({**planned.settings, "run-dir": str(tmp_path / "run")})
    ((row,),) = results_table(experiment, [(planned, run)])
    both = run.summary["global"]["best"]
    for column, title in (
        ("unseen", "global unseen"),
        ("new_client", "global new client"),
    ):
        assert row[title] == show_percent([both[column]["accuracy"]])


DRAWS = """
draws = 3
[config]
dataset = "synthetic"
clients = 3
[[case]]
name = "a"
method = "local"
[[case]]
name = "b"
method = "fedavg"
[grid]
dropout = [0.0, 0.5]
[published]
"b/0.5" = 80.0
"""


def test_a_draw_changes_partition_split_and_model_of_all_cases(tmp_path: Path) -> None:
    (path := tmp_path / "x.toml").write_text(DRAWS)
    runs = read_experiment(path).runs()
    assert [run.name for run in runs[:4]] == [
        "a-dropout0.0-draw0", "a-dropout0.0-draw1", "a-dropout0.0-draw2",
        "a-dropout0.5-draw0",
    ]  # fmt: skip
    seeds = [(run.settings["seed"], run.settings["partition-seed"]) for run in runs]
    assert seeds == [(0, 0), (1, 1), (2, 2)] * 4
    assert {run.row for run in runs} == {f"{c}/{d}" for c in "ab" for d in (0.0, 0.5)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("draws = 3", "draws = -1", "draws must be a number from 0 to 1000, got -1"),
        ("draws = 3", 'draws = "3"', "draws must be a number .*, got '3'"),
        ("draws = 3", "draws = true", "draws must be a number"),
        ("[grid]", "[grid]\nseed = [1, 2]", r"\[grid\] sets seed, but draws = 3 sets"),
        ("clients = 3", "partition-seed = 3", r"\[config\] sets partition-seed, but"),
        ('method = "fedavg"', "seed = 1", 'case "b" sets seed, but draws = 3'),
    ],
)
def test_draws_must_be_a_number_and_the_only_source_of_seeds(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    (path := tmp_path / "x.toml").write_text(DRAWS.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_experiment(path)


def test_owners_may_have_files_of_each_draw(tmp_path: Path) -> None:
    text = 'draws = 2\n[config]\nmethod = "local"\nowners = "files/{draw}/shops"\n'
    (path := tmp_path / "x.toml").write_text(text)
    found = read_experiment(path).runs()
    assert [run.settings["owners"] for run in found] == [
        "files/0/shops",
        "files/1/shops",
    ]
    assert len({run.row for run in found}) == 1
    path.write_text(text.replace("draws = 2", ""))
    with pytest.raises(ConfigError, match="but the file has no draws"):
        read_experiment(path)


def test_an_option_cannot_set_the_seed_of_draws(tmp_path: Path) -> None:
    (path := tmp_path / "x.toml").write_text(DRAWS)
    with pytest.raises(ConfigError, match=r'sets seed and .* Remove "seed"'):
        read_experiment(path).with_options({"seed": 1})
    assert len(read_experiment(path).with_options({"rounds": 1}).runs()) == 12


def test_the_first_draws_alone_and_the_others_later(tmp_path: Path) -> None:
    text = DRAWS.replace("draws = 3", f'draws = 3\noutput-dir = "{tmp_path}/runs"')
    text = text.replace("clients = 3", "clients = 3\nrounds = 1")
    (path := tmp_path / "x.toml").write_text(text.split("[grid]")[0])
    words = ["run", str(path), "--engine", "local", "--quiet"]
    folder = tmp_path / "runs" / "x"
    done = CliRunner().invoke(app, [*words, "--draws", "1"])
    assert done.exit_code == 0, done.output
    assert {p.name for p in folder.glob("*-draw*")} == {"a-draw0", "b-draw0"}
    assert "draws = 3" in (folder / "x.toml").read_text()
    done = CliRunner().invoke(app, words)
    assert done.output.count("already complete") == 2
    assert len(list(folder.glob("*-draw*"))) == 6


def test_relative_paths_are_those_of_the_complete_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["export", "data", "--clients", "2"])
    text = """
draws = 1
[config]
dataset = "data/client-0.npz"
clients = 2
rounds = 1
"""
    Path("first.toml").write_text(text)
    Path("x.toml").write_text(f'{text}initial-model = "runs/first/draw0"\n')
    for file, number in (("first", 0), ("x", 0), ("x", 1)):
        words = ["run", f"{file}.toml", "--engine", "local", "--quiet"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert done.output.count("already complete") == number
    done = CliRunner().invoke(app, ["table", "runs/x", "--cells", "cells"])
    assert done.exit_code == 0, done.output
    (cell,) = read_cells(Path("cells"))
    assert cell.settings["initial-model"] == "draw0"
    assert str(tmp_path) not in cell.to_json()


def test_more_draws_than_a_file_has_are_refused(tmp_path: Path) -> None:
    (path := tmp_path / "x.toml").write_text(DRAWS)
    with pytest.raises(ConfigError, match="x has 3 draws, but 4 were asked for"):
        run_experiment(path, draws=4)
    path.write_text(DRAWS.replace("draws = 3", ""))
    with pytest.raises(ConfigError, match="x has no draws"):
        run_experiment(path, draws=1)


@pytest.mark.thorough
def test_draws_are_one_row_of_the_table_and_pairs_of_a_comparison(
    tmp_path: Path,
) -> None:
    text = DRAWS.replace("draws = 3", f'draws = 5\noutput-dir = "{tmp_path}/runs"')
    (path := tmp_path / "x.toml").write_text(
        text.replace("[0.0, 0.5]", "[0.5]").replace(
            "clients = 3", "clients = 3\nrounds = 2"
        )
    )
    done = CliRunner().invoke(app, ["run", str(path), "--engine", "local"])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "a, dropout=0.5" in words
    assert re.search(r"run\W+draws\W+val", done.output)
    hashes = {
        Run.load(folder).summary["partition_sha256"]
        for folder in (tmp_path / "runs" / "x").glob("b-*")
    }
    assert len(hashes) == 5
    place = f"{tmp_path}/runs/x"
    done = CliRunner().invoke(app, ["compare", f"{place}:a", f"{place}:b"])
    assert "n = 5 pairs" in done.output, done.output
