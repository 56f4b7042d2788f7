"""The state of a model: its encoder, classifier and layers by name; as one vector."""

from collections.abc import Mapping
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["BODY", "classifier_state", "encoder_state", "layer_of", "state_to_vector"]
__all__ += ["vector_to_state"]


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


def state_to_vector(
    tensors: Mapping[str, Tensor], *, is_stacked: bool = False
) -> Tensor:
    """Concatenate the tensors of a model in their order, without gradient: (P,).

    Stacked tensors (K, ...) give (K, P).
    """
    first, parts = int(is_stacked), [t.detach() for t in tensors.values()]
    shapes = {name: t.shape[first:] for name, t in tensors.items()}
    size = sum(shape.numel() for shape in shapes.values())
    dtype = reduce(torch.promote_types, (t.dtype for t in parts))
    vector = parts[0].new_empty((*parts[0].shape[:first], size), dtype=dtype)
    # one copy, where concatenating flattened tensors copies those of other layouts twice
    for place, part in zip(
        vector_to_state(vector, shapes).values(), parts, strict=True
    ):
        place.copy_(part)
    return vector


def vector_to_state(
    vector: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Undo :func:`state_to_vector` as views; ``shapes`` are those without K."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.split(vector, sizes, dim=-1)
    return {
        name: part.view((*vector.shape[:-1], *shape))
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
