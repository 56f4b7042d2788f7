"""Sizes of a method's own network, and the backbone inside it."""

from typing import Any, TypedDict

from flower_fgl.nn import Backbone, build_model

__all__ = ["NetworkSizes", "backbone_sizes", "sized_backbone"]


class NetworkSizes(TypedDict):
    """Keywords that the function ``network`` of a method's row takes."""

    model: str  # backbone of the clients
    num_features: int  # d
    num_outputs: int  # C
    width: int  # of the embeddings
    num_layers: int
    dropout: float


def backbone_sizes(sizes: NetworkSizes) -> dict[str, Any]:
    """Return the sizes by the names of the arguments of a :class:`Backbone`."""
    return {
        "in_channels": sizes["num_features"],
        "hidden_channels": sizes["width"],
        "num_outputs": sizes["num_outputs"],
        "num_layers": sizes["num_layers"],
        "dropout": sizes["dropout"],
    }


def sized_backbone(sizes: NetworkSizes, **changes: Any) -> Backbone:
    """Build a backbone of these sizes; ``changes`` are arguments of ``build_model``."""
    return build_model(sizes["model"], **backbone_sizes(sizes) | changes)
