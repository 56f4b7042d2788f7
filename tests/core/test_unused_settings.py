"""Settings without effect are rejected everywhere; the error names what they need."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar
from flower_fgl.core.unused_settings import (
    DATA_SETTINGS,
    NEEDED,
    check_app_table,
    reject_unused_settings,
)
from flower_fgl.datasets import build
from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.runs.files import flatten_config
from flower_fgl.server_app import read_run_config

NUMBERS: dict[str, Scalar] = {"target-kind": "numbers"}
GIVEN: dict[str, Scalar] = {
    **NUMBERS,
    "target-scale": "given",
    "target-mean": -3.1,
    "target-std": "2.3",
}
WITH: dict[str, dict[str, Scalar]] = {
    "dirichlet-alpha": {"partition": "dirichlet"},
    "expansion-hops": {"setting": "open-set"},
    "shots": {"setting": "few-shot"},
    "patience": {"check-every": 1},
    "final-local-epochs": {"eval-policy": "refresh"},
    "upload-delta": {"upload-clip": 1.0, "upload-noise": 1.0},
    "server-lr": {"server-optimizer": "momentum"},
    "server-momentum": {"server-optimizer": "yogi"},
    "server-beta2": {"server-optimizer": "adam"},
    "server-tau": {"server-optimizer": "adagrad"},
    "server-moments": {"server-optimizer": "adam"},
    "trimmed-share": {"aggregation": "trimmed-mean"},
    "krum-attackers": {"aggregation": "krum", "clients": 5},
    "krum-keep": {"aggregation": "krum", "clients": 5},
    "norm-bound": {"aggregation": "norm-clip"},
    "upload-noise-model": {"upload-clip": 1.0, "upload-noise": 1.0},
    "secure-threshold": {"secure-aggregation": True},
    "link-decoder": {"setting": "link"},
    "link-features": {"setting": "link"},
    "link-k": {"setting": "link"},
    "time-cuts": {"setting": "edge"},
    "graph-features": {"setting": "graph"},
    "max-degree": {"setting": "graph", "graph-features": "degree"},
    "readout": {"setting": "graph"},
    "precision-k": {"positive-class": "yes"},
    "target": {"dataset": "yelp", "target": "37"},
    "loss": NUMBERS,
    "huber-delta": {**NUMBERS, "loss": "huber"},
    "target-weight": NUMBERS,
    "target-scale": NUMBERS,
    "target-mean": GIVEN,
    "target-std": GIVEN,
    "share-target-statistics": NUMBERS,
    "min-target-count": NUMBERS,
    "calibrator": {"calibration": "owner"},
    "coverage": {"calibration": "owner"},
    "conformal-score": {"calibration": "owner"},
    "secure-fraction-bits": {"secure-aggregation": True},
    "schema-align": {"model": "rgcn"},
    "num-bases": {"model": "rgcn"},
    "target-relation": {"model": "rgcn", "setting": "link"},
    "node-embedding": {"model": "rgcn"},
    "reverse-relations": {"model": "typed-gine"},
}
WITHOUT: dict[str, dict[str, Scalar]] = {
    "edge-direction": {"model": "gat"},
    "partition": {"owners": "folder"},
    "dataset": {"owners": "folder"},
    "round-patience": {"rounds": 1},
}
"""Settings beside which a key has no effect; by default none are needed."""


def parsed(**values: Scalar) -> RunConfig:
    return parse_config({"method": "fedavg", "clients": 3, **values})


@pytest.mark.parametrize("key", NEEDED)
def test_a_setting_is_refused_where_no_run_uses_it(key: str) -> None:
    idle = parsed(**WITHOUT.get(key, {}))
    busy = parsed(**WITH.get(key, {}))
    with pytest.raises(ConfigError, match=f"{key} has no effect: it needs"):
        reject_unused_settings([key], [idle])
    reject_unused_settings([key], [idle, busy])


@pytest.mark.parametrize("split", ["50/50", "50/0/50", "50/0.0/50"])
def test_patience_needs_validation_nodes(split: str) -> None:
    with pytest.raises(ConfigError, match="round-patience has no effect: it needs"):
        reject_unused_settings(["round-patience"], [parsed(split=split)])
    for other in ("20/40/40", "50/10/40", "public"):
        reject_unused_settings(["round-patience"], [parsed(split=other)])


def test_a_setting_that_the_method_does_not_read_is_refused() -> None:
    deaf, other = parsed(method="fedkd"), parsed()
    with pytest.raises(
        ConfigError, match="weight-by has no effect with method = fedkd"
    ):
        reject_unused_settings(["weight-by"], [deaf])
    reject_unused_settings(["weight-by"], [deaf, other])
    with pytest.raises(ConfigError, match="lr has no effect with method = opfgl"):
        simulate("opfgl", clients=3, lr=0.3)


def test_a_methods_default_is_enough() -> None:
    reject_unused_settings(["final-local-epochs"], [parsed(method="fedrep")])


def test_a_removed_setting_is_refused_on_the_command_line() -> None:
    config = parsed(method="fedala", **{"fedala.weight-lr": 1.0})
    with pytest.raises(ConfigError, match=r"fedala\.weight-lr is no longer.*1\.0"):
        reject_unused_settings(["fedala.weight-lr"], [config])


IDLE: list[tuple[str, Scalar, str]] = [
    ("dirichlet-alpha", 0.1, 'needs partition = "dirichlet"'),
    ("secure-threshold", 0.9, "needs secure-aggregation = true"),
    ("fedprox.mu", 0.5, "belongs to method = fedprox"),
]


@pytest.mark.parametrize(("key", "value", "message"), IDLE)
def test_simulate_refuses_a_setting_without_effect(
    key: str, value: Scalar, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("fedavg", clients=3, output_dir=str(tmp_path / "runs"), **{key: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("key", "value", "message"), IDLE)
def test_flwr_run_refuses_a_setting_without_effect(
    key: str, value: Scalar, message: str
) -> None:
    defaults: dict[str, Scalar] = dict(flatten_config(pyproject_table(METHODS)))
    assert read_run_config(defaults).method == "fedavg"
    with pytest.raises(ConfigError, match=message):
        read_run_config({**defaults, key: value})


@pytest.mark.parametrize("method", sorted(METHODS.own))
def test_flwr_run_repeats_a_run_with_all_of_its_settings(method: str) -> None:
    dataset = {}
    if method == "fedsst":
        dataset = {"setting": "graph", "dataset": "tu:TINY", "partition": "uniform"}
    config = parse_config({"method": method, **dataset})
    assert read_run_config(config.flat()).flat() == config.flat()


def test_flwr_run_accepts_the_settings_of_a_run_that_resumes() -> None:
    values: dict[str, Scalar] = {"resume": True, "dirichlet-alpha": 0.1}
    assert read_run_config(values).resume


@pytest.mark.parametrize("name", ["confg", "configs", "conf"])
def test_a_misspelt_table_of_the_app_is_refused(name: str, tmp_path: Path) -> None:
    # Flower ignores such a table: the run would have all defaults
    table = (
        f'[tool.flwr.app]\npublisher = "me"\n[tool.flwr.app.{name}.fedprox]\nmu = 1\n'
    )
    (tmp_path / "pyproject.toml").write_text(table)
    folders = [str(tmp_path / "none"), str(tmp_path)]
    with pytest.raises(
        ConfigError, match=rf"app\.{name}\].*Did you mean \[tool\.flwr\."
    ):
        check_app_table(folders)
    right = table.replace(f"app.{name}", "app.config")
    (tmp_path / "pyproject.toml").write_text(right)
    check_app_table(folders)


@pytest.mark.parametrize("where", ["[config]", "[grid]", '[[case]]\nname = "a"'])
@pytest.mark.parametrize(("key", "value", "message"), IDLE)
def test_an_experiment_refuses_a_setting_that_no_run_uses(
    where: str, key: str, value: Scalar, message: str, tmp_path: Path
) -> None:
    shown = [value] if where == "[grid]" else value
    (tmp_path / "a.toml").write_text(f"title = 'x'\n{where}\n{key} = {shown}\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_experiment(tmp_path / "a.toml")
    assert "a.toml" in str(error.value)


def test_a_run_of_an_experiment_keeps_only_settings_with_effect(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "[config]\ndirichlet-alpha = 0.1\nfedprox.mu = 0.5\n[grid]\n"
        'method = ["fedavg", "fedprox"]\npartition = ["metis", "dirichlet"]\n'
    )
    for run in read_experiment(tmp_path / "a.toml").runs():
        skewed = run.settings["partition"] == "dirichlet"
        proximal = run.settings["method"] == "fedprox"
        assert ("dirichlet-alpha" in run.settings) == skewed
        assert ("fedprox.mu" in run.settings) == proximal


@pytest.mark.parametrize("command", ["partition", "export"])
@pytest.mark.parametrize("pair", ["lr=0.1", "method=fedpg", "fedavg.finetune-epochs=1"])
def test_a_command_that_trains_nothing_refuses_a_setting_of_training(
    command: str, pair: str, tmp_path: Path
) -> None:
    folder = [str(tmp_path / "graphs")] if command == "export" else []
    result = CliRunner().invoke(app, [command, *folder, "--set", pair])
    assert isinstance(result.exception, ConfigError)
    assert f"no effect in flower-fgl {command}" in str(result.exception)


def test_check_graph_refuses_a_setting_that_it_does_not_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check-graph", "a.npz", "--set", "lr=0.1"])
    assert "lr has no effect in flower-fgl check-graph" in str(result.exception)


class Reader:
    """A configuration that notes which of its settings are read."""

    def __init__(self, config: RunConfig, seen: set[str]) -> None:
        self._config, self._seen = config, seen

    def __getattr__(self, name: str) -> object:
        self._seen.add(name)
        part = getattr(type(self._config), name, None)
        if isinstance(part, property):
            assert part.fget is not None
            return part.fget(self)
        if callable(part):
            return part.__get__(self)
        return getattr(self._config, name)


def test_the_settings_of_data_are_those_that_building_the_clients_reads() -> None:
    seen: set[str] = set()
    general = {key.replace("-", "_") for key in parsed().general_defaults()}
    small: dict[str, Scalar] = {"synthetic.nodes": 200, "synthetic.blocks": 4}
    for setting in ("transductive", "few-shot", "open-set", "edge"):
        config = parsed(**small, setting=setting)
        build.build_clients(Reader(config, seen), 3)  # type: ignore[arg-type]
    read = {name.replace("_", "-") for name in seen & general}
    # a named dataset also reads these, and the number of clients is an argument
    others = {"data-dir", "target"}
    others |= {"clients", "owners", "feature-align", "class-align"}
    others |= {"graph-features", "max-degree", "types", "target-node", "schema-align"}
    others |= {"target-relation"}
    assert read | others == set(DATA_SETTINGS)


def test_settings_of_the_synthetic_graph_are_refused_with_owners() -> None:
    with pytest.raises(ConfigError, match="no effect with dataset = hospitals"):
        reject_unused_settings(["synthetic.nodes"], [parsed(owners="a/hospitals")])
