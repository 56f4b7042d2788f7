"""Conversion between the state of a model and one vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["state_to_vector", "vector_to_state"]


def state_to_vector(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate the tensors of a model in their order.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        The model's state.

    Returns
    -------
    Tensor of shape (P,)
        Without gradient.
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def vector_to_state(
    vector: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Undo :func:`state_to_vector`.

    Parameters
    ----------
    vector : Tensor of shape (P,)
        The model.
    shapes : mapping of str to tuple of int
        Names and shapes in the order of :func:`state_to_vector`.

    Returns
    -------
    dict of str to Tensor
        Views of ``vector``.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.split(vector, sizes)
    return {
        name: part.view(shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
