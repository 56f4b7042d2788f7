from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, FglError, RunError
from flower_fgl.core.metrics import Scores, pool
from flower_fgl.lab.results import Run
from flower_fgl.lab.results import compare as compare_runs
from flower_fgl.lab.tables.compare import group_runs, select_runs
from flower_fgl.lab.tables.statistics import Comparison, paired_test
from flower_fgl.runs.summary import summarise
from flower_fgl.runs.writer import RunWriter


def verdict(comparison: Comparison) -> str:
    return comparison.verdict


def write_run(
    folder: Path,
    accuracy: float,
    *,
    method: str = "fedavg",
    seed: int = 0,
    status: str = "completed",
    partition: str = "abc",
    **settings: Any,
) -> Run:
    """Write a run of one round."""
    writer = RunWriter.create(
        folder,
        config={"method": method, "dataset": "cora", "seed": seed, **settings},
        sources={},
    )
    test = pool([Scores(10, accuracy, accuracy / 2, accuracy / 4)])
    row = {
        "round": 1,
        "phase": "train",
        "status": "ok",
        "metrics": {"local": {"val": test, "test": test}},
    }
    writer.append_round(row)
    writer.write_summary(
        summarise(
            [row],
            method=method,
            dataset="cora",
            clients=3,
            seed=seed,
            engine="local",
            partition_sha256=partition,
            evaluate="local",
            status=status,
        )
    )
    return Run.load(folder)


def write_runs(folder: Path, name: str, scores: list[float], **about: Any) -> list[Run]:
    return [
        write_run(
            folder / f"{name}-{seed}", s, **{"method": name, "seed": seed, **about}
        )
        for seed, s in enumerate(scores)
    ]


def test_runs_that_share_a_partition_are_one_replicate(tmp_path: Path) -> None:
    gains = [0.02, 0.015, -0.005]
    sides = [
        [
            write_run(
                tmp_path / f"{method}-{partition}-{seed}",
                0.7 + seed / 100 + gain * (method == "fedavg"),
                method=method,
                seed=seed,
                partition=f"p{partition}",
                **{"partition-seed": partition},
            )
            for partition, gain in enumerate(gains)
            for seed in range(4)
        ]
        for method in ("fedavg", "local")
    ]
    found = compare_runs(*sides)
    assert found.why_not == "3 pairs, 5 are needed"
    assert "n = 3 pairs (12 runs, averaged on each partition)" in str(found)
    assert not found.shares_partitions
    one_partition = compare_runs(*[runs[:4] for runs in sides])
    assert one_partition.n == 4
    assert one_partition.shares_partitions
    assert ", n = 4 pairs on one partition:" in str(one_partition)


def test_the_command_warns_of_pairs_that_share_a_partition(tmp_path: Path) -> None:
    sides = {
        "fedper": [0.80, 0.81, 0.79, 0.80, 0.8],
        "local": [0.7, 0.72, 0.7, 0.7, 0.7],
    }
    for about, is_one in (({}, True), ({"partition-seed": 0}, False)):
        folder = tmp_path / str(is_one)
        for name, scores in sides.items():
            for seed, score in enumerate(scores):
                write_run(
                    folder / f"{name}-{seed}",
                    score,
                    method=name,
                    seed=seed,
                    partition="p" if is_one else f"p{seed}",
                    **dict.fromkeys(about, seed),
                )
        done = CliRunner().invoke(
            app, ["compare", f"{folder}:fedper", f"{folder}:local"]
        )
        words = " ".join(done.output.split())
        assert done.exit_code == 0
        assert ("n = 5 pairs on one partition, 95 %" in words) is is_one
        assert ("Warning: several pairs have the same partition" in words) is is_one


def test_fine_tuned_runs_are_compared_after_fine_tuning(tmp_path: Path) -> None:
    tuned = write_runs(tmp_path, "fedavg", [0.6, 0.61, 0.6, 0.62, 0.6])
    plain = write_runs(tmp_path, "local", [0.7, 0.7, 0.7, 0.7, 0.7])
    for run in tuned:
        run.summary["finetuned"] = {"round": 2, "test": {"accuracy": 0.8}}
    tuned[0].summary["finetuned"]["test"]["accuracy"] = 0.9
    result = compare_runs(tuned, plain)
    assert result.one == (0.9, 0.8, 0.8, 0.8, 0.8)
    assert result.difference == pytest.approx(0.12)


def test_owners_are_compared_after_fine_tuning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 0.6)
    for number, value in ((1, 0.5), (2, 0.9)):
        metrics = {"local": {"test": {"accuracy": value}}}
        run.clients.append({"round": number, "partition_id": 0, "metrics": metrics})
    assert run.per_owner() == {"0": 0.5}
    run.summary["finetuned"] = {"round": 2, "test": {"accuracy": 0.9}}
    assert run.per_owner() == {"0": 0.9}


def test_runs_are_paired_by_data_partition_clients_and_seed(tmp_path: Path) -> None:
    one = write_runs(tmp_path, "fedper", [0.8, 0.7, 0.9, 0.1])
    other = write_runs(tmp_path, "local", [0.7, 0.5, 0.6])[::-1]
    other.append(write_run(tmp_path / "x", 0.2, method="local", partition="other"))
    result = compare_runs(one, other)
    assert result.one == (0.8, 0.7, 0.9)
    assert result.other == (0.7, 0.5, 0.6)
    assert result.difference == pytest.approx(0.2)
    assert verdict(result) == "not testable: 3 pairs, 5 are needed"


def test_a_clear_difference_is_significant_for_either_side(tmp_path: Path) -> None:
    good = write_runs(tmp_path, "fedper", [0.80, 0.81, 0.79, 0.82, 0.8])
    poor = write_runs(tmp_path, "local", [0.70, 0.72, 0.69, 0.70, 0.71])
    assert verdict(compare_runs(good, poor)).startswith("fedper is significantly")
    assert verdict(compare_runs(poor, good)).startswith("fedper is significantly")


def test_tied_and_uncertain_methods_are_told_apart(tmp_path: Path) -> None:
    local = write_runs(tmp_path, "local", [0.70, 0.72, 0.69, 0.70, 0.71])
    near = write_runs(tmp_path, "fedavg", [0.701, 0.719, 0.692, 0.70, 0.71])
    assert verdict(compare_runs(near, local)).startswith(
        "tied within one point (p = 2.34e-05"
    )
    wide = write_runs(tmp_path, "fedper", [0.80, 0.62, 0.75, 0.64, 0.72])
    text = verdict(compare_runs(wide, local))
    assert text.startswith("no significant difference at 95 %, and not tied")
    assert text.endswith("points would be found in 80 %")


def test_another_column_and_metric_can_be_chosen(tmp_path: Path) -> None:
    one = write_runs(tmp_path, "fedper", [0.8, 0.6])
    other = write_runs(tmp_path, "local", [0.4, 0.4])
    result = compare_runs(one, other, column="val", metric="macro_f1")
    assert result.one == (0.4, 0.3)
    with pytest.raises(RunError, match=r'no scores of "unseen"\. Known: test, val'):
        compare_runs(one, other, column="unseen")
    with pytest.raises(RunError, match=r'no score "auroc" of "test".*mean_accuracy'):
        compare_runs(one, other, metric="auroc")


def test_too_few_pairs_name_the_runs_that_are_not_completed(tmp_path: Path) -> None:
    one = write_runs(tmp_path, "fedper", [0.8, 0.6])
    other = write_runs(tmp_path, "local", [0.4])
    with pytest.raises(RunError, match="got 1 of 2 runs of A and 1 of B"):
        compare_runs(one, other)
    with pytest.raises(RunError, match="got 0 of 2 runs of A and 0 of B") as caught:
        compare_runs(one, write_runs(tmp_path / "b", "local", [0.4], status="failed"))
    assert f"{tmp_path / 'b' / 'local-0'} (failed)" in str(caught.value)
    elsewhere = write_runs(tmp_path / "c", "local", [0.4, 0.5], partition="other")
    with pytest.raises(RunError, match="got 0 of 2"):
        compare_runs(one, elsewhere)


def test_runs_that_are_ambiguous_are_refused(tmp_path: Path) -> None:
    one = write_runs(tmp_path, "fedper", [0.8, 0.6])
    twins = [*one, *write_runs(tmp_path / "again", "fedper", [0.8])]
    with pytest.raises(RunError, match="A holds two runs with the same dataset"):
        compare_runs(twins, write_runs(tmp_path / "other", "fedper", [0.5, 0.4]))
    mixed = [
        *write_runs(tmp_path / "b", "fedper", [0.3]),
        *write_runs(tmp_path, "local", [0.4]),
    ]
    with pytest.raises(ConfigError, match="B holds runs of fedper, local"):
        compare_runs(one, mixed)


def test_sides_are_folders_patterns_lists_or_one_method(tmp_path: Path) -> None:
    write_runs(tmp_path, "fedper", [0.8, 0.6])
    write_runs(tmp_path, "local", [0.4, 0.5])
    write_run(tmp_path / "again_sometimes-seed0", 0.1, method="fedprox")
    write_run(tmp_path / "again_sometimes-not-seed0", 0.1, method="fedprox")
    write_run(tmp_path / "a,b:c", 0.1, method="fedprox")
    for text, count in {
        f"{tmp_path}": 7,
        f"{tmp_path}:local": 2,
        f"{tmp_path}:again, sometimes": 1,
        f"{tmp_path}:again, sometimes, {tmp_path}:local": 3,
        f"{tmp_path / 'a,b:c'}": 1,
        ",".join([f"{tmp_path}/fedper-0"] * 200): 1,
        f"{tmp_path}/fedper-*": 2,
        f"{tmp_path}/fedper-0": 1,
        f"{tmp_path}/fedper-0, {tmp_path}/local-*, {tmp_path}/local-1": 3,
    }.items():
        assert len(select_runs(text)) == count, text


def test_a_case_of_an_experiment_with_draws_is_selected_by_its_name(
    tmp_path: Path,
) -> None:
    for draw in range(2):
        for case in ("fedavg", "fedavg_default", "fedavg-draw", "fedavg-seed-late"):
            write_run(tmp_path / f"{case}-draw{draw}", 0.5, seed=draw)
    for name, case in {
        "fedavg, default": "fedavg_default",  # no grid: the draw ends the name
        "fedavg": "fedavg",  # a case and also the method of all three
        "fedavg-draw": "fedavg-draw",
        "fedavg-seed-late": "fedavg-seed-late",  # begins like fedavg over seeds
    }.items():
        found = [run.path.name for run in select_runs(f"{tmp_path}:{name}")]
        assert found == [f"{case}-draw0", f"{case}-draw1"], name


def test_a_method_is_selected_if_no_case_has_its_name(tmp_path: Path) -> None:
    for case in ("reset", "fedavg_fine-tuned"):
        write_run(tmp_path / f"{case}-draw0", 0.5)
    write_run(tmp_path / "local-draw0", 0.5, method="local")
    found = [run.path.name for run in select_runs(f"{tmp_path}:fedavg")]
    assert found == ["fedavg_fine-tuned-draw0", "reset-draw0"]


@pytest.mark.parametrize(
    "about",
    [
        {"split": "60/20/20"},
        {"split-by": "id"},
        {"target": "weight"},
        {"synthetic": {"nodes": 90}},
    ],
)
def test_scores_of_other_nodes_are_not_paired(
    about: dict[str, Any], tmp_path: Path
) -> None:
    one = write_runs(tmp_path, "local", [0.4, 0.5])
    same = write_runs(tmp_path, "fedavg", [0.4, 0.6], **{"split-by": "auto"})
    other = write_runs(tmp_path, "fedper", [0.4, 0.6], **about)
    assert compare_runs(one, same).n == 2
    with pytest.raises(RunError, match=r"split, target and seed, got 0 of 2 runs"):
        compare_runs(one, other)


def test_draws_with_files_of_their_own_are_draws_of_one_row(tmp_path: Path) -> None:
    sides = [
        [
            write_run(
                tmp_path / f"{method}-draw{k}",
                0.5 + gain + k / 100,
                method=method,
                seed=k,
                partition=f"p{k}",
                owners=f"/files/{k}/shops10",  # owners = "files/{draw}/shops10"
                **{"partition-seed": k},
            )
            for k in range(3)
        ]
        for method, gain in (("fedavg", 0.1), ("local", 0.0))
    ]
    assert compare_runs(*sides).n == 3
    names = [(name, len(runs)) for name, runs in group_runs(sides[0] + sides[1])]
    assert names == [("fedavg", 3), ("local", 3)]
    other = [
        write_run(tmp_path / f"v1-{k}", 0.5, seed=k, owners="/v1/a", partition=f"p{k}")
        for k in range(3)
    ]
    assert [len(runs) for _, runs in group_runs(other)] == [3]
    with pytest.raises(ConfigError, match=r"differ in more than their seeds .*owners"):
        compare_runs([*sides[0][:1], other[1]], sides[1])


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, "local", [0.4, 0.5])
    with pytest.raises(RunError, match="on both sides"):
        compare_runs(runs, runs[1:])


def test_a_side_without_runs_is_refused(tmp_path: Path) -> None:
    write_runs(tmp_path, "local", [0.4])
    for text, message in {
        f"{tmp_path}:fedavg": 'no run of "fedavg", only of local, local-0',
        f"{tmp_path}/nothing": "nothing does not exist",
        f"{tmp_path}/nothing-*": "holds no run folder",
        " , ": "at least one run folder",
    }.items():
        with pytest.raises(RunError, match=message):
            select_runs(text)


@pytest.mark.parametrize(
    "words", ["compare A B", "compare A B --per-owner", "reach 1 A"]
)
def test_a_number_of_nodes_is_no_score(words: str, tmp_path: Path) -> None:
    write_runs(tmp_path / "A", "local", [0.4, 0.5])
    write_runs(tmp_path / "B", "fedavg", [0.4, 0.5])
    parts = [str(tmp_path / w) if w in "AB" else w for w in words.split()]
    with pytest.raises(FglError, match=r'has (no|a) score "num_nodes" of "test"'):
        CliRunner().invoke(
            app, [*parts, "--metric", "num_nodes"], catch_exceptions=False
        )


def test_python_compares_no_numbers_of_nodes(tmp_path: Path) -> None:
    sides = [write_runs(tmp_path / name, name, [0.4, 0.5]) for name in ("a", "b")]
    with pytest.raises(RunError, match=r'no score "num_nodes" of "test"'):
        compare_runs(*sides, metric="num_nodes")


def test_a_folder_without_runs_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    write_runs(tmp_path / "all" / "one", "local", [0.4])
    (tmp_path / "tuned" / "tune").mkdir(parents=True)
    (tmp_path / "my.toml").write_text("")
    for name, message in {
        "all": f"but folders of run folders. Pass those: {tmp_path}/all/one",
        "tuned": "holds a study, but no run folder. Run the tuned experiment file",
        "my.toml": "is a file. Pass the folder of its runs, .*: runs/my",
    }.items():
        with pytest.raises(RunError, match=message):
            select_runs(str(tmp_path / name))


def test_the_command_prints_both_sides_and_the_test(tmp_path: Path) -> None:
    write_runs(tmp_path, "fedper", [0.80, 0.81, 0.79, 0.80, 0.80])
    write_runs(tmp_path, "local", [0.70, 0.72, 0.69, 0.70, 0.70])
    write_run(tmp_path / "late", 0.1, method="local", seed=9, status="interrupted")
    done = CliRunner().invoke(
        app, ["compare", f"{tmp_path}:fedper", f"{tmp_path}:local"]
    )
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    assert "80.00 ± 0.71" in words
    assert "70.20 ± 1.10" in words
    assert "late" in words
    assert (
        "fedper minus local = +9.80, n = 5 pairs on one partition, 95 % interval "
        "+9.24 to +10.36, "
        "t = 49.000, p = 1.04e-06: fedper is significantly better at 95 %" in words
    )
    assert not {"A", "B"} & set(words.split())


def test_the_command_says_which_scores_are_taken_after_fine_tuning(
    tmp_path: Path,
) -> None:
    for run in write_runs(tmp_path, "fedavg", [0.6, 0.61]):
        run.summary["finetuned"] = {"round": 2, "test": {"accuracy": 0.8}}
        (run.path / "summary.json").write_text(json.dumps(run.summary))
    write_runs(tmp_path, "local", [0.7, 0.7])
    args = ["compare", f"{tmp_path}:fedavg", f"{tmp_path}:local"]
    words = " ".join(CliRunner().invoke(app, args).output.split())
    assert "Scores of fedavg are taken after the fine-tuning" in words


def test_runs_without_a_partner_are_counted(tmp_path: Path) -> None:
    one = write_runs(tmp_path, "fedper", [0.80, 0.81, 0.79, 0.80, 0.80])
    other = write_runs(tmp_path, "local", [0.70, 0.72, 0.69])
    write_run(tmp_path / "x", 0.7, method="local", seed=3, partition="other")
    other = select_runs(f"{tmp_path}:local")
    assert compare_runs(one, other).unpaired == (2, 1)
    done = CliRunner().invoke(
        app, ["compare", f"{tmp_path}:fedper", f"{tmp_path}:local"]
    )
    words = " ".join(done.output.split())
    assert (
        "2 of the completed runs of fedper are left out: no run of the other" in words
    )
    assert "1 of the completed runs of local are left out" in words


def test_the_sides_of_a_comparison_have_the_names_of_what_differs(
    tmp_path: Path,
) -> None:
    def named(one: str, other: str) -> tuple[str, str]:
        return compare_runs(
            *(select_runs(f"{tmp_path}/{n}-*") for n in (one, other))
        ).names

    scores = [0.5, 0.6]
    values = {
        "lr": 0.1,
        "fedprox.mu": 1.0,
        "fedavg.extra": 2,
        "rounds": 3,
        "model": "x",
    }
    write_runs(tmp_path, "a-fedprox", scores, method="fedprox", **{"fedprox.mu": 0.1})
    write_runs(tmp_path, "b-fedprox", scores, method="fedprox", **{"fedprox.mu": 1.0})
    for seed, score in enumerate(scores):
        folder = tmp_path / f"many-seed{seed}"
        write_run(folder, score, method="fedprox", seed=seed, **values)
    assert named("a-fedprox", "b-fedprox") == ("fedprox (mu=0.1)", "fedprox (mu=1.0)")
    assert named("a-fedprox", "many") == ("a-fedprox-0", "many")
    for folder in ("first", "second"):
        write_runs(tmp_path / folder, "local", scores)
    assert named("first/local", "second/local") == ("first", "second")
    write_runs(tmp_path / "deep" / "first", "local", scores)
    assert named("first/local", "deep/first/local") == ("A", "B")


def test_the_command_tests_what_the_tables_of_the_setting_mark(tmp_path: Path) -> None:
    for setting, metric in (
        ("few-shot", "mean_accuracy"),
        ("transductive", "accuracy"),
    ):
        sides = [tmp_path / setting / name for name in ("a", "b")]
        for side, scores in zip(sides, ([0.8, 0.7], [0.5, 0.6]), strict=True):
            write_runs(side, "local", scores, setting=setting)
        done = CliRunner().invoke(app, ["compare", *map(str, sides)])
        assert f"test {metric}, %" in " ".join(done.output.split())


def test_several_datasets_are_compared_one_by_one(tmp_path: Path) -> None:
    good, poor = [0.80, 0.81, 0.79, 0.82, 0.8], [0.70, 0.72, 0.69, 0.70, 0.71]
    sides = [tmp_path / "a", tmp_path / "b"]
    for side, scores in zip(sides, (good, poor), strict=True):
        write_runs(side, "local", scores)
        gap = 0.0 if side == sides[0] else 0.3
        for run in write_runs(side, "other", [s - gap for s in good], method="local"):
            text = (run.path / "summary.json").read_text()
            text = text.replace('"cora"', '"citeseer"')
            (run.path / "summary.json").write_text(text)
    found = compare_runs(*map(str, sides))
    assert list(found) == ["citeseer, 3 clients", "cora, 3 clients"]
    assert [one.n for one in found.values()] == [5, 5]
    assert found["cora, 3 clients"].difference == pytest.approx(0.1)
    assert found["citeseer, 3 clients"].why_not == "all differences are equal"
    # two comparisons, one of which cannot be tested
    assert found["cora, 3 clients"].p == pytest.approx(paired_test(good, poor).p)
    assert repr(found).splitlines()[1].startswith("cora, 3 clients: a minus b = +10.00")
    done = CliRunner().invoke(app, ["compare", *map(str, sides)])
    words = " ".join(done.output.split())
    assert words.index("citeseer, 3 clients:") < words.index("cora, 3 clients:")
    assert words.count("n = 5 pairs") == 2
    assert "There is no mean over datasets." in words
    assert "20.00" not in words  # the mean of both differences


def test_runs_of_several_settings_are_no_side_of_a_comparison(tmp_path: Path) -> None:
    other = write_runs(tmp_path, "local", [0.5, 0.6])
    few = write_runs(tmp_path / "3", "fedavg", [0.7, 0.8], shots=3, partition="a")
    more = write_runs(tmp_path / "5", "fedavg", [0.8, 0.9], shots=5, partition="b")
    with pytest.raises(
        ConfigError,
        match=r"A holds runs that differ .*shots 3 and 5.* of one setting\.$",
    ):
        compare_runs([*few, *more], other)
    named = [
        write_run(tmp_path / f"x-shots{k}-partition-seed7", 0.5, shots=k)
        for k in (3, 5)
    ]
    with pytest.raises(ConfigError, match=r'"\S+/x-shots3-partition-seed\*"\.$'):
        compare_runs(named, other)
    elsewhere = write_run(tmp_path / "x", 0.9, seed=2, shots=3, **{"data-dir": "/x"})
    with pytest.raises(RunError, match="at least 2 pairs"):  # with the same settings
        compare_runs([*few, elsewhere], other)
