"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Column, Table

__all__ = ["make_table", "rows_table"]


WIDE = 160
"""Width in characters of output that goes to a file or another program."""


def make_table(*names: str) -> Table:
    """Return an empty table whose first column is never truncated."""
    first, *rest = names
    return Table(
        Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in rest)
    )


def rows_table(sections: Sequence[Sequence[Mapping[str, str]]]) -> Table:
    """Build a table of sections of rows; cells of missing keys stay empty."""
    columns = dict.fromkeys(key for rows in sections for row in rows for key in row)
    table = make_table(*columns)
    for rows in sections:
        for row in rows:
            table.add_row(*(row.get(column, "") for column in columns))
        table.add_section()
    return table
