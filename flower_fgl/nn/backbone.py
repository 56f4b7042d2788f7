"""Base class of all backbones: an encoder and a classifier; its copy and its recorder."""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import deepcopy
from typing import Any, ClassVar, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.schema import TypedModel
from flower_fgl.nn import layers
from flower_fgl.nn.graph_input import GraphInput, Pooling
from flower_fgl.nn.topology import Direction

__all__ = ["Backbone", "Parts", "RecordingBackbone", "copy_network", "is_finite"]


Network = TypeVar("Network", bound=nn.Module)

Parts = tuple[nn.Module, nn.Module]
"""Encoder and classifier."""


class Backbone(nn.Module):
    """A network that classifies nodes or graphs: an encoder and a classifier.

    Names of all parameters start with ``encoder.`` or ``classifier.``: methods with
    personalized prediction heads share the first and keep the second local.

    Parameters
    ----------
    in_channels : int
        Feature width d, at least 1.
    hidden_channels : int
        Width p of the embedding, at least 1; the same for every backbone.
    num_outputs : int
        Number of classes, labels or numbers C, at least 1; formerly ``num_classes``.
    num_layers : int
        Depth, at least ``min_layers``; the docstring of each backbone defines it.
    dropout : float in [0, 1)
        Rate for hidden representations; features are never dropped.
    steps : int, optional
        Propagation steps, instead of the backbone's default; only for backbones that
        count steps apart from layers.
    readout : bool or {"default", "sum", "mean"}
        Classify whole graphs: pool the nodes of each graph, then apply a linear
        classifier to the pooled embedding. ``"sum"`` and ``"mean"`` replace ``pooling``.
    has_linear_head : bool
        Use a linear classifier for nodes too in a :class:`LayeredNet`. Other backbones
        ignore it.
    link : {"", "dot", "mlp", "edge:CxA"}
        Predict links, or classify edges: ``num_outputs`` is then the width of the nodes'
        embeddings, which a decoder turns into scores of pairs, see
        :func:`~flower_fgl.nn.link.make_decoder`. Its parameters start with ``decoder.``.
    messages : {"", "both:A", "separate:A", "forward:A", "typed:…"}
        Direction of the messages, and width A of the features of edges, for backbones that
        read :attr:`GraphInput.messages`; for backbones of typed graphs the text of a
        :class:`~flower_fgl.core.schema.TypedModel`. Others ignore it.

    Raises
    ------
    ConfigError
        If a size is out of range.
    """

    min_layers: ClassVar[int] = 2
    pooling: Pooling = "mean"
    """Aggregation over the nodes of a graph in a readout. The mean keeps graphs of all
    sizes on one scale, as networks that average neighbours expect."""

    stacks: ClassVar[bool] = False
    """Whether the network also takes the weights of many clients at once, see
    :mod:`flower_fgl.nn.stacked`. It then maps representations by methods of
    :class:`GraphInput` only, and indexes dimensions from the last. The value counts only
    for the class that declares it: a subclass may compute something else."""

    uniform: layers.Uniform = staticmethod(torch.rand_like)  # type: ignore[assignment]
    """Source of the numbers of dropout."""

    rep_norm: str = ""
    """Normalisation of representations in networks with a separate classifier."""

    steps: int = 0
    """Propagation steps of backbones that count them apart from layers, else 0."""

    edge_direction: Direction = "both"
    """Direction of messages; ``both`` unless the constructor got another."""

    edge_channels: int = 0
    """Width of the features of edges that messages contain."""

    typed: TypedModel | None = None
    """Kinds and relations that a backbone of typed graphs is built for."""

    encoder: nn.Module
    classifier: nn.Module
    decoder: nn.Module | None

    @property
    def pooled_kind(self) -> int | None:
        """Kind of the nodes of a typed graph that a readout pools; ``None`` for all."""
        schema = self.typed and self.typed.schema
        return (
            schema.node_types.index(schema.target) if schema and schema.target else None
        )

    @property
    def reach(self) -> int | None:
        """Number of layers that read neighbours; ``None`` excludes receptive fields."""
        # A receptive field supports linear and filtered_linear only, so a backbone that
        # calls more must return None.
        return None

    @property
    def skips_empty(self) -> bool:
        """Whether tensors of relations without edges get no gradient in typed graphs."""
        return False

    def __init__(
        self,
        *,
        in_channels: int,
        hidden_channels: int,
        num_outputs: int = 0,
        num_layers: int,
        dropout: float,
        steps: int | None = None,
        readout: bool | str = False,
        has_linear_head: bool = False,
        link: str = "",
        messages: str = "",
        num_classes: int = 0,
    ) -> None:
        super().__init__()
        num_outputs = num_outputs or num_classes
        if messages.startswith("typed:"):
            self.typed = TypedModel.from_text(messages)
        sizes = {
            "in_channels": (in_channels, 0 if self.typed else 1),
            "hidden_channels": (hidden_channels, 1),
            "num_outputs": (num_outputs, 1),
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
        if messages and self.typed is None:
            direction, _, width = messages.partition(":")
            self.edge_direction = cast(Direction, direction)
            self.edge_channels = int(width)
        self.dropout = dropout
        self.readout = bool(readout)
        if isinstance(readout, str) and readout != "default":
            if readout not in get_args(Pooling):
                raise ConfigError(f'readout must be "sum" or "mean", got "{readout}".')
            self.pooling = cast(Pooling, readout)
        self.has_linear_head = has_linear_head or self.readout
        self.encoder, self.classifier = self.make(in_channels, num_outputs, num_layers)
        self.decoder = None
        if link:
            from flower_fgl.nn.link import (
                make_decoder,  # other networks need no decoder
            )

            self.decoder = make_decoder(link, num_outputs)

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct encoder and classifier, with ``num_layers`` as in the constructor.

        All sizes are validated; ``hidden_channels``, ``dropout``, ``readout`` and
        ``has_linear_head`` are already set.
        """
        raise NotImplementedError

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the last hidden representation of each node, (N, hidden_channels).

        It is that after dropout, in training mode.
        """
        raise NotImplementedError

    def represent(self, graph: GraphInput) -> Tensor:
        """Return node representations (N, hidden_channels) for a separate classifier.

        As :meth:`embed_nodes`; a :class:`LayeredNet` omits the activation and dropout
        after its last layer.
        """
        return self.embed_nodes(graph)

    def embed(self, graph: GraphInput) -> Tensor:
        """Return the penultimate representation of each node, or of each graph.

        It has the shape (N, hidden_channels), for a readout, whose input is a batch of G
        graphs, (G, hidden_channels): after dropout, in training mode; then pooled. A
        ValueError says that a network without readout got a batch of graphs, or one with
        readout a single graph.
        """
        if self.readout != (graph.batch is not None):
            raise ValueError(
                "A network with readout needs a GraphInput with batch, any other network "
                f"one without batch: got readout = {self.readout}, batch of "
                f"{'no' if graph.batch is None else graph.num_graphs} graphs."
            )
        h = self.embed_nodes(graph)
        return graph.pool(h, self.pooling, self.pooled_kind) if self.readout else h

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict logits (N, C) or (G, C) from the embeddings that :meth:`embed` returned.

        Heads without propagation ignore the ``graph`` of the embeddings.
        """
        classifier = self.classifier
        if isinstance(classifier, nn.Linear) and classifier.weight.dim() == 3:
            return graph.linear(h, classifier.weight, classifier.bias)  # stacked
        out: Tensor = classifier(h)
        return out

    def forward(self, graph: GraphInput) -> Tensor:
        """Return the logits of all nodes (N, C), all graphs (G, C), or pairs (P, C)."""
        out = self.head(self.embed(graph), graph)
        return out if graph.pairs is None else self.decode(out, graph)

    def decode(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict the graph's pairs from the output (N, p) of :meth:`head`; (P, C)."""
        if self.decoder is None:
            raise ValueError("A network without decoder got pairs of nodes to predict.")
        edge_features = () if graph.pair_x is None else (graph.pair_x,)
        out: Tensor = self.decoder(h, graph.pairs, *edge_features)
        return out

    def predict(self, graph: GraphInput, wanted: Tensor) -> Tensor:
        """Return logits, (N, C) or (G, C), of which the caller reads only some rows.

        ``wanted`` (N,) or (G,), bool, marks these nodes or graphs; the other rows may
        hold any value. This computes all rows, as :meth:`forward`; networks with an
        expensive head override it.
        """
        out: Tensor = self(graph)
        return out

    def fixed(self) -> Backbone:
        """Return a network with the same predictions that needs only its state.

        It can be saved to a file. It is the network itself, unless its predictions also
        depend on a client's data.
        """
        return self

    def _dropout(self, h: Tensor) -> Tensor:
        """Apply dropout in training mode."""
        return layers.dropout(h, self.dropout, self.training, self.uniform)

    def _relu_dropout(self, h: Tensor) -> Tensor:
        """Apply ReLU, then dropout in training mode."""
        return layers.relu_dropout(h, self.dropout, self.training, self.uniform)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite; a check of each one takes 40 times as long."""
    # a finite sum has finite terms only; the sum of finite terms may overflow
    is_sum_finite = not tensor.is_floating_point() or math.isfinite(float(tensor.sum()))
    return is_sum_finite or bool(tensor.isfinite().all())


def copy_network(
    network: Network, memo: dict[int, Any] | None = None, *, is_empty: bool = False
) -> Network:
    """Copy a network as ``copy.deepcopy`` does, in a tenth of the time.

    Most of the time of ``deepcopy`` goes to the empty tables of hooks of every module.
    ``memo`` is that of ``deepcopy``. If it ``is_empty``, the copy gets trainable parameters
    on the CPU without values, for a network whose parameters have none (``meta`` tensors).
    """
    memo = {} if memo is None else memo
    if id(network) in memo:
        return cast(Network, memo[id(network)])
    if hasattr(type(network), "__deepcopy__") and not is_empty:
        # PyG 2.6's linear layer draws weights, which are then overwritten
        with torch.random.fork_rng(devices=[]):
            return deepcopy(network, memo)
    copied = network.__class__.__new__(network.__class__)
    memo[id(network)] = copied
    for name, value in vars(network).items():
        new: Any
        if name == "_modules":
            new = {
                n: m if m is None else copy_network(m, memo, is_empty=is_empty)
                for n, m in value.items()
            }
        elif name == "_parameters" and is_empty:
            # empty_like of a meta tensor takes 20 µs, empty 1 µs
            new = {
                n: p if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
                for n, p in value.items()
            }
        elif type(value) in (dict, OrderedDict, set, list) and not value:
            new = type(value)()
        elif type(value) in (bool, int, float, str, type(None)):
            new = value
        else:
            new = deepcopy(value, memo)
        copied.__dict__[name] = new
    return copied


class RecordingBackbone(Backbone):
    """Wrap a backbone, not copied, and keep the embedding of its last forward pass.

    ``extra`` is a module that the same optimizer trains, e.g. an attention scorer.
    ``items`` are the embedded graphs if the last input was a mini-batch of graphs; else
    ``None``.
    """

    def __init__(self, backbone: Backbone, extra: nn.Module | None = None) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.extra = extra
        self.embedding: Tensor
        self.items: Tensor | None = None

    @property
    def undecayed(self) -> list[nn.Parameter]:
        """Parameters of both modules that have no weight decay."""
        parts = (self.backbone, self.extra)
        return [p for part in parts for p in getattr(part, "undecayed", ())]

    def embed(self, graph: GraphInput) -> Tensor:
        """Return and keep the penultimate representation of each node or graph."""
        self.embedding = self.backbone.embed(graph)
        self.items = graph.selected
        return self.embedding

    @torch.no_grad()
    def at_rest(self, graph: GraphInput) -> Tensor:
        """Switch to evaluation mode and embed, without dropout and gradient."""
        self.eval()
        return self.embed(graph)

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from embeddings."""
        return self.backbone.head(h, graph)

    def decode(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict pairs of nodes from the output of :meth:`head`."""
        return self.backbone.decode(h, graph)
