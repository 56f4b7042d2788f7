from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl.core.checks.needs import NEEDS, Need, able_methods
from flower_fgl.core.checks.rules import num_sampled
from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import Scalar, help_texts, kebab, removed_settings
from flower_fgl.core.settings import DATASETS, GeneralSettings, SyntheticSettings
from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.methods import METHODS, Method, drop_removed, parse_config
from flower_fgl.runs.files import flatten_config

ROOT = Path(__file__).parents[2]


def parse(**values: object) -> RunConfig:
    return parse_config({kebab(k): v for k, v in values.items()})  # type: ignore[misc]


def test_defaults_are_those_of_the_field() -> None:
    config = parse(dataset="cora")
    assert (config.model, config.num_layers, config.hidden_channels) == ("gcn", 2, 64)
    assert (config.rounds, config.local_epochs, config.participation) == (100, 3, 1.0)
    assert (config.optimizer, config.lr, config.weight_decay) == ("adam", 0.01, 5e-4)
    assert (config.partition, config.evaluate) == ("metis", "local")
    assert config.optimizer_state == "keep"


def test_a_number_of_participants_and_a_share_take_each_others_place() -> None:
    assert parse(method="fedpano").participants == 5
    shared = parse(method="fedpano", participation=0.5)
    assert (shared.participation, shared.participants) == (0.5, 0)
    with pytest.raises(ConfigError, match=r"participants = 5 and participation = 0\.5"):
        parse(participants=5, participation=0.5)
    assert [num_sampled(parse(participants=5), able) for able in (3, 5, 30)] == [
        3,
        5,
        5,
    ]
    assert num_sampled(parse(participation=0.25), 30) == 8


def test_a_methods_setting_without_its_name_is_pointed_to() -> None:
    with pytest.raises(ConfigError, match=r'"mu"\. Did you mean "fedprox\.mu"'):
        parse(method="fedprox", mu=0.1)


def test_a_row_may_have_defaults_for_auto_settings_only() -> None:
    row = METHODS["fedavg"]
    with pytest.raises(ConfigError, match=r'"eval_policy".*Did you mean "eval-policy"'):
        replace(row, defaults={"eval_policy": "refresh"})
    with pytest.raises(ConfigError, match='default for "split"'):
        replace(row, defaults={"split": "20/80"})


def test_a_setting_of_a_method_is_declared_as_one() -> None:
    @dataclass(frozen=True)
    class Settings:
        mu: float = 0.1

    with pytest.raises(TypeError, match=r"Settings.*\.mu is not a setting"):
        replace(METHODS["fedavg"], settings=Settings)


def test_pyproject_holds_every_setting_with_its_default() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert table["tool"]["flwr"]["app"]["config"] == pyproject_table(METHODS)


def test_the_script_that_writes_the_tables_of_pyproject_finds_them_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "sync-config", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_pyproject_holds_parses_to_the_defaults() -> None:
    table = pyproject_table(METHODS)
    flat = {k: v for k, v in table.items() if not isinstance(v, dict)}
    for name in METHODS:
        flat |= {f"{name}.{k}": v for k, v in table.get(name, {}).items()}
    assert vars(parse_config(flat)) == vars(parse())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_resolved_configuration_parses_to_itself(name: str) -> None:
    config = parse(method=name, lr=0.3, seed=3)
    again = parse_config(config.flat())
    assert again.flat() == config.flat()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "fedpox"}, ["Unknown method", "fedavg", '"fedprox"']),
        ({"dataset": "corra"}, ["Unknown dataset", '"cora"', "path"]),
        # longer than any file's name may be
        ({"dataset": "c" * 300}, ["Unknown dataset", "path"]),
        ({"roundz": 3}, ['"roundz"', 'Did you mean "rounds"']),
        ({"rounds": "many"}, ["rounds", "'many'", "int", "auto"]),
        ({"rounds": 2.5}, ["rounds", "2.5", "int"]),
        ({"rounds": True}, ["rounds", "True"]),
        ({"rounds": 0}, ["rounds", ">= 1", "0"]),
        ({"dropout": 1.5}, ["dropout", "< 1", "1.5"]),
        ({"lr": float("nan")}, ["lr", "finite", "nan"]),
        ({"lr": 0}, ["lr", "> 0"]),
        ({"lr": float("inf")}, ["lr", "finite", "got inf"]),
        ({"rounds": float("inf")}, ["rounds", "finite", "got inf"]),
        ({"num-layers": 10**8}, ["num-layers must be >= 1 and <= 1000", "100000000"]),
        ({"hidden-channels": 10**11}, ["hidden-channels", "<= 1,000,000, got"]),
        ({"synthetic.nodes": 10**11}, ["synthetic.nodes", "<= 1,000,000,000, got"]),
        ({"model": "gcn:2x99999999999"}, ["gcn:2x9", "at most 1,000,000 hidden"]),
        ({"model": "gcn:2000x8"}, ["gcn:2000x8", "at most 1,000 layers"]),
        ({"model": f"gcn:{'9' * 5000}x8"}, ["at most 1,000 layers"]),
        ({"model": "appnp:2x8:k2000"}, ["at most 1,000 propagation steps"]),
        ({"threads": 100_000}, ["threads", ">= 1 and <= 1024", "100000"]),
        ({"model": "graphsag"}, ['"graphsag"', 'Did you mean "graphsage"']),
        ({"model": ""}, ["Unknown model"]),
        ({"optimizer": "adm"}, ["optimizer", '"adam"']),
        ({"partition": "metiss"}, ["partition", '"metis"']),
        ({"fedprox.nu": 1.0}, ["fedprox.nu", "fedprox.mu"]),
        ({"fedprx.mu": 1.0}, ["fedprx", '"fedprox"']),
        ({"fedprox.mu": "x"}, ["fedprox.mu", "float", "'x'"]),
        ({"fedprox.mu": -1.0}, ["fedprox.mu", ">= 0"]),
        ({"model": "gcn,gin"}, ["fedavg", "different backbones"]),
        ({"model": "graphsag:2x64"}, ['"graphsag"', 'Did you mean "graphsage"']),
        ({"model": "gcn:2"}, ['"gcn:2"', "gcn:LAYERSxWIDTH", "gcn:2x128"]),
        ({"model": "gcn:2x0"}, ['"gcn:2x0"', "gcn:LAYERSxWIDTH"]),
        ({"model": "gcn:2x64:3x64"}, ["gcn:LAYERSxWIDTH"]),
        ({"model": "appnp:k2:k3"}, ["appnp:2x128:kSTEPS"]),
        ({"model": "gcn:2x64:k2"}, ["gcn", "steps", "appnp and gamlp"]),
        ({"model": "gcn:linear:2x64"}, ["gcn:LAYERSxWIDTH", "followed by :linear"]),
        (
            {"model": "sgc:linear"},
            ["classifier of sgc is always linear", "gat, gcn, gin"],
        ),
        (
            {"method": "fedproto", "model": "gcn,gcn:2x128"},
            ["fedproto", '"gcn:2x128"', "hidden-channels = 64", "128"],
        ),
        ({"method": "local", "evaluate": "global"}, ["local", "no global model"]),
        ({"method": "opfgl", "rounds": 100}, ["one upload", "rounds = 1", "100"]),
        ({"num-layers": 1}, ['"gcn" needs at least 2', "1 by num-layers", "sgc"]),
        ({"model": "sgc,gin:1x8", "method": "local"}, ['"gin:1x8"', "1 by its name"]),
        ({"num-neighbors": "10,10"}, ["num-neighbors", "set batch-size"]),
        ({"num-neighbors": "10,x", "batch-size": 3}, ['as in "10,10"', '"10,x"']),
        ({"num-neighbors": "0", "batch-size": 3}, ["positive", '"0"']),
        (
            {"num-neighbors": "10", "batch-size": 3},
            ['"10" has 1 number(s)', '"gcn" has 2 layers', "one number for each layer"],
        ),
        (
            {"num-neighbors": "5,5", "model": "gin:3x8", "batch-size": 3},
            ["has 2 number(s)", '"gin:3x8" has 3 layers'],
        ),
        (
            {"num-neighbors": "5,5", "model": "gat", "batch-size": 3},
            ['does not work with model "gat"', "gcn, gin, graphsage, mlp"],
        ),
        (
            {"method": "fedlog", "num-neighbors": "5,5", "batch-size": 3},
            ["fedlog", "its own training steps", "remove it"],
        ),
        ({"method": "opfgl", "batch-size": 3}, ["as a whole", "must be 0, got 3"]),
        ({"method": "fedpano", "batch-size": 8}, ["fedpano", "batch-size", "0", "8"]),
        ({"method": "fedpano", "check-every": 2}, ["fedpano", "check-every", "0", "2"]),
        ({"clients": 3, "min-replies": 4}, ["min-replies", "3", "4"]),
        (
            {"method": "feddistill", "check-every": 2},
            ["feddistill uploads what the last steps", "must be 0, got 2"],
        ),
        ({"clients": 3, "participants": 50}, ["participants", "clients = 3", "got 50"]),
        ({"clients": 3, "min-clients": 4}, ["min-clients", "clients = 3", "got 4"]),
        ({"min-clients": -1}, ["min-clients", ">= 0"]),
        ({"min-clients": 2, "min-replies": 3}, ["min-replies = 3", "to 2 or less"]),
        (
            {"min-clients": 3, "secure-aggregation": True},
            ["secure-aggregation", "min-clients = 3", "Remove one"],
        ),
        (
            {"method": "fedsage+", "min-clients": 2},
            ["fedsage+", "min-clients = 2", "join later: ", " adpfedgnn, "],
        ),
        ({"synthetic.homophily": 2.0}, ["synthetic.homophily", "<= 1"]),
        (
            {"setting": "closed-set", "partition": "louvain"},
            ['"closed-set"', "METIS", 'partition = "metis"', '"louvain"'],
        ),
        (
            {"setting": "open-set", "edge-sparsity": 0.5},
            ["edge-sparsity", '"open-set"', "edge-sparsity = 0", "0.5"],
        ),
        ({"setting": "closed-set", "expansion-hops": -1}, ["expansion-hops", ">= 0"]),
        ({"shots": 0}, ["shots", ">= 1"]),
        (
            {"setting": "few-shot", "shots": 12},
            ["more than 25 nodes", "15", "at most 11", "got 12"],
        ),
        (
            {"setting": "few-shot", "split": "20/40/40"},
            ['"few-shot"', '"20/40/40"', '"default"'],
        ),
        (
            {"setting": "few-shot", "label-sparsity": 0.5},
            ["label-sparsity", '"few-shot"', "fewer shots"],
        ),
    ],
)
def test_a_bad_setting_is_named_with_what_was_expected(
    values: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(values)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("need", NEEDS)
def test_a_need_names_the_method_and_those_that_it_works_with(need: Need) -> None:
    able = able_methods(need, METHODS)
    other = sorted(METHODS.keys() - {*able})[0]  # there is one, or it is no need
    settings = GeneralSettings(method=other, dataset="yelp")
    assert not need.has(METHODS[other])
    text = need.error(settings, METHODS)
    assert text.startswith(f"{other} {need.lacks}: ")
    assert not set(text) & {*"{}"}  # all values are filled in
    assert (f": {', '.join(able)}." in text) == bool(need.can)


def test_auto_takes_the_methods_default_then_the_data_sets() -> None:
    methods = {
        **METHODS,
        "slow": Method("slow", "", "", "", defaults={"lr": 0.001, "rounds": 7}),
    }
    config = RunConfig.parse({"method": "slow", "lr": "auto"}, methods)
    assert (config.lr, config.sources["lr"]) == (0.001, "method")
    assert (config.rounds, config.sources["rounds"]) == (7, "method")
    assert config.sources["dropout"] == "default"
    assert parse().sources["rounds"] == "data set"


def test_the_settings_of_tables_have_a_source_too() -> None:
    config = parse(**{"method": "fedprox", "fedprox.mu": 0.5, "synthetic.nodes": 90})
    assert config.sources["fedprox.mu"] == config.sources["synthetic.nodes"] == "user"
    assert config.sources["synthetic.classes"] == "default"
    assert parse(method="fedprox").sources["fedprox.mu"] == "default"
    assert set(config.sources) == set(config.flat())


def test_link_prediction_has_no_weight_decay_by_default() -> None:
    # with 5e-4, embeddings of PubMed's small features stay near 0, and AUROC near 89 %
    config = parse(setting="link")
    assert (config.weight_decay, config.sources["weight-decay"]) == (0.0, "setting")
    stated = parse(setting="link", **{"weight-decay": 5e-4})
    assert (stated.weight_decay, stated.sources["weight-decay"]) == (5e-4, "user")
    assert parse().weight_decay == 5e-4


def test_a_users_value_wins_even_if_it_equals_the_general_default() -> None:
    methods = {**METHODS, "slow": Method("slow", "", "", "", defaults={"lr": 0.001})}
    config = RunConfig.parse({"method": "slow", "lr": 0.01}, methods)
    assert (config.lr, config.sources["lr"]) == (0.01, "user")


def test_every_setting_is_explained() -> None:
    classes = [GeneralSettings, SyntheticSettings, NodeSettings]
    for cls in [*classes, *(m.settings for m in METHODS.values() if m.settings)]:
        assert min(map(len, help_texts(cls).values())) > 3


def test_names_of_data_sets_are_those_of_the_sources() -> None:
    from flower_fgl.datasets.sources.load import SOURCES

    assert set(DATASETS) == set(SOURCES)


def test_names_of_models_are_those_of_the_backbones() -> None:
    from flower_fgl import nn
    from flower_fgl.core.model_spec import (
        BACKBONES,
        LAYERED,
        SAMPLED,
        SHALLOW,
        STEPPED,
        TYPED,
    )
    from flower_fgl.nn.message_passing import LayeredNet
    from flower_fgl.nn.typed import TypedNet

    assert set(BACKBONES) == set(nn.MODELS)
    assert set(SHALLOW) == {n for n, model in nn.MODELS.items() if model.min_layers < 2}
    assert set(STEPPED) == {name for name, model in nn.MODELS.items() if model.steps}
    rows = {n for n, model in nn.MODELS.items() if issubclass(model, LayeredNet)}
    assert set(LAYERED) == rows
    sizes: dict[str, Any] = {"in_channels": 3, "hidden_channels": 4, "num_classes": 2}
    sizes |= {"num_layers": 2, "dropout": 0.0, "messages": "both:2"}
    typed = {name for name, model in nn.MODELS.items() if issubclass(model, TypedNet)}
    assert set(TYPED) == typed
    made = {name: nn.build_model(name, **sizes) for name in {*nn.MODELS} - typed}
    assert set(SAMPLED) == {name for name, model in made.items() if model.reach}


def test_names_of_partition_rules_are_those_of_the_rules() -> None:
    from flower_fgl.core.settings import (
        GRAPH_PARTITIONS,
        PARTITIONS,
        SHARED_PARTITIONS,
    )
    from flower_fgl.datasets.partition.partition import (
        EDGE_RULES,
        GRAPH_RULES,
        NETWORK_RULES,
        NODE_RULES,
    )

    rules = NODE_RULES | NETWORK_RULES | GRAPH_RULES | EDGE_RULES
    assert set(PARTITIONS.split()) == set(rules)
    assert set(GRAPH_PARTITIONS) == set(GRAPH_RULES)
    assert set(SHARED_PARTITIONS) == set(EDGE_RULES)


def test_a_method_for_nodes_only_names_those_that_classify_graphs() -> None:
    methods = {
        "of-nodes": Method("of-nodes", "", "", "", graphs=False),
        "of-both": Method("of-both", "", "", ""),
    }
    values = {"method": "of-nodes", "dataset": "mutag", "partition": "uniform"}
    assert not RunConfig.parse(values, methods).classifies_graphs
    with pytest.raises(ConfigError, match=r"of-nodes classifies nodes only.*of-both\."):
        RunConfig.parse({**values, "setting": "graph"}, methods)


@given(st.text(min_size=1, max_size=20))
def test_any_unknown_key_gives_one_clear_error(key: str) -> None:
    known = {kebab(f.name) for f in fields(GeneralSettings)}
    if key in known or "." in key:
        return
    with pytest.raises(ConfigError, match=r"Unknown setting|is a table of settings"):
        parse_config({key: 1})


REMOVED = [
    (name, key, fixed)
    for name, row in METHODS.items()
    for key, fixed in removed_settings(row.settings).items()
]


@pytest.mark.parametrize(("method", "key", "fixed"), REMOVED)
def test_a_removed_setting_is_accepted_with_its_fixed_value_only(
    method: str, key: str, fixed: Scalar
) -> None:
    values: dict[str, Scalar] = {"method": method, f"{method}.{key}": fixed}
    config = parse_config(values)
    assert config.flat() == parse(method=method).flat()
    assert drop_removed(values) == {"method": method}
    # the settings of all methods are checked, whichever method runs
    for chosen in (method, "fedavg"):
        wrong: dict[str, Scalar] = {"method": chosen, f"{method}.{key}": 7}
        for read in (parse_config, drop_removed):
            with pytest.raises(ConfigError) as error:
                read(wrong)
            for word in (f"{method}.{key} is no longer", repr(fixed), "got 7"):
                assert word in str(error.value)


def test_no_setting_is_both_present_and_removed() -> None:
    for name, row in METHODS.items():
        known = {kebab(f.name) for f in fields(row.settings)} if row.settings else set()
        assert not known & removed_settings(row.settings).keys(), name


def test_the_config_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'method = "fedpg"\nrounds = 2\n\n[fedpg]\nmu = 0.1\n'
        "server-weight-decay = 0.0005\n",
        encoding="utf-8",
    )
    table = tomllib.loads((tmp_path / "config.toml").read_text("utf-8"))
    config = parse_config(dict(flatten_config(table)))
    assert (config.method_config.mu, config.rounds) == (0.1, 2)
    assert not config.flat().keys() & {"fedpg.server-weight-decay"}
    (experiment,) = read_experiment(tmp_path / "config.toml").runs()
    assert parse_config(experiment.settings).flat() == config.flat()


def test_a_whole_number_is_the_name_of_a_class_or_a_target() -> None:
    # the command line and TOML read 1 without quotes as a number
    assert parse(**{"positive-class": 1}).positive_class == "1"
    with pytest.raises(ConfigError, match="positive-class must be of type str"):
        parse(**{"positive-class": 1.5})
    with pytest.raises(ConfigError, match="output-dir must be of type str"):
        parse(**{"output-dir": 1})
