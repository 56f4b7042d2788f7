"""Help texts of settings: given, or a string below the field."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import help_texts, nearest, option, parse_settings


@dataclass(frozen=True)
class Settings:
    """Settings of a method."""

    mu: float = option(0.1, "μ, weight of the proximal term", ge=0)
    depth: int = option(2, ge=1)
    """number of layers; a text of
    two lines"""
    name: str = option("a", choices="a b")


def test_a_text_is_given_or_below_the_field() -> None:
    @dataclass(frozen=True)
    class Own(Settings):
        name: str = option("b", choices="a b")
        """name of
        the form"""

    assert help_texts(Own) == {
        "mu": "μ, weight of the proximal term",
        "depth": "number of layers; a text of two lines",
        "name": "name of the form",
    }
    assert help_texts(Settings)["name"] == ""


def test_a_wrong_type_is_answered_with_the_text_below_the_field() -> None:
    with pytest.raises(ConfigError, match=r"depth: number of layers; a text of two"):
        parse_settings(Settings, {"depth": "deep"})


def test_settings_without_a_source_file_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("typed_in_a_shell")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(option=option, dataclass=dataclass)
    text = "@dataclass\nclass Made:\n    mu: float = option(0.5)\n    'text'"
    exec(text, vars(module))
    assert parse_settings(module.Made, {"mu": 1}).mu == 1.0
    assert help_texts(module.Made) == {"mu": ""}


def test_an_error_lists_the_first_of_very_many_names() -> None:
    nodes = [f"n{number:05d}" for number in range(30_000)]
    text = nearest("n00012x", nodes)
    assert text.startswith('Did you mean "n00012"? Known: n00000, n00001, ')
    assert text.endswith("n00019, … (30,000 in all).")
