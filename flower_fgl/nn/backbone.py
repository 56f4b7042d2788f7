"""The base of all backbones: an encoder and a classifier."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.nn import conv
from flower_fgl.nn.graph_input import GraphInput, Pooling

__all__ = ["Backbone"]


class Backbone(nn.Module):
    """A network that classifies nodes or graphs: an encoder and a classifier.

    Names of all parameters start with ``encoder.`` or ``classifier.``: methods that
    personalise the prediction head share the first and keep the second.

    Parameters
    ----------
    in_channels : int
        Feature width d, at least 1.
    hidden_channels : int
        Width p of the embedding, at least 1; the same for every backbone.
    num_classes : int
        Number of classes C, at least 1.
    num_layers : int
        Depth, at least ``min_layers``; each backbone says what it counts.
    dropout : float in [0, 1)
        Rate for hidden representations; features are never dropped.
    steps : int, optional
        Steps of propagation, instead of the backbone's own number; only for backbones
        that count them apart from layers.
    readout : bool
        Whether whole graphs are classified: the nodes of each graph are pooled, and the
        classifier is a linear map of the pooled embedding.
    has_linear_head : bool
        Whether nodes are classified by a linear map as well, in a row of equal layers;
        of the other backbones it says nothing.

    Raises
    ------
    ConfigError
        If a size is out of range.
    """

    min_layers: ClassVar[int] = 2
    pooling: ClassVar[Pooling] = "mean"
    """What a readout computes over the nodes of a graph. The mean keeps graphs of all
    sizes on one scale, which networks that average neighbours expect."""

    rep_norm: str = ""
    """What bounds representations, where the classifier is not the backbone's own."""

    steps: int = 0
    """Steps of propagation where they are counted apart from layers, else 0."""

    encoder: nn.Module
    classifier: nn.Module

    @property
    def reach(self) -> int | None:
        """How many edges away a node is seen, layer by layer.

        ``None`` where it cannot take a :func:`~flower_fgl.nn.computation_graph.receptive_field`
        in place of the graph: its layers ask for more than ``linear`` and
        ``filtered_linear``.
        """
        return None

    def __init__(
        self,
        *,
        in_channels: int,
        hidden_channels: int,
        num_classes: int,
        num_layers: int,
        dropout: float,
        steps: int | None = None,
        readout: bool = False,
        has_linear_head: bool = False,
    ) -> None:
        super().__init__()
        sizes = {
            "in_channels": (in_channels, 1),
            "hidden_channels": (hidden_channels, 1),
            "num_classes": (num_classes, 1),
            "num_layers": (num_layers, self.min_layers),
        }
        for name, (value, least) in sizes.items():
            if value < least:
                raise ConfigError(
                    f"{type(self).__name__} needs {name} of at least {least}, "
                    f"got {value}."
                )
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {dropout}.")
        if steps is not None:
            if not self.steps or steps < 1:
                raise ConfigError(
                    f"{type(self).__name__} takes "
                    + (f"at least 1 step, got {steps}." if self.steps else "no steps.")
                )
            self.steps = steps
        self.hidden_channels = hidden_channels
        self.dropout = dropout
        self.readout = readout
        self.has_linear_head = has_linear_head or readout
        self.encoder, self.classifier = self.make(in_channels, num_classes, num_layers)

    def make(
        self, in_channels: int, num_classes: int, num_layers: int
    ) -> tuple[nn.Module, nn.Module]:
        """Make encoder and classifier.

        Parameters
        ----------
        in_channels, num_classes, num_layers : int
            As in the constructor, checked; ``hidden_channels``, ``dropout``,
            ``readout`` and ``has_linear_head`` are set.

        Returns
        -------
        encoder, classifier : torch.nn.Module
        """
        raise NotImplementedError

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the last hidden representation of each node.

        Parameters
        ----------
        graph : GraphInput
            Graph with N nodes.

        Returns
        -------
        Tensor of shape (N, hidden_channels)
            After dropout, in training mode.
        """
        raise NotImplementedError

    def represent(self, graph: GraphInput) -> Tensor:
        """Return what a classifier of its own is put on: a representation of each node.

        Parameters
        ----------
        graph : GraphInput
            Graph with N nodes.

        Returns
        -------
        Tensor of shape (N, hidden_channels)
            As :meth:`embed_nodes`, but without activation and dropout after the last
            layer where the backbone is a row of equal layers.
        """
        return self.embed_nodes(graph)

    def embed(self, graph: GraphInput) -> Tensor:
        """Return the penultimate representation of each node, or of each graph.

        Parameters
        ----------
        graph : GraphInput
            One graph with N nodes; for a readout a union of G graphs.

        Returns
        -------
        Tensor of shape (N, hidden_channels), for a readout (G, hidden_channels)
            After dropout, in training mode; then pooled.

        Raises
        ------
        ValueError
            If a union meets a network without readout, or the reverse.
        """
        if self.readout != (graph.batch is not None):
            raise ValueError(
                "A network with readout takes a GraphInput with batch, one without "
                f"takes none: got readout = {self.readout}, batch of "
                f"{'no' if graph.batch is None else graph.num_graphs} graphs."
            )
        h = self.embed_nodes(graph)
        return graph.pool(h, self.pooling) if self.readout else h

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from what :meth:`embed` returned.

        Parameters
        ----------
        h : Tensor of shape (N, hidden_channels) or (G, hidden_channels), float
            Embeddings.
        graph : GraphInput
            The graph they belong to; heads without propagation do not look at it.

        Returns
        -------
        Tensor of shape (N, C) or (G, C)
            Logits.
        """
        out: Tensor = self.classifier(h)
        return out

    def forward(self, graph: GraphInput) -> Tensor:
        """Return the logits of all nodes (N, C), or of all graphs (G, C)."""
        return self.head(self.embed(graph), graph)

    def predict(self, graph: GraphInput, wanted: Tensor) -> Tensor:
        """Return logits of which some rows only are read.

        All are computed, unless a network overrides this because its head is dear.

        Parameters
        ----------
        graph : GraphInput
            One graph, or a union of graphs.
        wanted : Tensor of shape (N,) or (G,), bool
            Nodes or graphs whose rows are read.

        Returns
        -------
        Tensor of shape (N, C) or (G, C)
            As :meth:`forward`; rows that are not wanted may hold anything.
        """
        out: Tensor = self(graph)
        return out

    def fixed(self) -> Backbone:
        """Return what predicts alike from its state alone, to be written to a file.

        Returns
        -------
        Backbone
            The network itself, unless it predicts by a client's data as well.
        """
        return self

    def _dropout(self, h: Tensor) -> Tensor:
        return conv.dropout(h, self.dropout, self.training)

    def _relu_dropout(self, h: Tensor) -> Tensor:
        return conv.relu_dropout(h, self.dropout, self.training)
