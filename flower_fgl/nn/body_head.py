"""Split the state of a model into encoder and classifier, and into layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = ["BODY", "DECODER", "HEAD", "classifier_state", "encoder_state", "layer_of"]

BODY = "encoder."
"""Prefix of the encoder's tensor names, see :class:`~flower_fgl.nn.Backbone`."""
HEAD = "classifier."
"""Prefix of the classifier's tensor names."""
DECODER = "decoder."
"""Prefix of the tensor names of link prediction's decoder, a part of the head."""

Entry = TypeVar("Entry")


def encoder_state(state: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of the encoder, e.g. tensors or shapes, under their full names."""
    return {name: entry for name, entry in state.items() if name.startswith(BODY)}


def classifier_state(state: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of classifier and decoder; see :func:`encoder_state`."""
    return {
        name: entry for name, entry in state.items() if name.startswith((HEAD, DECODER))
    }


def layer_of(name: str) -> str:
    """Return the prefix of a tensor's name that identifies its layer.

    This is ``classifier``, or one part of the encoder, e.g. ``encoder.convs.0``.
    """
    root, *parts = name.split(".")
    if root == "classifier":
        return root
    numbered = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join([root, *parts[: numbered[0] + 1 if numbered else 1]])
