"""Recipe that turns an owner's tables into a graph: which columns mean what.

``docs/prepare.md`` describes the TOML file, ``examples/recipes/`` holds some.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flower_fgl.core.errors import DataError, clip, show_path
from flower_fgl.core.options import load_toml, nearest
from flower_fgl.core.schema import Schema, Triple
from flower_fgl.datasets.graph_files.own_split import PARTS

__all__ = ["FEATURES", "Column", "Recipe", "TableRecipe", "match_column", "read_recipe"]
__all__ += ["FOREIGN", "KEYS", "Place", "find_column", "items_of"]

Place = tuple[str, ...]
"""``graphs`` of a set, ``nodes`` or ``edges``; in typed graphs also the kind of nodes or
the relation."""

FEATURES = ("number", "category", "date", "yes/no")
"""Kinds of columns that become features."""
OPTIONS = {
    "number": {"empty", "missing", "name", "log"},
    "category": {"empty", "missing", "name"},
    "date": {"empty", "missing", "name", "format", "since"},
    "yes/no": {"empty", "missing", "name", "yes", "no"},
    "graph": {"empty"},
    "key": {"empty"},
    **{kind: {"empty", "graph"} for kind in ("id", "source", "target")},
    "label": {"empty", "classes"},
    "split": {"empty", "parts"},
    "time": {"empty", "format", "cuts"},
    "ignore": set(),
}
"""Options of each kind of column."""
KEYS = {"graphs": ("id",), "nodes": ("id",), "edges": ("source", "target")}
"""Columns that every table of graphs, nodes or edges has."""
OF_GRAPHS = ("label", "split", "time", "key")
"""Columns that in a set only tables of graphs have."""
FOREIGN = "foreign"
"""Feature of nodes that only edges name."""
RESERVED = {"graph", "id", "label", "split", "source", "target", "time", "constant"}
RESERVED |= {FOREIGN}


@dataclass(frozen=True)
class Column:
    """What a column means.

    ``name`` is that of the feature, and the kind for all others.
    """

    name: str
    kind: str
    missing: str | float | None = None  # None: an empty cell is an error
    empty: tuple[str, ...] = ()  # texts that count as an empty cell
    log: bool = False  # sign(x)·log(1 + |x|)
    format: str = ""  # of dates; empty: ISO 8601, and times are numbers
    since: str = "1970-01-01"  # a date is the number of days since then
    yes: tuple[str, ...] = ("yes", "y", "true", "t", "1")
    no: tuple[str, ...] = ("no", "n", "false", "f", "0")
    classes: Mapping[str, str] = field(default_factory=dict)  # by text
    parts: Mapping[str, str] = field(default_factory=lambda: _same(PARTS))
    cuts: tuple[float, ...] = ()  # last times of training and of validation items
    graph: bool = False  # whether an id of nodes, or an end, also names their graph

    @property
    def meaning(self) -> tuple[Any, ...]:
        """What determines the feature, apart from how an owner's table spells it."""
        return self.name, self.kind, self.missing, self.log, self.since


@dataclass(frozen=True)
class TableRecipe:
    """A table of graphs, nodes or edges; * in a name of table or column is any text."""

    place: Place
    table: str = ""  # empty: all ends of edges are nodes
    columns: Mapping[str, Column] = field(default_factory=dict)
    header: bool = True  # without one the columns are 1, 2, …
    separator: str = ","
    decimal: str = "."
    join: bool = False  # whether rows add columns to nodes of other tables
    ends: tuple[str, ...] = ()  # of a relation: kinds of its sources and targets
    private: bool = False  # whether its owner keeps the relation to itself

    @property
    def part(self) -> str:
        """``graphs``, ``nodes`` or ``edges``."""
        return self.place[0]

    def nodes_at(self, key: str) -> Place:
        """Return the place of the nodes at the ``source`` or ``target`` of its edges."""
        return ("nodes", *self.ends[key == "target" :][:1])


@dataclass(frozen=True)
class Recipe:
    """All tables of an owner, and the vocabulary if the recipe names one.

    Without ``has_labels``, labels, splits and times of nodes and graphs are not read.
    """

    path: Path
    nodes: tuple[TableRecipe, ...]
    edges: tuple[TableRecipe, ...]
    foreign: str
    vocabulary: Mapping[str, Any] | None
    has_labels: bool
    graphs: tuple[TableRecipe, ...] = ()  # empty for one graph

    def needs(self, table: TableRecipe) -> bool:
        """Return whether a table has more than labels that are not read."""
        kinds = {column.kind for column in table.columns.values()}
        return self.has_labels or not table.join or bool(kinds.intersection(FEATURES))

    @property
    def is_typed(self) -> bool:
        """Whether the graph has kinds of nodes and relations."""
        return len(self.nodes[0].place) > 1

    @property
    def places(self) -> list[Place]:
        """Graphs, nodes, then edges; of a typed graph sorted by their names."""
        parts = (self.graphs, self.nodes, self.edges)
        return [place for part in parts for place in sorted({t.place for t in part})]

    def tables(self, place: Place) -> list[TableRecipe]:
        """Return the tables of some nodes or edges, or of all of a part."""
        return [
            table
            for table in (*self.graphs, *self.nodes, *self.edges)
            if table.place[: len(place)] == place
        ]

    def columns(self, place: Place) -> Iterator[Column]:
        """Yield the columns of all tables of some nodes or edges."""
        for table in self.tables(place):
            yield from table.columns.values()

    def classes(self, place: Place) -> list[str]:
        """Return the classes that the recipe lists; empty if it lists none."""
        listed = (name for c in self.columns(place) for name in c.classes.values())
        return [*dict.fromkeys(listed)]


def items_of(place: Place) -> str:
    """Name the items of a place for a message: ``nodes``, or ``card nodes``."""
    part, *name = place
    return " ".join([*name, part])


def match_column(name: str, columns: Mapping[str, Column]) -> Column | None:
    """Return what a column of a table means; ``None`` if the recipe does not know it."""
    key = find_column(name, columns)
    if key is None:
        return None
    column = columns[key]
    is_feature = key != name and column.kind in FEATURES
    return replace(column, name=name) if is_feature else column


def find_column(name: str, columns: Mapping[str, Column]) -> str | None:
    """Return the key that declares a column; of patterns that with most other characters.

    Of patterns with equally many it is the first one.
    """
    if name in columns:
        return name
    found = [
        key
        for key in columns
        if "*" in key and re.fullmatch(".*".join(map(re.escape, key.split("*"))), name)
    ]
    return max(found, key=lambda key: len(key) - key.count("*"), default=None)


def read_recipe(
    path: Path, *, has_labels: bool = True, needs_vocabulary: bool = True
) -> Recipe:
    """Read and check a recipe, and the vocabulary that it names.

    Raises a DataError if a key is unknown or has a wrong value, or nodes or edges are
    missing.
    """
    values, where = _read_toml(path), show_path(path)
    _check_keys(values, {*KEYS, "foreign", "vocabulary"}, where)
    is_set = "graphs" in values
    for part, remedy in (
        ("graphs", "with a column of the kind id"),
        ("nodes", 'or from = "edges" in it if the ends of all edges are the nodes'),
        ("edges", "with columns of the kinds source and target"),
    ):
        given = values.setdefault(part, [])
        if part == "graphs" and not is_set:
            continue
        if not given or not isinstance(given, list):
            raise DataError(
                f"{where} has no {part}. Add a table [[{part}]], with two brackets, for "
                f"each of your tables of {part}, {remedy}."
            )
        values[part] = tuple(
            _read_table(one, part, f"{where}, [[{part}]] {number}")
            for number, one in enumerate(given, start=1)
        )
    _check_types(values["nodes"], values["edges"], where)
    listed = [*values["graphs"], *values["nodes"]]
    for place in {table.place for table in listed}:
        if all(table.join for table in listed if table.place == place):
            raise DataError(
                f"{where}: all tables of {items_of(place)} have join = true. One must "
                f"list the {place[0]}."
            )
    foreign = values.get("foreign", "refuse")
    if foreign not in ("refuse", "flag"):
        raise DataError(
            f'{where}: foreign must be "refuse" or "flag", got {foreign!r}.'
        )
    words = values.get("vocabulary")
    if isinstance(words, str):
        words = _read_toml(path.parent / words) if needs_vocabulary else None
    if not isinstance(words, dict | None):
        raise DataError(f"{where}: vocabulary must be the name of a file, or a table.")
    parts = values["nodes"], values["edges"]
    graphs = tuple(values["graphs"])
    recipe = Recipe(path, *parts, foreign, words, has_labels, graphs)
    _check_whole(recipe, where)
    return recipe


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a recipe or a vocabulary."""
    try:
        return load_toml(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"Cannot read {show_path(path)}: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(
            f"{show_path(path)} is no TOML file: {clip(error, 200)}."
        ) from error


def _check_keys(values: Any, known: set[str], where: str) -> None:
    """Reject unknown keys, and what is no table."""
    if not isinstance(values, dict):
        raise DataError(f"{where} must be a table, got {clip(repr(values))}.")
    for key in values:
        if key not in known:
            raise DataError(
                f'{where}: unknown key "{clip(key)}". {nearest(key, known)}'
            )


def _checked(
    values: dict[str, Any],
    checks: Mapping[str, tuple[Callable[[Any], Any], str]],
    where: str,
) -> dict[str, Any]:
    """Return the values as their checks convert them."""
    found = {}
    for key, value in values.items():
        check, expected = checks[key]
        try:
            found[key] = check(value)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{where}: {key} must be {expected}, got {clip(repr(value))}."
            ) from error
    return found


def _of(kind: type) -> Callable[[Any], Any]:
    """Return a check that a value is of a type, and no empty text."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind) or value == "":
            raise TypeError
        return value

    return check


def _one_of(*marks: str) -> Callable[[Any], str]:
    """Return a check that a value is a character, one of ``marks`` if there are any."""

    def check(value: Any) -> str:
        is_mark = isinstance(value, str) and len(value) == 1 and value not in "\r\n"
        if not is_mark or value not in (marks or value):
            raise TypeError
        return str(value)

    return check


def _texts(value: Any) -> tuple[str, ...]:
    """Return a list of texts."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError
    return tuple(value)


def _small(value: Any) -> tuple[str, ...]:
    """Return a list of texts in small letters."""
    return tuple(text.lower() for text in _texts(value))


def _same(names: tuple[str, ...]) -> dict[str, str]:
    """Return names that stand for themselves."""
    return dict(zip(names, names, strict=True))


def _names(value: Any) -> dict[str, str]:
    """Return a name for each text; of a list, each text is its own name."""
    if isinstance(value, list):
        return _same(_texts(value))
    return {key: _of(str)(name) for key, name in value.items()}


def _cuts(value: Any) -> tuple[float, float]:
    """Return two ascending numbers."""
    first, last = map(float, value)
    if not first <= last:
        raise ValueError
    return first, last


def _rule(value: Any) -> str | float:
    """Return a rule for empty cells."""
    if value in ("mean", "median", "zero"):
        return str(value)
    number = float(value)
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise TypeError
    return number


def _date(value: Any) -> str:
    """Return a date as text, if it is one."""
    datetime.fromisoformat(value)
    return str(value)


CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "table": (_of(str), 'the name of a file, e.g. "accounts.csv" or "accounts-*.csv"'),
    "header": (_of(bool), "true or false"),
    **dict.fromkeys(("join", "private", "graph"), (_of(bool), "true or false")),
    **dict.fromkeys(
        ("type", "relation", "source", "target"),
        (_of(str), "the name of a kind of nodes or of a relation"),
    ),
    "separator": (_one_of(), "one character, no line break"),
    "decimal": (_one_of(".", ","), '"." or ","'),
    "name": (_of(str), "a text"),
    "missing": (_rule, '"mean", "median", "zero" or a finite number'),
    "empty": (_texts, 'a list of texts, e.g. ["NA", "-1"]'),
    "log": (_of(bool), "true or false"),
    "format": (_of(str), 'a text such as "%d.%m.%Y" or "iso"'),
    "since": (_date, 'a date such as "2000-01-31"'),
    "yes": (_small, "a list of texts"),
    "no": (_small, "a list of texts"),
    "classes": (_names, 'a list, or a table such as {"1" = "fraud", "0" = "ok"}'),
    "parts": (_names, 'a table such as {"0" = "train", "1" = "val", "2" = "test"}'),
    "cuts": (_cuts, "two ascending numbers, the last times of training and validation"),
}
"""How each option is checked, and what it must be."""


def _read_table(values: Any, part: str, where: str) -> TableRecipe:
    """Read one table of a recipe."""
    known = {"table", "columns", "header", "join", "separator", "decimal"}
    relation = ("relation", "source", "target", "private")
    named: dict[str, tuple[str, ...]] = {
        "graphs": (),
        "nodes": ("type",),
        "edges": relation,
    }
    _check_keys(values, known | {"from", *named[part]}, where)
    given = {key: values.pop(key) for key in named[part] if key in values}
    types = _checked(given, CHECKS, where)
    if part == "edges" and types and not {*named[part][:3]} <= types.keys():
        raise DataError(
            f"{where}: the edges of a relation need relation = its name, and source and "
            "target = the kinds of nodes that it joins."
        )
    place = (part, *(types[key] for key in named[part][:1] if key in types))
    if "from" in values:
        if part != "nodes" or values != {"from": "edges"}:
            raise DataError(
                f'{where}: from = "edges" is for nodes without a table, and stands alone, '
                "or with type."
            )
        return TableRecipe(place)
    declared = values.pop("columns", {})
    options = _checked({"table": None, **values}, CHECKS, where)
    if part == "edges" and options.get("join"):
        raise DataError(
            f"{where}: join = true is for tables of nodes or graphs; each row of this "
            "table would be one more edge. Put its columns into the other table of edges."
        )
    options["ends"] = tuple(types[key] for key in ("source", "target") if key in types)
    options["private"] = types.get("private", False)
    _check_keys(declared, set(declared), f"{where}: columns")
    columns = {key: _read_column(key, one, where) for key, one in declared.items()}
    kinds = Counter(column.kind for column in columns.values())
    for kind in ("id", "source", "target"):
        if bool(kinds[kind]) != (kind in KEYS[part]):
            raise DataError(
                f"{where}: a table of {part} needs columns of the kind "
                f"{' and '.join(KEYS[part])}, and no other key. Declare them, e.g. "
                f'account = "{KEYS[part][0]}".'
            )
    if part != "edges":
        kinds["split"] += kinds["time"]  # these times only determine the split
    for kind in OF_GRAPHS:
        if kinds[kind] > 1:
            raise DataError(f"{where}: {kinds[kind]} columns are the {kind}. Keep one.")
    times = [column for column in columns.values() if column.kind == "time"]
    if any(bool(column.cuts) != (part != "edges") for column in times):
        raise DataError(
            f"{where}: a time of nodes or graphs needs cuts = [last of training, last of "
            "validation], as a graph file keeps their split, not their time. A time of "
            "edges has no cuts: the run sets time-cuts."
        )
    return TableRecipe(place, columns=columns, **options)


def _read_column(key: str, given: Any, where: str) -> Column:
    """Read one column of a recipe."""
    where = f'{where}, column "{clip(key)}"'
    values = dict(given) if isinstance(given, dict) else {"kind": given}
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in OPTIONS:
        raise DataError(
            f"{where}: unknown kind {kind!r}. {nearest(str(kind), OPTIONS)}"
        )
    _check_keys(values, OPTIONS[kind], f"{where} of the kind {kind}")
    options = _checked(values, CHECKS, where)
    if not set(options.get("parts", {}).values()) <= set(PARTS):
        raise DataError(f"{where}: parts must be train, val or test.")
    if kind in ("category", "yes/no") and options.get("missing", "zero") != "zero":
        raise DataError(f'{where}: missing must be "zero" for the kind {kind}.')
    if "*" in key and "name" in options:
        raise DataError(
            f"{where}: name = … is for one column, and a name with * stands for several. "
            "Remove it, or declare each column of its own."
        )
    name = options.pop("name", key) if kind in FEATURES else kind
    if kind in FEATURES and name in RESERVED:
        raise DataError(
            f'{where}: a feature cannot have the name "{name}". Add name = "…" to it.'
        )
    return Column(name, kind, **options)


def _check_types(
    nodes: tuple[TableRecipe, ...], edges: tuple[TableRecipe, ...], where: str
) -> None:
    """Reject kinds of nodes and relations that no typed graph may have."""
    if len({len(table.place) for table in (*nodes, *edges)}) > 1:
        raise DataError(
            f"{where}: some tables name a kind of nodes (type = …) or a relation, others "
            "none. Name all of them, or none if all nodes are alike."
        )
    if len(nodes[0].place) == 1:
        return
    triples: dict[str, Triple] = {}
    for table in edges:
        name, (source, target) = table.place[1], table.ends
        found = triples.setdefault(name, (source, name, target))
        if found != (source, name, target):
            raise DataError(
                f'{where}: two relations have the name "{clip(name)}", from {found[0]} to '
                f"{found[2]} and from {source} to {target}. Give each a name of its own."
            )
    kinds = dict.fromkeys(table.place[1] for table in nodes)
    widths = tuple((kind, 0) for kind in kinds)
    Schema(nodes[0].place[1], widths, tuple(triples.values())).check(where)
    labelled = {
        items_of(table.place)
        for table in (*nodes, *edges)
        for column in table.columns.values()
        if column.classes
    }
    if len(labelled) > 1:
        raise DataError(
            f"{where}: {' and '.join(sorted(labelled))} both list classes. Only one kind "
            "is predicted: remove the other classes = …."
        )


def _check_set(recipe: Recipe, where: str) -> None:
    """Check that columns of graphs are where a set, or one graph, has them."""
    for table in (*recipe.nodes, *recipe.edges):
        found = [c for c in table.columns.values() if c.kind == "graph" or c.graph]
        if table.table and len(found) != bool(recipe.graphs):
            raise DataError(
                f"{where}: the tables of {items_of(table.place)} have {len(found)} columns "
                "that name the graph. In a set of graphs, with tables [[graphs]], each has "
                'one: column = "graph", or e.g. column = {kind = "id", graph = true}; '
                "else there is none."
            )
    for place in recipe.places:
        wrong = FEATURES if place == ("graphs",) else ("key",)
        if recipe.graphs and place != ("graphs",):
            wrong = OF_GRAPHS
        kinds = {column.kind for column in recipe.columns(place)}
        if misplaced := sorted(kinds.intersection(wrong)):
            raise DataError(
                f"{where}: {items_of(place)} have columns of the kind "
                f"{', '.join(misplaced)}. "
                "In a set of graphs, labels, splits and keys belong to [[graphs]], "
                "features to nodes and edges."
            )


def _check_whole(recipe: Recipe, where: str) -> None:
    """Check what concerns several tables."""
    _check_set(recipe, where)
    for place in recipe.places:
        seen: dict[str, Column] = {}
        for column in recipe.columns(place):
            if seen.setdefault(column.name, column).meaning != column.meaning:
                raise DataError(
                    f"{where}: two columns of {items_of(place)} have the name "
                    f'"{clip(column.name)}" and mean different things. Add another '
                    'name = "…" to one.'
                )
        kinds = {column.kind for column in recipe.columns(place)}
        extra = kinds & {"time", "split"}
        if place[0] == "edges" and extra and "label" not in kinds:
            raise DataError(
                f"{where}: {items_of(place)} have columns of the kind "
                f"{', '.join(sorted(extra))}, but no label. A graph file holds them only "
                'with the class of each edge: declare them as "ignore", or one column as '
                '"label".'
            )
