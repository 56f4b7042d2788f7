"""Command-line settings without effect are rejected; the error names what they need."""

import pytest

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar
from flower_fgl.core.unused_settings import NEEDED, reject_unused_settings
from flower_fgl.datasets.partition.rules import GRAPH_RULES, NETWORK_RULES, NODE_RULES
from flower_fgl.methods import parse_config

WITH: dict[str, dict[str, Scalar]] = {
    "dirichlet-alpha": {"partition": "dirichlet"},
    "expansion-hops": {"setting": "open-set"},
    "shots": {"setting": "few-shot"},
    "patience": {"check-every": 1},
    "final-local-epochs": {"eval-policy": "refresh"},
    "upload-delta": {"upload-clip": 1.0, "upload-noise": 1.0},
    "trimmed-share": {"aggregation": "trimmed-mean"},
    "krum-attackers": {"aggregation": "krum", "clients": 5},
    "krum-keep": {"aggregation": "krum", "clients": 5},
    "norm-bound": {"aggregation": "norm-clip"},
    "upload-noise-model": {"upload-clip": 1.0, "upload-noise": 1.0},
    "secure-threshold": {"secure-aggregation": True},
    "secure-fraction-bits": {"secure-aggregation": True},
}
WITHOUT: dict[str, dict[str, Scalar]] = {
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


def test_a_methods_default_is_enough() -> None:
    reject_unused_settings(["final-local-epochs"], [parsed(method="fedrep")])


def test_the_rules_that_read_alpha_are_those_that_are_named() -> None:
    rules = {**NODE_RULES, **NETWORK_RULES, **GRAPH_RULES}
    assert [n for n, r in rules.items() if "alpha" in r.options] == ["dirichlet"]


def test_a_removed_setting_is_refused_on_the_command_line() -> None:
    config = parsed(method="fedala", **{"fedala.weight-lr": 1.0})
    with pytest.raises(ConfigError, match=r"fedala\.weight-lr is no longer.*1\.0"):
        reject_unused_settings(["fedala.weight-lr"], [config])


def test_settings_of_the_synthetic_graph_are_refused_with_owners() -> None:
    with pytest.raises(ConfigError, match="no effect with dataset = hospitals"):
        reject_unused_settings(["synthetic.nodes"], [parsed(owners="a/hospitals")])
