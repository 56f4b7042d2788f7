"""Sizes of a method's own network, the backbone inside it, and its separate classifier."""

from typing import Any, TypedDict

from torch import Tensor, nn

from flower_fgl.nn import Backbone, GraphInput, build_model

__all__ = ["NetworkSizes", "SplitNet", "backbone_sizes", "sized_backbone"]


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


class SplitNet(Backbone):
    """An encoder's representations and a classifier of them, both not copied."""

    def __init__(self, encoder: Backbone, classifier: nn.Module) -> None:
        nn.Module.__init__(self)
        self.encoder: Backbone = encoder
        self.classifier = classifier
        self.hidden_channels = encoder.hidden_channels
        self.dropout, self.readout = encoder.dropout, False

    @property
    def reach(self) -> int | None:
        """The encoder's number of layers that read neighbours."""
        return self.encoder.reach

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the representation of each node, without a last activation: (N, p)."""
        return self.encoder.represent(graph)
