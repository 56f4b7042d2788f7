"""The ``typer`` app of ``flower-fgl``: repeated options, and ``~`` in paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click
import typer
from typer.core import TyperCommand

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.settings import GeneralSettings

__all__ = ["App"]


class _Command(TyperCommand):
    """Command that refuses a repeated option, and expands ``~`` in every path.

    Click would use the last value of a repeated option. A shell does not expand ``~`` in
    ``--out=~/report.html``.
    """

    def make_parser(self, ctx: click.Context) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            values, rest, order = parse(args=args)
            for param, number in Counter(order).items():
                if (
                    number > 1
                    and isinstance(param, click.Option)
                    and not param.multiple
                ):
                    name = max(param.opts, key=len)
                    hint = f" Several values are a list: {name} A,B."
                    settings = {field.name for field in fields(GeneralSettings)}
                    is_list = ctx.command.name == "run" and param.name in settings
                    raise ConfigError(
                        f"{name} is given {number} times: give it once."
                        f"{hint if is_list else ''}"
                    )
            for param in self.params:
                if isinstance(param.type, click.Path) and values.get(param.name):
                    values[param.name] = _expanded(values[param.name])
            return values, rest, order

        parser.parse_args = parse_once
        return parser


def _expanded(value: Any) -> Any:
    """Return a path, or several, with the user's home folder in place of ``~``."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    return [_expanded(part) for part in value] if isinstance(value, list) else value


class App(typer.Typer):
    """App whose commands refuse an option given twice, and expand ``~`` in paths."""

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        """Register a command, see :meth:`typer.Typer.command`."""
        return super().command(name, **{"cls": _Command, **options})
