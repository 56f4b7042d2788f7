"""``Schema``: the kinds of nodes and the relations of a typed graph."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from flower_fgl.core.errors import ConfigError, DataError, first_of

__all__ = ["MOST_RELATIONS", "MOST_TYPES", "TYPED", "Schema", "Triple", "TypedModel"]
__all__ += ["has_name"]

Triple = tuple[str, str, str]
"""Kind of the sources, name, and kind of the targets of a relation."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
"""Names of kinds and relations, which are also names of files."""
HASH = re.compile("[0-9a-f]{16}")
MOST_TYPES, MOST_RELATIONS = 100, 1_000
"""Largest number of kinds of nodes, and of relations, of one graph."""
MOST_SHOWN = 10
"""Relations that a message names."""
TYPED = "typed:"
"""Start of the text of a :class:`TypedModel`."""


@dataclass(frozen=True)
class Schema:
    """Kinds of nodes, widths of their features, and relations, in the owner's order.

    Kinds and relations are numbered by their place. The feature matrix of a typed graph
    has a block of columns for each kind; a node has zeros outside the block of its kind.
    """

    # kind of the nodes that are predicted; in a set of graphs the kind whose nodes are
    # pooled, empty for all kinds
    target: str
    widths: tuple[tuple[str, int], ...]  # of the features of each kind; may be 0
    relations: tuple[Triple, ...] = ()
    private: frozenset[Triple] = frozenset()  # relations that the owner keeps to itself
    predicted: Triple | None = None  # whose links or edges are predicted, not nodes

    @property
    def node_types(self) -> tuple[str, ...]:
        """The kinds of nodes."""
        return tuple(name for name, _ in self.widths)

    @property
    def num_features(self) -> int:
        """Width of the feature matrix: the sum over kinds."""
        return sum(width for _, width in self.widths)

    def blocks(self) -> Iterator[tuple[str, slice]]:
        """Yield each kind with its columns of the feature matrix."""
        start = 0
        for name, width in self.widths:
            yield name, slice(start, start + width)
            start += width

    def ordered(self) -> Schema:
        """Return the schema with kinds and relations sorted by name."""
        return replace(
            self,
            widths=tuple(sorted(self.widths)),
            relations=tuple(sorted(self.relations)),
        )

    def hashed(self) -> Schema:
        """Return the schema with hashes in place of all names.

        They are the same for two owners exactly if the names are; short names can be
        guessed.
        """
        found = [*self.relations, *[self.predicted or ("", "", "")]]
        *relations, predicted = ((_hash(a), _hash(n), _hash(b)) for a, n, b in found)
        return Schema(
            self.target and _hash(self.target),
            tuple((_hash(kind), width) for kind, width in self.widths),
            tuple(relations),
            predicted=predicted if self.predicted else None,
        )

    @property
    def is_hashed(self) -> bool:
        """Whether the names of all kinds are hashes, as :meth:`hashed` makes them."""
        return all(HASH.fullmatch(kind) for kind in self.node_types)

    def only(self, kinds: Collection[str], relations: Collection[Triple]) -> Schema:
        """Return the part with some kinds and relations, in the same order."""
        return replace(
            self,
            widths=tuple(one for one in self.widths if one[0] in kinds),
            relations=tuple(one for one in self.relations if one in relations),
            private=self.private & set(relations),
        )

    def places_in(self, agreed: Schema) -> tuple[set[int], set[int]]:
        """Return the numbers that kinds and relations have in a larger schema."""
        kinds = {agreed.node_types.index(kind) for kind in self.node_types}
        return kinds, {agreed.relations.index(one) for one in self.relations}

    @classmethod
    def union(cls, parts: Sequence[Schema]) -> Schema:
        """Return all kinds and relations of some schemas, sorted by name.

        The schemas agree on the target and on the width of each kind.
        """
        widths = {one for part in parts for one in part.widths}
        relations = {one for part in parts for one in part.relations}
        first = parts[0]
        return cls(
            first.target,
            tuple(sorted(widths)),
            tuple(sorted(relations)),
            predicted=first.predicted,
        )

    def to_predict(self, name: str, where: str) -> Schema:
        """Return the schema of a run that predicts links or edges of a relation.

        ``name`` is that of the relation, or ``SOURCE:NAME:TARGET``; empty: the only one. A
        ``DataError``, which begins with ``where``, says that it is not clear, or private.
        """
        found = [one for one in self.relations if has_name(one, name)]
        listed = first_of([":".join(one) for one in self.relations], MOST_SHOWN)
        if len(found) != 1:
            several = f"{len(found)} relations" if found else "no relation"
            has = "have the name" if len(found) > 1 else "has the name"
            fits = f'{several} {has} "{name[:80]}"' if name else f"it has {several}"
            raise DataError(
                f"{where}: {fits}. Set target-relation to the one whose links or edges are "
                f"predicted: {listed}."
            )
        if found[0] in self.private:
            raise DataError(
                f"{where}: the relation {':'.join(found[0])} is private, but the run "
                "predicts it, so that all owners know it. Remove private, or set another "
                "target-relation."
            )
        return replace(self, target=found[0][0], predicted=found[0])

    def check(self, where: str) -> None:
        """Raise a DataError, which begins with ``where``, for an impossible schema."""
        types = self.node_types
        for what, found, most in (
            ("kinds of nodes", types, MOST_TYPES),
            ("relations", self.relations, MOST_RELATIONS),
        ):
            if len(found) > most:
                raise DataError(
                    f"{where}: {len(found):,} {what}, expected at most {most:,}."
                )
            if twice := sorted({str(one) for one in found if found.count(one) > 1}):
                raise DataError(f"{where}: {what} are listed twice: {twice[0]}.")
        for name in (*types, *(name for _, name, _ in self.relations)):
            if not NAME.fullmatch(name):
                raise DataError(
                    f"{where}: {name[:80]!r} is no name of a kind or relation. Use 1 to 64 "
                    "of the characters A-Z a-z 0-9 _ . - and begin with no dot."
                )
        folded: dict[str, str] = {}
        for name in types:
            other = folded.setdefault(name.lower(), name)
            if other != name:
                raise DataError(
                    f'{where}: the kinds "{other}" and "{name}" differ only by case. '
                    "Rename one."
                )
        named = [(f'relation "{name}"', (a, b)) for a, name, b in self.relations]
        if self.predicted:
            named.append(("relation to predict", self.predicted[::2]))
        for what, ends in named:
            if unknown := [end for end in ends if end not in types]:
                raise DataError(
                    f'{where}: the {what} has the kind "{unknown[0]}", which is no kind of '
                    f"nodes. Kinds: {', '.join(types)}."
                )
        if self.target and self.target not in types:
            raise DataError(
                f'{where}: the kind to predict, "{self.target}", is no kind of nodes. '
                f"Kinds: {', '.join(types)}."
            )

    def to_text(self) -> str:
        """Return the schema as one line of JSON."""
        private = [one for one in self.relations if one in self.private]
        predicted = [self.predicted] if self.predicted else []
        parts = [self.target, self.widths, self.relations, private, predicted]
        while not parts[-1] and len(parts) > 3:
            parts.pop()
        return json.dumps(parts)

    @classmethod
    def from_text(cls, text: str) -> Schema:
        """Read :meth:`to_text`; a ConfigError says that it is malformed."""
        try:
            target, widths, *triples = json.loads(text)
            relations, private, predicted = (
                tuple((str(a), str(name), str(b)) for a, name, b in found)
                for found in (*triples, [], [])[:3]
            )
            made = cls(
                str(target),
                tuple((str(name), int(width)) for name, width in widths),
                relations,
                frozenset(private),
                *predicted,
            )
            made.check("schema")
        except (ValueError, TypeError, DataError) as error:
            raise ConfigError(f"Malformed schema of a typed graph: {error}") from error
        return made


@dataclass(frozen=True)
class TypedModel:
    """What a typed backbone is built for."""

    schema: Schema  # kinds and relations of its graphs
    num_bases: int = 8  # B of RGCN; 0: each relation has weights of its own
    has_reverse: bool = True  # whether messages also run backwards, with own weights
    num_nodes: int = 0  # that have a learned vector each, which stays on the client

    def to_text(self) -> str:
        """Return the argument ``messages`` of a typed backbone."""
        schema = replace(self.schema, private=frozenset()).to_text()
        sizes = f"{self.num_bases}:{int(self.has_reverse)}:{self.num_nodes}"
        return f"{TYPED}{sizes}:{schema}"

    @classmethod
    def from_text(cls, text: str) -> TypedModel | None:
        """Read :meth:`to_text`; ``None`` for the messages of another backbone."""
        if not text.startswith(TYPED):
            return None
        bases, reverse, nodes, schema = text.removeprefix(TYPED).split(":", 3)
        return cls(Schema.from_text(schema), int(bases), reverse == "1", int(nodes))


def has_name(triple: Triple, name: str) -> bool:
    """Return whether a relation has a name, see :meth:`Schema.to_predict`.

    Its three names may be hashed.
    """
    hashed = tuple(map(_hash, triple))
    return not name or tuple(name.split(":")) in (triple, triple[1:2], hashed)


def _hash(name: str) -> str:
    """Return the first 64 bits of a name's SHA-256."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
