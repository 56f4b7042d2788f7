"""The ``typer`` app of ``flower-fgl``, whose commands refuse an option given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import click
import typer
from typer.core import TyperCommand

from flower_fgl.core.errors import ConfigError

__all__ = ["App"]


class _Command(TyperCommand):
    """Command that refuses a repeated option, of which click uses the last value."""

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
                    raise ConfigError(
                        f"{name} is given {number} times: give it once. Where several "
                        f"values are allowed they are a list, e.g. {name} 1,2."
                    )
            return values, rest, order

        parser.parse_args = parse_once
        return parser


class App(typer.Typer):
    """App whose commands refuse an option that is given twice."""

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        """Register a command, see :meth:`typer.Typer.command`."""
        return super().command(name, **{"cls": _Command, **options})
