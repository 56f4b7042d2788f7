"""What owners who bring their own graphs must agree on: numbers, width, classes.

Everything here is settled by name, not by the order in which nodes connect, so that the
same owners give the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from flower_fgl.core.errors import RunError
from flower_fgl.protocols.describe import UNNUMBERED, Description

__all__ = ["agree_classes", "agree_width", "in_agreed_order", "number_owners"]


def number_owners(described: Mapping[int, Description]) -> dict[int, int]:
    """Give every owner a number.

    Parameters
    ----------
    described : mapping of int to Description
        By Flower's node id.

    Returns
    -------
    dict of int to int
        Partition-id by node id: their own where they bring one, else the lowest that are
        free, in the order of the owners' names (equal names: of the node ids).
    """
    numbers = {
        node: d.partition_id
        for node, d in described.items()
        if d.partition_id != UNNUMBERED
    }
    rest = sorted(described.keys() - numbers, key=lambda n: (described[n].name, n))
    free = (k for k in range(len(described)) if k not in set(numbers.values()))
    return numbers | dict(zip(rest, free, strict=False))


def agree_width(widths: Mapping[str, int]) -> int:
    """Choose the feature width d that most owners have.

    Parameters
    ----------
    widths : mapping of str to int
        Feature width by the owner's name for logs; at least one.

    Returns
    -------
    int

    Raises
    ------
    RunError
        If two widths are equally frequent: nobody can say then who is wrong.
    """
    (width, count), *others = Counter(widths.values()).most_common()
    if others and others[0][1] == count:
        text = ", ".join(f"{name}: {w}" for name, w in sorted(widths.items()))
        raise RunError(
            f"The owners' graphs have different feature widths, none of them more often "
            f"than the others ({text}). Agree on the features, and check every file with "
            "flower-fgl check-graph."
        )
    return width


def agree_classes(lists: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Agree on one numbering of all classes that any owner has.

    Parameters
    ----------
    lists : collection of tuple of str
        Each owner's class names in its own order, by ascending partition-id.

    Returns
    -------
    tuple of str
        Length C: the order of the first owner that names all classes; if nobody does,
        sorted, as numbers where all are whole numbers.
    """
    union = {name for names in lists for name in names}
    for names in lists:
        if len(names) == len(union):
            return names
    if all(name.isdecimal() for name in union):
        return tuple(sorted(union, key=lambda name: (int(name), name)))
    return tuple(sorted(union))


def in_agreed_order(
    description: Description, class_names: tuple[str, ...]
) -> Description:
    """Rewrite a description in the agreed numbering.

    Parameters
    ----------
    description : Description
        In its owner's own order.
    class_names : tuple of str
        Length C: what was agreed, all of the owner's classes among it.

    Returns
    -------
    Description
        With C class counts, 0 for classes that the owner does not have; none if the
        owner shares none.
    """
    own = dict(zip(description.class_names, description.class_counts, strict=False))
    counts = tuple(own.get(name, 0) for name in class_names) if own else ()
    return replace(description, class_names=class_names, class_counts=counts)
