"""Backbones of typed graphs: RGCN, GraphSAGE and GINE with weights per relation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.nn.backbone import Backbone, Parts
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.layers import mlp
from flower_fgl.nn.relations import (
    RelationPairs,
    relation_means,
    relation_sum,
    sum_at_targets,
)
from flower_fgl.nn.stacked import map_rows

__all__ = ["RGCN", "SCHEMA_PARTS", "MeanRGCN", "TypedGINE", "TypedGraphSAGE"]
__all__ += ["TypedNet", "unheld_names"]

SCHEMA_PARTS = ("types", "relations", "reverse")
"""Parts of the encoder whose tensors belong to one kind or one relation each."""
NODES = "nodes"
"""Part of the encoder with a vector for each node of the client."""


def unheld_names(
    names: Iterable[str], kinds: Collection[int], relations: Collection[int]
) -> Iterator[str]:
    """Yield the tensors of kinds and relations other than some, and those of nodes.

    Kinds and relations are given by number.
    """
    for name in names:
        _, part, *rest = name.split(".")
        if part == NODES:
            yield name
        elif part in SCHEMA_PARTS:
            held = kinds if part == "types" else relations
            if int(rest[0]) not in held:
                yield name


class OneType(nn.Module):
    """Linear map ``h = W x + b`` of the features, maybe none, of one kind of nodes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, width))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot weights; the bias is 0, and drawn for a kind without features."""
        hidden, width = self.weight.shape
        if width:
            nn.init.xavier_uniform_(self.weight)
            nn.init.zeros_(self.bias)
        else:
            nn.init.uniform_(self.bias, -sqrt(6 / (hidden + 1)), sqrt(6 / (hidden + 1)))


class Weight(nn.Module):
    """One tensor with Glorot weights: matrices (…, p, q), or a vector.

    Several matrices that are drawn as one tensor are smaller, as by torch's
    ``xavier_uniform_``.
    """

    def __init__(self, *shape: int, as_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.as_one = as_one
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each matrix with gain √2, and a vector as a row of a matrix."""
        shape = self.weight.shape
        fans = shape[-2] + shape[-1] if len(shape) > 1 else 1 + shape[0]
        if self.as_one:
            fans = (shape[0] + shape[1]) * shape[2]
        bound = sqrt(2) * sqrt(6 / fans)
        nn.init.uniform_(self.weight, -bound, bound)


class TypedNet(Backbone):
    """Network of a typed graph: a linear map per kind of nodes, layers, a linear head.

    ``num_layers``, at least 1, counts the layers that pass messages. ReLU and dropout
    follow each one but the last::

        h⁰_i = W_a x_i + b_a                    for a node i of kind a
        h'_i = root(h_i) + Σ_r messages_r(i)    over relations r, both ways

    Tensors of a kind or relation are named by its number in the schema:
    ``encoder.types.3.weight``, ``encoder.relations.12.0.weight`` (layer 0),
    ``encoder.reverse.12.0.weight``.
    """

    min_layers = 1
    reach = None
    """A receptive field has no relations."""
    bare_layers: ClassVar[int] = 0
    """First layers, in which relations have no tensors."""
    has_bases: ClassVar[bool] = False
    """Whether ``num-bases`` matrices may be common to all relations in a layer."""
    has_message_rows: ClassVar[bool] = False
    """Whether a layer computes a row for each message, not only means of messages."""

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct the shared parts first, so that their draws depend on no schema."""
        if self.typed is None:
            raise ConfigError(
                f"{type(self).__name__} needs a typed graph, but this graph has one kind "
                "of nodes and edges. Use another model, e.g. gcn."
            )
        schema, hidden = self.typed.schema, self.hidden_channels
        roots = nn.ModuleList(self.make_root() for _ in range(num_layers))
        parts: dict[str, nn.Module] = {"roots": roots}
        if num_bases := self.typed.num_bases * self.has_bases:
            # as one tensor in the published code, see MeanRGCN
            parts["bases"] = nn.ModuleList(
                Weight(num_bases, hidden, hidden, as_one=bool(self.bare_layers))
                for _ in range(self.bare_layers, num_layers)
            )
        parts["types"] = nn.ModuleList(
            OneType(width, hidden) for _, width in schema.widths
        )
        ways = ("relations", "reverse") if self.typed.has_reverse else ("relations",)
        for way in ways:
            parts[way] = nn.ModuleList(
                nn.ModuleList(
                    self.make_relation() for _ in range(self.bare_layers, num_layers)
                )
                for _ in schema.relations
            )
        if self.typed.num_nodes:
            parts[NODES] = Weight(self.typed.num_nodes, hidden)
        return nn.ModuleDict(parts), nn.Linear(hidden, num_outputs)

    def make_root(self) -> nn.Module:
        """Construct what all nodes share in one layer, by default the map of ``root``."""
        return nn.Linear(self.hidden_channels, self.hidden_channels)

    def make_relation(self) -> nn.Module:
        """Construct what one relation has in one layer, by default a matrix (p, p)."""
        return Weight(self.hidden_channels, self.hidden_channels)

    def root(self, layer: int, h: Tensor) -> Tensor:
        """Map the nodes' own representations (N, p), by default linearly."""
        encoder: Any = self.encoder
        return map_rows(encoder["roots"][layer], h)

    def messages(
        self, layer: int, h: Tensor, pairs: RelationPairs, own: Iterable[Tensor]
    ) -> Tensor:
        """Sum the messages (N, p) along relations with the tensors ``own``.

        There are none in the :attr:`bare_layers`. By default they are the sum over
        relations of the mean over neighbours.
        """
        return relation_sum(h, pairs, own)

    def finish(self, layer: int, total: Tensor) -> Tensor:
        """Map the sum of root and messages (N, p)."""
        return total

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the last layer's output: (N, hidden_channels)."""
        encoder: Any = self.encoder
        relations = graph.relations
        if relations is None:
            raise ValueError("A typed network got a graph without relations.")
        weight = torch.cat([one.weight for one in encoder["types"]], dim=-1)
        biases = torch.stack([one.bias for one in encoder["types"]], dim=-2)
        h = relations.rows_of(biases)
        if weight.shape[-1]:
            h = h + graph.linear(None, weight)
        if NODES in encoder:
            h = h + encoder[NODES].weight
        ways = [
            (relations.pairs(len(encoder[name]), is_back=name == "reverse"), name)
            for name in ("relations", "reverse")
            if name in encoder
        ]
        num_layers = len(encoder["roots"])
        for layer in range(num_layers):
            h = self._relu_dropout(h) if layer else h
            total = self.root(layer, h)
            for pairs, name in ways:
                place = layer - self.bare_layers
                own = [one[place].weight for one in encoder[name] if place >= 0]
                if len(encoder[name]):
                    total = total + self.messages(layer, h, pairs, own)
            h = self.finish(layer, total)
        return h


class RGCN(TypedNet):
    """Relational GCN with bases, Schlichtkrull et al., ESWC 2018.

    ``h'_i = W_0 h_i + b + Σ_r (1/|N_r(i)|) Σ_j W_r h_j`` with ``W_r = Σ_b a_rb V_b``: B
    bases V are common to all relations, and each has B coefficients. Without bases each
    relation has a matrix of its own.

    Notes
    -----
    1. The paper takes the mean per relation and the sum over relations, as here.
    2. Weight decay acts on coefficients and bases alike.
    """

    stacks = True
    has_bases = True

    @property
    def skips_empty(self) -> bool:
        """Whether each relation has a matrix of its own."""
        return self.typed is not None and not self.typed.num_bases

    def make_relation(self) -> nn.Module:
        """Construct the coefficients (B,), or the matrix (p, p)."""
        assert self.typed is not None
        bases = self.typed.num_bases
        return Weight(bases) if bases else super().make_relation()

    def messages(
        self, layer: int, h: Tensor, pairs: RelationPairs, own: Iterable[Tensor]
    ) -> Tensor:
        """Return the sum over relations of the mean over neighbours."""
        encoder: Any = self.encoder
        if "bases" in encoder:
            bases = encoder["bases"][layer].weight
            shares = torch.stack(list(own), -2)
            own = torch.einsum("...rb,...bio->...rio", shares, bases).unbind(-3)
        return super().messages(layer, h, pairs, own)


class Shift(nn.Module):
    """A vector (p,) that is added to representations; 0 at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        """Set the vector to 0."""
        nn.init.zeros_(self.bias)


class MeanRGCN(RGCN):
    """RGCN as in the published code of FedHGN, Fu and King, IJCAI 2023.

    No layer reads a node's own representation, and the first has no weights::

        h¹_i = b + Σ_r (1/|N_r(i)|) Σ_j h⁰_j
        h'_i = b + Σ_r (1/|N_r(i)|) Σ_j W_r h_j    in later layers, W_r = Σ_b a_rb V_b

    ReLU follows each layer, also the last, before the linear head.

    Notes
    -----
    1. The published code has a learned vector per node in place of features: set
       ``node-embedding = true``. Features are read as well here.
    2. It draws the bases of a layer as one tensor, as here: with 20 bases of width 64 they
       are a sixth of those of :class:`RGCN`.
    """

    stacks = True
    min_layers = 2
    bare_layers = 1

    def make_root(self) -> nn.Module:
        """Construct the bias."""
        if self.typed is not None and not self.typed.num_bases:
            raise ConfigError('model = "rgcn-mean" needs num-bases above 0, got 0.')
        return Shift(self.hidden_channels)

    def root(self, layer: int, h: Tensor) -> Tensor:
        """Return the bias of each node."""
        encoder: Any = self.encoder
        bias: Tensor = encoder["roots"][layer].bias
        return bias.unsqueeze(-2).expand_as(h)

    def messages(
        self, layer: int, h: Tensor, pairs: RelationPairs, own: Iterable[Tensor]
    ) -> Tensor:
        """Return the sum over relations of the mean over neighbours."""
        if layer:
            return super().messages(layer - 1, h, pairs, own)
        return sum_at_targets(relation_means(h, pairs), pairs.target, h)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the last layer's output after ReLU: (N, hidden_channels)."""
        return super().embed_nodes(graph).relu()


class TypedGraphSAGE(TypedNet):
    """GraphSAGE with a matrix per relation and the same root weights for all kinds.

    Hamilton et al., NeurIPS 2017; means of neighbours per relation are summed, as in
    PyG's ``to_hetero`` with ``aggr = "sum"``.

    Notes
    -----
    1. ``to_hetero`` has root weights per relation. Here all kinds share them: a mean over
       owners then weighs no owner by its number of relations.
    """

    stacks = True
    skips_empty = True


class TypedGINE(TypedNet):
    """GINE whose edges have a learned vector per relation instead of features.

    ``h'_i = MLP(h_i + Σ_r Σ_{j∈N_r(i)} ReLU(h_j + e_r))``, Hu et al., ICLR 2020, in PyG's
    form; e_r (p,) is the vector of relation r. The MLP has two linear layers, and ε is 0,
    as in :class:`~flower_fgl.nn.GINE`.
    """

    stacks = True
    has_message_rows = True

    def make_root(self) -> nn.Module:
        """Construct the MLP."""
        return mlp(*[self.hidden_channels] * 3)

    def make_relation(self) -> nn.Module:
        """Construct the vector e_r (p,)."""
        return Weight(self.hidden_channels)

    def root(self, layer: int, h: Tensor) -> Tensor:
        """Return the representations."""
        return h

    def messages(
        self, layer: int, h: Tensor, pairs: RelationPairs, own: Iterable[Tensor]
    ) -> Tensor:
        """Return the sum over all edges."""
        relation = pairs.relation.index_select(0, pairs.pair)
        vectors = (
            torch.stack(list(own), dim=-2).flatten(0, -2).index_select(0, relation)
        )
        rows = h.flatten(0, -2).index_select(0, pairs.source)
        # in place: new rows for each edge take longer than the sums
        found = pairs.weigh(rows.add_(vectors).relu_())
        return sum_at_targets(found, pairs.target.index_select(0, pairs.pair), h)

    def finish(self, layer: int, total: Tensor) -> Tensor:
        """Apply the layer's MLP."""
        return super().root(layer, total)
