"""Agreement of data owners on one numbering of their classes, by name."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["agree_classes"]


def agree_classes(lists: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Return one numbering of all classes of the data owners.

    Parameters
    ----------
    lists : collection of tuple of str
        Each data owner's class names in its own order, by ascending partition-id.

    Returns
    -------
    tuple of str
        C class names, in the order of the first data owner that has all classes. If none
        has, they are sorted, as numbers if all names are whole numbers.
    """
    union = {name for names in lists for name in names}
    for names in lists:
        if len(names) == len(union):
            return names
    if all(name.isdecimal() for name in union):
        return tuple(sorted(union, key=lambda name: (int(name), name)))
    return tuple(sorted(union))
