"""``flower-fgl settings KEY`` explains one setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.cli.setting_help import explain_setting
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.settings import PARTITIONS
from flower_fgl.datasets.partition.partition import describe_rules
from flower_fgl.methods import METHODS, parse_config

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_a_general_setting_is_explained() -> None:
    result = CliRunner().invoke(app, ["settings", "lr"])
    assert result.exit_code == 0
    for text in (
        "lr: learning rate of the clients",
        "number, above 0, or auto",
        "default: 0.01; other defaults:",
        "fedpano 0.1",
        "flower-fgl run --set lr=0.01",
        "flower_fgl.simulate(lr=0.01)",
        "flwr run . --run-config 'lr=0.01'",
    ):
        assert text in result.output


def test_a_setting_of_a_method_is_explained_with_and_without_its_table() -> None:
    text = explain_setting("fedprox.mu")
    assert "has an effect only with method = fedprox" in text
    assert "simulate(\"fedprox\", fedprox={'mu': 0.001})" in text
    assert "--run-config 'fedprox.mu=0.001 method=\"fedprox\"'" in text
    several = explain_setting("mu")
    for name in ("fedpg.mu", "fedprox.mu", "moon.mu"):
        assert f"{name}: " in several


def test_a_setting_that_needs_another_one_names_it() -> None:
    assert 'only with partition = "dirichlet"' in explain_setting("dirichlet-alpha")
    assert explain_setting("local_epochs") == explain_setting("local-epochs")
    assert "one of auto, true, false" in explain_setting("stacked")
    assert "path; ~ is your home folder" in explain_setting("output-dir")


def test_help_and_guide_explain_every_partition_rule_alike() -> None:
    rules, text = describe_rules(), explain_setting("partition")
    guide = GUIDE.read_text("utf-8")
    assert {rule.partition(" ")[0] for rule in rules} == set(PARTITIONS.split())
    assert "isolated nodes" in rules["metis"]
    for rule, description in rules.items():
        name, _, kind = rule.partition(" ")
        assert f"    {rule}: {description}\n" in text
        assert f"| `{name}`{' ' * bool(kind)}{kind} | {description} |\n" in guide


@pytest.mark.thorough
def test_every_setting_can_be_explained() -> None:
    keys = {*parse_config({}).general_defaults()}
    for name in METHODS:
        keys |= {key for key in parse_config({"method": name}).flat() if "." in key}
    for key in keys:
        assert explain_setting(key).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lrr", "lr"), ("fedprox.muu", "fedprox.mu"), ("fedpox", "fedprox")],
)
def test_a_wrong_name_suggests_the_right_one_before_the_list(
    name: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        explain_setting(name)
    text = str(error.value)
    assert text.index(f'Did you mean "{hint}"?') < text.index("Settings: ")
