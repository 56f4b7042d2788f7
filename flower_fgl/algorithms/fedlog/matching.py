"""Training targets of prompt generators, FedLoG Eqs. (11) and (12)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import GraphInput
from flower_fgl.nn.computation_graph import output_nodes, receptive_field
from flower_fgl.nn.graph_union import select_rows

__all__ = ["HIDDEN", "OUT", "PromptTask", "RandomNets"]

HIDDEN, OUT = 128, 64
"""Widths of the random networks of Eq. (12), those of the encoder."""
LAYERS = 2
"""Their layers that read neighbours."""
AROUND = (0.0, 1.0)
"""Coefficients of one step of propagation."""
DENSE_FROM = 0.05
"""Share of non-zero features from which the random networks' wide first layer is faster
with strided features; ``benchmarks/prompt_generators.py --compare layouts`` times both."""


@dataclass(frozen=True, eq=False)
class PromptTask:
    """Training data of a client's prompt generator: training nodes with neighbours.

    ``graph`` is the client's graph, or the part of it that a batch needs. ``index`` and
    ``labels`` (n,) are all training nodes, used by ℓ_true, and their classes.
    """

    graph: GraphInput
    index: Tensor
    labels: Tensor
    num_classes: int

    @property
    def has_neighbours(self) -> Tensor:
        """Training nodes that have a neighbour: (n,), bool."""
        graph = self.graph
        degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
        return degree[self.index] > 0

    def with_fast_features(self) -> PromptTask:
        """Return the task with strided features, if many of them are not zero."""
        x = self.graph.x
        if x.layout == torch.strided or x.values().numel() < DENSE_FROM * x.numel():
            return self
        graph = self.graph
        graph = GraphInput(graph.dense_features(), graph.edge_index, graph.edge_weight)
        return replace(self, graph=graph)

    def features(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs and targets of the generator.

        Features (m, d) of the training nodes that have a neighbour, mean features (m,
        d) of their neighbours, and their labels (m,).
        """
        has_any = self.has_neighbours
        rows = self.index[has_any]
        x = self.graph.x
        mean = self.graph.operator("mean").matmul(x.to_dense())
        return select_rows(x, rows).to_dense(), mean[rows], self.labels[has_any]

    def batch(self, places: Tensor) -> PromptTask:
        """Return the task of the training nodes at distinct places (b,) of ``index``.

        Its graph is the part that determines ℓ_true of these nodes, all their neighbours
        included, if that is at most half of the graph.
        """
        index, labels = self.index[places], self.labels[places]
        part = receptive_field(self.graph, index, LAYERS, is_batch=True)
        if part is None:
            return PromptTask(self.graph, index, labels, self.num_classes)
        first = torch.arange(len(index), device=index.device)
        return PromptTask(part, first, labels, self.num_classes)

    @property
    def num_rows(self) -> int:
        """Number of nodes whose hidden representations ℓ_true computes."""
        if type(self.graph) is GraphInput:
            return self.graph.num_nodes
        return len(output_nodes(self.graph, LAYERS)[0])


@dataclass(frozen=True, eq=False)
class RandomNets:
    """N randomly initialised GraphSAGE networks with linear classifiers, as one.

    First layer: ``own`` and ``around`` (d, N·128), the weights of a node and of its
    neighbours' mean, and ``bias`` (N·128,), grouped by network. Products with features read
    these weights row by row. Second layer: ``own_2``
    and ``around_2`` (N, 128, 64), ``bias_2`` (N, 64). ``classifier`` (N, 64, C),
    ``classifier_bias`` (N, C).
    """

    number: int
    own: Tensor
    around: Tensor
    bias: Tensor
    own_2: Tensor
    around_2: Tensor
    bias_2: Tensor
    classifier: Tensor
    classifier_bias: Tensor

    @classmethod
    def draw(
        cls,
        number: int,
        num_features: int,
        num_classes: int,
        device: torch.device | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> RandomNets:
        """Initialise as :class:`torch.nn.Linear` does, uniform in ±1/√(inputs).

        Draws from a generator on the CPU, by default torch's global one.
        """

        def uniform(shape: tuple[int, ...], inputs: int) -> Tensor:
            bound = inputs**-0.5
            values = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            return values.to(device).requires_grad_()

        d, wide = num_features, number * HIDDEN
        return cls(
            number,
            uniform((d, wide), d),
            uniform((d, wide), d),
            uniform((wide,), d),
            uniform((number, HIDDEN, OUT), HIDDEN),
            uniform((number, HIDDEN, OUT), HIDDEN),
            uniform((number, OUT), HIDDEN),
            uniform((number, OUT, num_classes), OUT),
            uniform((number, num_classes), OUT),
        )

    def part(self, start: int, stop: int) -> RandomNets:
        """Return some of the networks, from ``start`` up to ``stop``."""
        if (start, stop) == (0, self.number):
            return self
        wide = slice(start * HIDDEN, stop * HIDDEN)
        first = (self.own[:, wide], self.around[:, wide], self.bias[wide])
        deep = (self.own_2, self.around_2, self.bias_2)
        top = (self.classifier, self.classifier_bias)
        few = [t.detach().requires_grad_() for t in first]
        few += [t[start:stop].detach().requires_grad_() for t in (*deep, *top)]
        return RandomNets(stop - start, *few)

    @cached_property
    def turned(self) -> tuple[Tensor, Tensor]:
        """W + W' and W − W' of the first layer, constant."""
        with torch.no_grad():
            return self.own + self.around, self.own - self.around

    @property
    def encoder(self) -> tuple[Tensor, ...]:
        """The GraphSAGE weights W, whose gradients are compared."""
        first = (self.own, self.around, self.bias)
        return (*first, self.own_2, self.around_2, self.bias_2)

    def second(self, own: Tensor, around: Tensor, labels: Tensor) -> Tensor:
        """Apply the second layer and the classifier; sum the N mean cross-entropies.

        ``own`` (n, N, 128) are the nodes' hidden representations, ``around`` (n, N, 64)
        the means of their neighbours' representations, mapped by ``around_2``.
        """
        out = torch.einsum("vnh,nho->vno", own, self.own_2) + around + self.bias_2
        logits = torch.einsum("vno,noc->vnc", out, self.classifier)
        logits = (logits + self.classifier_bias).transpose(1, 2)  # (n, C, N)
        targets = labels[:, None].expand(-1, self.number)
        return F.cross_entropy(logits, targets, reduction="sum") / len(labels)

    def first(self, task: PromptTask) -> Tensor:
        """Apply the first layer, without ReLU, to the training nodes' surroundings.

        Returns a Tensor of shape (task.num_rows, N·128).
        """
        graph = task.graph
        h = graph.filtered_linear(
            None, self.around.t(), self.bias, kind="mean", coefficients=AROUND
        )
        return h + graph.linear(None, self.own.t())

    def true_loss(self, task: PromptTask, first: Tensor) -> Tensor:
        """Return Σ_n ℓ_true of the training nodes in their graph, FedLoG Eq. (12).

        ``first`` (task.num_rows, N·128) is the result of :meth:`first`.
        """
        h = first.relu().view(-1, self.number, HIDDEN)
        around = torch.einsum("vnh,nho->vno", h, self.around_2).flatten(1)
        around = task.graph.level(1).propagate(around, "mean")
        around = around.view(-1, self.number, OUT)
        return self.second(h[task.index], around[task.index], task.labels)

    def pair_loss(self, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        """Return Σ_n ℓ_syn of nodes whose only neighbour is their prompt, Eq. (12).

        ``a`` and ``b`` (m, N·128) are ``(x + p)(W + W')ᵀ`` and ``(x − p)(W − W')ᵀ`` for
        nodes x, prompts p, and the first layer's ``own`` W and ``around`` W'. Their sum
        and difference give the first layer of node and prompt by two products instead
        of four.
        """
        node, prompt = (a + b) / 2 + self.bias, (a - b) / 2 + self.bias
        node, prompt = (h.relu().view(-1, self.number, HIDDEN) for h in (node, prompt))
        around = torch.einsum("vnh,nho->vno", prompt, self.around_2)
        return self.second(node, around, labels)

    def pair_products(self, x: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(x + p)(W + W')`` and ``(x − p)(W − W')``, (m, N·128), Eq. (12).

        Nodes may be those of many clients: each product reads the large weights once.
        """
        plus, minus = self.turned
        return (x + prompts) @ plus, (x - prompts) @ minus

    def slope_of_prompts(self, to_a: Tensor, to_b: Tensor) -> Tensor:
        """Return the derivative by the prompts (m, d), from those by the products."""
        plus, minus = self.turned
        return to_a @ plus.T - to_b @ minus.T

    @staticmethod
    def goes_by_nodes(task: PromptTask, x: Tensor) -> bool:
        """Return whether :meth:`mismatch` multiplies over nodes, not over features."""
        return has_few_nodes(task.num_rows, len(x), x.shape[1])

    def mismatch(
        self,
        task: PromptTask,
        x: Tensor,
        prompts: Tensor,
        labels: Tensor,
        *,
        is_mean: bool = False,
        is_whole: bool = True,
        products: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return ``Σ_n Σ_W ‖∇_W ℓ_syn − ∇_W ℓ_true‖²``, FedLoG Eq. (12).

        ``task`` has the training nodes of ℓ_true; ``x`` and ``prompts`` (m, d), and
        ``labels`` (m,), are nodes, prompts and classes of ℓ_syn; differentiable in the
        prompts. Networks share no weights, so the gradient of the summed loss is that of
        each. With ``is_mean`` each squared norm is divided by the number of entries of W,
        as in the published code. Unless ``is_whole``, a summand that does not depend on
        the prompts may be missing. ``products`` are those of :meth:`pair_products`, if
        they are known; the result then depends on them, too.

        Notes
        -----
        1. The first layer's two matrices W and W' are compared as W + W' and W − W',
           whose gradients are half the sum and half the difference of theirs: ``‖a‖² +
           ‖b‖² = 2‖(a + b)/2‖² + 2‖(a − b)/2‖²``.
        2. Such a gradient is a product ``AᵀB`` of slopes A and features B. If there are
           fewer nodes than features, neither it nor its derivative is computed: ``⟨AᵀB,
           CᵀD⟩ = ⟨ACᵀ, BDᵀ⟩`` needs products over nodes only.
        """
        first = self.first(task)
        slopes, *true = torch.autograd.grad(
            self.true_loss(task, first), (first, *self.encoder[2:]), retain_graph=True
        )
        by_nodes = products is not None or self.goes_by_nodes(task, x)
        plus, minus = (t.detach().requires_grad_(not by_nodes) for t in self.turned)
        both, apart = x + prompts, x - prompts
        a, b = (both @ plus, apart @ minus) if products is None else products
        one, other, *made = torch.autograd.grad(
            self.pair_loss(a, b, labels),
            (*((a, b) if by_nodes else (plus, minus)), *self.encoder[2:]),
            create_graph=True,
        )
        parts = [
            (a - b).square().sum() * self._scale(a, is_mean=is_mean)
            for a, b in zip(made, true, strict=True)
        ]
        scale = self._scale(self.own, is_mean=is_mean)
        if by_nodes:
            distance = _distance(task.graph, slopes, (one, other), (both, apart))
            parts.append(scale * distance)
        if by_nodes and not is_whole:
            return torch.stack(parts).sum()
        own, around = torch.autograd.grad(first, (self.own, self.around), slopes)
        if by_nodes:
            parts.append(scale * (own.square().sum() + around.square().sum()))
        else:
            plus_gap, minus_gap = one - (own + around) / 2, other - (own - around) / 2
            gaps = plus_gap.square().sum() + minus_gap.square().sum()
            parts.append(2 * scale * gaps)
        return torch.stack(parts).sum()

    def _scale(self, weight: Tensor, *, is_mean: bool) -> float:
        """Return what a squared distance of all networks' gradients is multiplied by."""
        return self.number / weight.numel() if is_mean else 1.0


def has_few_nodes(num_rows: int, num_pairs: int, num_features: int) -> bool:
    """Return whether products over nodes need fewer operations than over features.

    ``num_rows`` and ``num_pairs`` are the nodes of ℓ_true's hidden layer and of ℓ_syn.
    """
    return 2 * (num_rows + num_pairs) < 3 * num_features


def _distance(
    graph: GraphInput,
    slopes: Tensor,
    made: tuple[Tensor, Tensor],
    features: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the squared distance of the first layer's gradients, less that of the true.

    ``‖∇ℓ_syn‖² − 2⟨∇ℓ_syn, ∇ℓ_true⟩`` over both matrices, from the slopes (n, q) of
    ℓ_true in the first layer's outputs, those of ℓ_syn (m, q) in the products with W +
    W' and W − W', and the other factors (m, d) of these, x + p and x − p.
    """
    total = torch.zeros((), device=slopes.device)
    for slope, rows, sign in zip(made, features, (1, -1), strict=True):
        around = graph.filtered_linear(None, rows, kind="mean", coefficients=AROUND)
        true = graph.linear(None, rows) + sign * around
        total = total + 2 * _inner(slope, slope, rows @ rows.T)
        total = total - 2 * _inner(slopes, slope, true)
    return total


def _inner(a: Tensor, c: Tensor, features: Tensor) -> Tensor:
    """Return ``⟨AᵀB, CᵀD⟩`` from A (n, q), C (m, q) and ``B Dᵀ`` (n, m)."""
    return ((a @ c.T) * features).sum()
