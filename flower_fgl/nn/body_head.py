"""A model's state in two parts: the body that embeds and the head that classifies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = ["BODY", "HEAD", "encoder_state", "classifier_state"]

BODY = "encoder."
"""What the names of the body begin with, see :class:`~flower_fgl.nn.Backbone`."""
HEAD = "classifier."
"""What the names of the head begin with."""

Entry = TypeVar("Entry")


def encoder_state(state: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of the body, with their names.

    Parameters
    ----------
    state : mapping of str to anything
        A backbone's state, or the shapes of it.
    """
    return {name: entry for name, entry in state.items() if name.startswith(BODY)}


def classifier_state(state: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of the head, with their names; see :func:`encoder_state`."""
    return {name: entry for name, entry in state.items() if name.startswith(HEAD)}
