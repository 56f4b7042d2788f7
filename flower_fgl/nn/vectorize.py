"""Conversion between the state of a model and one vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["state_to_vector", "vector_to_state"]


def state_to_vector(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate the tensors of a model in their order, without gradient: (P,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def vector_to_state(
    vector: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Undo :func:`state_to_vector`; the tensors are views of ``vector`` (P,)."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.split(vector, sizes)
    return {
        name: part.view(shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
