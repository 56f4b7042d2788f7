"""Options and ``--set`` of commands that read data."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl.cli.arguments import console, data_config, parse_pairs, rows_table
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "pair", "message"),
    [
        (["--dataset", "cora"], "dataset=synthetic", "--dataset and --set dataset=…"),
        (["--clients", "3"], "clients=4", "--clients and --set clients=…"),
        (["--rule", "uniform"], "partition=metis", "--rule and --set partition=…"),
    ],
)
@pytest.mark.parametrize("command", ["partition", "export"])
def test_an_option_and_a_pair_of_the_same_setting_contradict_each_other(
    command: str, option: list[str], pair: str, message: str, tmp_path: Path
) -> None:
    words = [command, *([str(tmp_path / "out")] if command == "export" else [])]
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(
            app, [*words, *option, "--set", pair], catch_exceptions=False
        )
    assert not list(tmp_path.iterdir())


def test_a_pair_alone_chooses_the_data() -> None:
    pairs = ["dataset=cora", "partition=uniform", "clients=4"]
    config = data_config(None, None, None, pairs, command="partition")
    assert (config.dataset, config.partition, config.clients) == ("cora", "uniform", 4)
    config = data_config(None, None, None, None, command="partition")
    default = (config.dataset, config.partition, config.clients)
    assert default == ("synthetic", "metis", 10)


def test_the_number_of_clients_of_a_pair_is_named() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        data_config(None, None, None, ["clients=0"], command="partition")


def test_a_text_that_toml_reads_as_another_type_stays_a_text() -> None:
    pairs = ["output-dir=2026-11-27", "run-dir=12:30:00", "target=7", "rounds=3"]
    values = {"output-dir": "2026-11-27", "run-dir": "12:30:00", "target": "7"}
    assert parse_pairs(pairs) == {**values, "rounds": 3}


def test_names_in_a_table_are_no_markup() -> None:
    with console.capture() as shown:
        console.print(rows_table([[{"run": "fedavg [b] :x:", "draws": "[red]"}]]))
    assert "fedavg [b] :x:" in shown.get()
    assert "[red]" in shown.get()


def test_a_command_without_grids_takes_single_values() -> None:
    assert parse_pairs(["lr=0.1", "model=gcn,gat"]) == {"lr": 0.1, "model": "gcn,gat"}
    for pair in ("lr=0.1,0.2", "seed=0..4", "lr=[0.1, 0.2]"):
        with pytest.raises(ConfigError, match="expects a single value, got"):
            parse_pairs([pair])
