"""Many clients in one forward pass: block-diagonal graphs and stacked weights.

A backbone whose class sets ``stacks`` runs unchanged on a :class:`StackedInput`, with
weights of shape (K, out, in) from :func:`stack_model`. Representations have the shape
(K, n, p), where n is the number of nodes of the largest client. Rows beyond a client's own
nodes are padding: they have no edges to other rows, and the caller does not read them.

A server that distils the clients' models runs all of them on each generated graph. An
:class:`Ensemble` stacks their weights in the same way; the features, the edges and their
propagation are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone, copy_network
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.relations import StackedRelations
from flower_fgl.nn.sparse import Operator, SparseOperator, apply_function, csr_matrix
from flower_fgl.nn.topology import OperatorKind, Topology, graph_filter

__all__ = ["DescendingInput", "Descent", "Ensemble", "Ragged", "SharedInput"]
__all__ += ["StackedInput", "can_stack", "linear_each", "map_each"]
__all__ += ["map_rows", "pad_rows", "split_state", "stack_graphs", "stack_model"]


Module = TypeVar("Module", bound=nn.Module)


class BlockOperator:
    """A block-diagonal matrix (K·n, K·n) as operator on representations (K, n, p)."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def matmul(self, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply (K, n, p) from the left, and add a bias (K, p) to the rows."""
        out = self._operator.matmul(dense.reshape(-1, dense.shape[-1]))
        out = out.view(*dense.shape[:2], -1)
        return out if bias is None else out + bias[:, None]


class StackedInput(GraphInput):
    """The graphs of K clients as input of a backbone with stacked weights.

    They have the same feature width, layout and dtype, and are single graphs without edge
    weights (ValueError). Of the n = ``num_rows`` rows ``real`` (K, n), bool, are nodes.
    """

    def __init__(self, graphs: Sequence[GraphInput]) -> None:
        if any(g.union is not None or g.edge_weight is not None for g in graphs):
            raise ValueError("Only single graphs without edge weights can be stacked.")
        sizes = [graph.num_nodes for graph in graphs]
        self.num_clients, self.num_rows = len(graphs), max(sizes)
        device = graphs[0].device
        self.union = None
        rows = torch.arange(self.num_rows, device=device)
        self.real = rows < torch.tensor(sizes, device=device)[:, None]
        counts = torch.tensor([graph.edge_index.shape[1] for graph in graphs])
        first = self.num_rows * torch.arange(len(graphs))
        shift = torch.repeat_interleave(first, counts).to(device)
        edges = torch.cat([graph.edge_index for graph in graphs], dim=1) + shift
        total = self.num_clients * self.num_rows
        self.topology = Topology(edges, None, total, graphs[0].topology.dtype)
        self._width = graphs[0].num_features
        self.x = pad_rows([graph.x for graph in graphs], self.num_rows)
        is_sparse = self.x.layout == torch.sparse_csr
        self._sparse = SparseOperator(self.x) if is_sparse else None
        self._filtered = {}
        typed = [graph.relations for graph in graphs if graph.relations is not None]
        self.relations = StackedRelations(typed, self.num_rows) if typed else None

    @classmethod
    def of_equal(cls, x: Tensor, edge_index: Tensor) -> StackedInput:
        """Return K graphs with the same edges (2, e), of strided features (K, n, d)."""
        out = cls.__new__(cls)
        out.num_clients, out.num_rows, out._width = x.shape
        first = out.num_rows * torch.arange(out.num_clients, device=x.device)
        edges = (edge_index[:, None] + first[:, None]).flatten(1)
        out.topology = Topology(edges, None, len(first) * out.num_rows, x.dtype)
        out.x, out.union, out._sparse, out._filtered = x, None, None, {}
        return out

    @property
    def num_features(self) -> int:
        """Feature width d."""
        return self._width

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory of features and operators, in bytes."""
        x = self.x
        entries = x.values().numel() if self._sparse else x.numel()
        size = 12 * int(entries) + 48 * self.edge_index.shape[1]
        listed = 0 if self.relations is None else self.relations.index.shape[1]
        return size + 96 * listed  # and their groups, both ways

    def operator(self, kind: OperatorKind) -> Operator:
        """Return a block-diagonal propagation operator, see :meth:`Topology.operator`."""
        return BlockOperator(self.topology.operator(kind))

    def with_edges(
        self, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> StackedInput:
        """Return an input with the same features and other edges (2, E').

        Edges are between flattened rows, each within one client.
        """
        out = copy(self)
        total = self.num_clients * self.num_rows
        out.topology = Topology(edge_index, edge_weight, total, self.topology.dtype)
        out._filtered = {}
        return out

    def with_features(self, x: Tensor) -> StackedInput:
        """Return an input with the same edges, and features of the layout of ``x``."""
        out = copy(self)
        out.x, out._filtered = x, {}
        out._sparse = SparseOperator(x) if x.layout == torch.sparse_csr else None
        return out

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map each client's representations (K, n, p) by its own weights (K, q, p)."""
        across = weight.transpose(1, 2)
        if h is None and self._sparse is not None:
            z = self._sparse.matmul(across.reshape(-1, weight.shape[1]))
            z = z.view(self.num_clients, self.num_rows, -1)
            return z if bias is None else z + bias[:, None]
        return map_each(self.x if h is None else h, across, bias)


@dataclass(frozen=True)
class Descent:
    """Steps of SGD on linear layers of K clients, whose gradients are not stored."""

    lr: float
    weight_decay: float

    def step(
        self, weight: Tensor, bias: Tensor | None, slope: Tensor, rows: Tensor
    ) -> None:
        """Change weights (K, q, p) and bias (K, q).

        ``slope`` (K, n, q) is the derivative by the layer's output for ``rows`` (K, n, p).
        """
        kept = 1 - self.lr * self.weight_decay
        weight, factors = weight.detach(), (slope.mT, rows)
        if weight.mT.is_contiguous():
            weight, factors = weight.mT, (rows.mT, slope)
        weight.baddbmm_(*factors, beta=kept, alpha=-self.lr)
        if bias is not None:
            bias.detach().mul_(kept).sub_(slope.sum(1), alpha=self.lr)


class DescendingInput(StackedInput):
    """Graphs of K clients for a network whose backward pass takes a :class:`Descent`.

    The last of ``layers`` computes all rows of its output, and the derivative by ``rows``
    (K, r), distinct in each client: the caller takes none by others. Only weights that
    multiply sparse features get a gradient instead of a step. A network may use each weight
    once.
    """

    def __init__(
        self, whole: StackedInput, rows: Tensor, layers: int, descent: Descent
    ) -> None:
        vars(self).update(vars(whole))
        self._layers, self._descent = layers, descent
        first = self.num_rows * torch.arange(len(rows), device=rows.device)
        self._last_rows = (rows + first[:, None]).flatten()
        self._used: Tensor | None = None

    def level(self, number: int) -> DescendingInput:
        """Return the input of layer ``number``."""
        out = copy(self)
        out._used = self._last_rows if number == self._layers - 1 else None
        return out

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map representations, as :meth:`StackedInput.linear`."""
        if h is None and self._sparse is not None:
            return super().linear(h, weight, bias)
        rows = self.x if h is None else h
        return apply_function(
            _DescendEach, rows, weight, bias, self._used, self._descent
        )

    def filtered_linear(
        self,
        h: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kind: OperatorKind,
        coefficients: tuple[float, ...],
    ) -> Tensor:
        """Propagate representations, then map them: few rows of the map may be used."""
        if h is not None:
            h = graph_filter(self.operator(kind), h, coefficients)
            return self.linear(h, weight, bias)
        return super().filtered_linear(
            h, weight, bias, kind=kind, coefficients=coefficients
        )


class _DescendEach(torch.autograd.Function):
    """A linear map of each client's rows, which steps in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        used: Tensor | None,
        descent: Descent,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.layer, ctx.used, ctx.descent = (weight, bias), used, descent
        return linear_each(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (slope,), (rows,), (weight, bias) = outputs, ctx.saved_tensors, ctx.layer
        to_rows, used, shape = None, ctx.used, rows.shape
        if used is not None:
            slope, rows = (
                t.flatten(0, 1).index_select(0, used).view(len(t), -1, t.shape[2])
                for t in (slope, rows)
            )
        if ctx.needs_input_grad[0]:
            to_rows = torch.bmm(slope, weight)
            if used is not None:
                every = to_rows.new_zeros(shape).flatten(0, 1)
                to_rows = every.index_copy_(0, used, to_rows.flatten(0, 1)).view(shape)
        ctx.descent.step(weight, bias, slope, rows)
        return to_rows, None, None, None, None


def stack_graphs(graphs: Sequence[GraphInput]) -> StackedInput:
    """Return the graphs of K clients, all of one class, as one input.

    A class of graphs with operators of its own names its input in ``stacked_as``.
    """
    kind: type[StackedInput] = getattr(type(graphs[0]), "stacked_as", StackedInput)
    return kind(graphs)


def map_each(rows: Tensor, across: Tensor, bias: Tensor | None) -> Tensor:
    """Map each client's rows (K, n, p) by its transposed weights (K, p, q), bias (K, q)."""
    if across.requires_grad and torch.is_grad_enabled():
        return apply_function(_MapEach, rows, across, bias)
    return _map_each(rows, across, bias)


def linear_each(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map each client's rows (K, n, p) by its weights (K, q, p) and bias (K, q)."""
    return map_each(rows, weight.mT, bias)


def _map_each(rows: Tensor, across: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.bmm(rows, across)  # baddbmm copies the bias to each row first
    return out if bias is None else out.add_(bias[:, None])


class _MapEach(torch.autograd.Function):
    """The map of :func:`map_each`, with the weights' gradient in the weights' layout.

    Autograd's own has the transposed layout, and is copied to that of the weights.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, across: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, across)
        return _map_each(rows, across, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (rows, across) = outputs, ctx.saved_tensors
        to_rows = to_bias = None
        if ctx.needs_input_grad[0]:
            to_rows = torch.bmm(grad, across.mT)
        if across.mT.is_contiguous():
            to_across = torch.bmm(grad.mT, rows).mT
        else:
            to_across = torch.bmm(rows.mT, grad)
        if ctx.needs_input_grad[2]:
            to_bias = grad.sum(1)
        return to_rows, to_across, to_bias


def map_rows(layer: nn.Module, h: Tensor) -> Tensor:
    """Run a layer, or a sequence, of which linear ones may have stacked weights."""
    if isinstance(layer, nn.Sequential):
        for part in layer:
            h = map_rows(part, h)
        return h
    if isinstance(layer, nn.Linear) and layer.weight.dim() == 3:
        return map_each(h, layer.weight.mT, layer.bias)
    out: Tensor = layer(h)
    return out


class Ragged:
    """Rows of K clients, ``counts`` of each, and the same padded to m rows of each.

    ``index`` (K, m) are the rows in the padded matrix; padding repeats the client's first
    row. ``slots`` are the places of the rows in the flattened matrix.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        count = torch.tensor(counts, device=device)[:, None]
        place = torch.arange(max(counts), device=device)
        first, is_row = count.cumsum(0) - count, place < count
        # a client without rows gets those of any other
        self.index = (first + place * is_row).clamp(max=max(sum(counts) - 1, 0))
        self.slots = is_row.flatten().nonzero().squeeze(1)

    def flat(self, padded: Tensor) -> Tensor:
        """Return the rows of a padded matrix (..., K, m)."""
        return padded.flatten(-2)[..., self.slots]


def pad_rows(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Stack K matrices of unequal numbers of rows to (K, num_rows, ...), with zeros.

    Sparse CSR parts (n_k, d) give the block-diagonal matrix (K·n, K·d).
    """
    if parts[0].layout == torch.sparse_csr:
        return _block_diagonal(parts, num_rows)
    if all(len(part) == num_rows for part in parts):
        return torch.stack(list(parts))
    out = parts[0].new_zeros(len(parts), num_rows, *parts[0].shape[1:])
    for row, part in zip(out.unbind(), parts, strict=True):
        row[: len(part)] = part
    return out


def _block_diagonal(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return the block-diagonal CSR matrix of CSR blocks, padded with empty rows."""
    width = parts[0].shape[1]
    rows, columns = [], []
    for place, part in enumerate(parts):
        count = part.crow_indices().diff().long()
        rows.append(torch.repeat_interleave(count) + place * num_rows)
        columns.append(part.col_indices().long() + place * width)
    return csr_matrix(
        torch.cat(rows),
        torch.cat(columns),
        torch.cat([part.values() for part in parts]),
        (len(parts) * num_rows, len(parts) * width),
    )


def can_stack(model: nn.Module) -> bool:
    """Return whether a network takes stacked weights and a :class:`StackedInput`."""
    return (
        isinstance(model, Backbone)
        and bool(vars(type(model)).get("stacks", False))
        and not model.readout
        and model.edge_direction == "both"
        and not hasattr(model, "undecayed")
        and model.state_dict().keys() == dict(model.named_parameters()).keys()
    )


def stack_model(
    template: Module,
    states: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor],
    num_clients: int,
    *,
    is_spare: bool = False,
) -> Module:
    """Build one network with the weights of K clients, of shapes (K, ...).

    ``template`` is a client's network, see :func:`can_stack`, or a part of one; it is
    changed itself if it ``is_spare``. ``states`` are one for all clients, or one for each;
    they are copied, to the memory layout of the template's.
    """
    model = template if is_spare else copy_network(template)
    for name, parameter in list(template.named_parameters()):
        shape = (num_clients, *parameter.shape)
        # Column-major weights of sparse features stay so: (K, in, out) in memory.
        is_turned = parameter.dim() == 2 and not parameter.is_contiguous()
        if is_turned:
            shape = (shape[0], shape[2], shape[1])
        values = parameter.new_empty(shape)
        values = values.transpose(1, 2) if is_turned else values
        with torch.no_grad():
            every = [states] if isinstance(states, Mapping) else states
            rows = [state[name] for state in every]
            if all(row is rows[0] for row in rows):
                shared = rows[0].to(values.device)
                # transposed once, not for each client
                values.copy_(shared.t().contiguous().t() if is_turned else shared)
            elif is_turned:
                for value, row in zip(values.unbind(), rows, strict=True):
                    value.copy_(row)
            else:
                torch.stack([row.to(values.device) for row in rows], out=values)
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        module._parameters[key] = nn.Parameter(values)
    return model


def split_state(
    tensors: Mapping[str, Tensor], num_clients: int
) -> list[dict[str, Tensor]]:
    """Return the states of K clients, also without tensors, as views of (K, ...)."""
    names = list(tensors)
    if not names:
        return [{} for _ in range(num_clients)]
    rows = zip(*(tensor.detach().unbind() for tensor in tensors.values()), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


class _EachOperator(BlockOperator):
    """One operator (n, n) on the representations (K, n, p) of K models."""

    def matmul(self, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply each (n, p) from the left, and add a bias (K, p) to the rows."""
        models, rows, _ = dense.shape
        out = self._operator.matmul(dense.transpose(0, 1).reshape(rows, -1))
        out = out.view(rows, models, -1).transpose(0, 1)
        return out if bias is None else out + bias[:, None]


class SharedInput(GraphInput):
    """A graph, whose caches it shares, as input of a backbone with K models' weights."""

    def __init__(self, graph: GraphInput) -> None:
        vars(self).update(vars(graph))
        self._graph = graph

    def operator(self, kind: OperatorKind) -> Operator:
        """Return a propagation operator for all models, see :meth:`Topology.operator`."""
        return _EachOperator(self.topology.operator(kind))

    def propagated(self, kind: OperatorKind, coefficients: tuple[float, ...]) -> Tensor:
        """Return the propagated features (n, d), see :meth:`GraphInput.propagated`."""
        return self._graph.propagated(kind, coefficients)

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map representations by the weights (K, q, p) of each model: (K, n, q).

        ``h`` are those (K, n, p) of each model, or (n, p) of all.
        """
        rows = self.x if h is None else h
        if rows.dim() == 3:
            return map_each(rows, weight.transpose(1, 2), bias)
        every = weight.flatten(0, 1)  # (K·q, p)
        if h is None and self._sparse is not None:
            out = self._sparse.matmul(every.t())
        else:
            out = F.linear(rows, every)
        out = out.view(len(out), len(weight), -1).transpose(0, 1)
        return out if bias is None else out + bias[:, None]


class Ensemble:
    """Constant networks of K clients that predict the same nodes.

    ``template`` is not changed, and ``states`` are copied. Networks that :func:`can_stack`
    are evaluated at once, all others one after the other; both give the same up to
    rounding.
    """

    def __init__(
        self, template: Backbone, states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._stack: Backbone | None = None
        self._parts: list[Backbone] = []
        if can_stack(template):
            count = len(states)
            made = [stack_model(template, states, count)]
            self._stack = made[0]
        else:
            made = [copy_network(template) for _ in states]
            for part, state in zip(made, states, strict=True):
                part.load_state_dict(dict(state))
            self._parts = made
        for network in made:
            network.eval().requires_grad_(requires_grad=False)

    def predict(self, graph: GraphInput) -> Tensor:
        """Return the logits (K, n, C) of all nodes of a graph, without dropout."""
        if self._stack is not None:
            found: Tensor = self._stack(SharedInput(graph))
            return found
        return torch.stack([part(graph) for part in self._parts])

    def classify(self, embeddings: Tensor, graph: GraphInput) -> Tensor:
        """Return what the heads predict for the same embeddings (n, p): (K, n, C)."""
        if self._stack is not None:
            return self._stack.head(embeddings, SharedInput(graph))
        return torch.stack([part.head(embeddings, graph) for part in self._parts])
