"""Gradient matching of prompt generators, FedLoG Eqs. (11) and (12)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import GraphInput
from flower_fgl.nn.computation_graph import output_nodes, receptive_field
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.layers import ONE_STEP
from flower_fgl.nn.sparse import narrow_csr
from flower_fgl.nn.stacked import pad_rows

__all__ = ["HIDDEN", "OUT", "PromptTask", "RandomNets", "TaskStack", "has_few_nodes"]

HIDDEN, OUT = 128, 64
"""Widths of the random networks of Eq. (12), those of the encoder."""
LAYERS = 2
"""Their layers that read neighbours."""
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

    def with_fast_features(self) -> Self:
        """Return the task with strided features, if many of them are not zero."""
        x = self.graph.x
        if x.layout == torch.strided or x.values().numel() < DENSE_FROM * x.numel():
            return self
        dense = self.graph.dense_features()
        return replace(self, graph=GraphInput(dense, self.graph.edge_index))

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

    def batch(self, places: Tensor) -> Self:
        """Return the task of the training nodes at distinct places (b,) of ``index``.

        Its graph is the part that determines ℓ_true of these nodes, all their neighbours
        included, if that is at most half of the graph.
        """
        index, labels = self.index[places], self.labels[places]
        part = receptive_field(self.graph, index, LAYERS, is_batch=True)
        if part is None:
            return replace(self, index=index, labels=labels)
        first = torch.arange(len(index), device=index.device)
        return replace(self, graph=part, index=first, labels=labels)

    @property
    def num_rows(self) -> int:
        """Number of nodes whose hidden representations ℓ_true computes."""
        if type(self.graph) is GraphInput:
            return self.graph.num_nodes
        return len(output_nodes(self.graph, LAYERS)[0])

    @classmethod
    def union(cls, tasks: Sequence[Self]) -> tuple[Self, Tensor]:
        """Join the tasks of clients; return the client of each node that ℓ_true computes.

        The graph of the result is only the part that ℓ_true needs, if that is at most
        three quarters of the nodes.
        """
        first = tasks[0]
        if len(tasks) == 1:
            return first, first.index.new_zeros(first.num_rows)
        sizes = torch.tensor([task.graph.num_nodes for task in tasks])
        shifts = (sizes.cumsum(0) - sizes).tolist()
        index = torch.cat(
            [t.index + shift for t, shift in zip(tasks, shifts, strict=True)]
        )
        labels = torch.cat([task.labels for task in tasks])
        graph = join_graphs([task.graph for task in tasks])
        client = torch.repeat_interleave(sizes).to(index.device)
        part = receptive_field(graph, index, LAYERS)
        if part is None:
            return cls(graph, index, labels, first.num_classes), client
        kept = client[output_nodes(part, LAYERS)[0]]
        index = torch.arange(len(index), device=index.device)
        return cls(part, index, labels, first.num_classes), kept


def join_graphs(graphs: Sequence[GraphInput]) -> GraphInput:
    """Return graphs without edge weights side by side as one, nodes in order."""
    xs = [graph.x for graph in graphs]
    sizes = [len(x) for x in xs]
    shifts = torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
    edges = [g.edge_index + shift for g, shift in zip(graphs, shifts, strict=True)]
    if xs[0].layout == torch.strided:
        return GraphInput(torch.cat(xs), torch.cat(edges, dim=1))
    counts = torch.cat([x.crow_indices().diff() for x in xs])
    start = F.pad(counts.cumsum(0, dtype=counts.dtype), (1, 0))
    column = torch.cat([x.col_indices() for x in xs])
    value = torch.cat([x.values() for x in xs])
    x = narrow_csr(start, column, value, (sum(sizes), xs[0].shape[1]))
    return GraphInput(x, torch.cat(edges, dim=1))


class Padded:
    """Places of the rows of K clients in a matrix (K, n) with rows of padding."""

    def __init__(self, client: Tensor, num_clients: int) -> None:
        count = torch.bincount(client, minlength=num_clients)
        self.shape = num_clients, int(count.max())
        order = torch.argsort(client, stable=True)
        rank = torch.empty_like(order)
        first = (count.cumsum(0) - count)[client[order]]
        rank[order] = torch.arange(len(client), device=client.device) - first
        self._slots = client * self.shape[1] + rank
        self.share = self(1 / count.clamp(min=1).float()[client])

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows (t, ...) in their places, (K, n, ...), zero elsewhere."""
        total = self.shape[0] * self.shape[1]
        out = rows.new_zeros(total, *rows.shape[1:])
        return out.index_copy_(0, self._slots, rows).view(*self.shape, *rows.shape[1:])


class TaskStack:
    """The tasks of K clients whose prompts are trained in the same steps.

    ``x`` and ``targets`` (K, m, d), and ``labels`` (K, m), are those of
    :meth:`PromptTask.features`, with rows of padding; ``pairs`` are their places.
    """

    def __init__(
        self,
        tasks: Sequence[PromptTask],
        features: Sequence[tuple[Tensor, Tensor, Tensor]],
    ) -> None:
        self.counts = [len(x) for x, _, _ in features]
        self.x, self.targets, self.labels = (
            pad_rows(parts, max(self.counts)) for parts in zip(*features, strict=True)
        )
        self.pairs = self._places(self.counts)
        self.task, client = PromptTask.union(tasks)
        self.rows = Padded(client, len(tasks))
        self.training = self._places([len(task.index) for task in tasks])
        self.training_labels = self.training(self.task.labels)
        self._by_nodes = has_few_nodes(
            self.rows.shape[1], self.x.shape[1], self.x.shape[2]
        )

    def _places(self, counts: Sequence[int]) -> Padded:
        client = torch.repeat_interleave(torch.tensor(counts)).to(self.x.device)
        return Padded(client, len(counts))

    @property
    def size(self) -> int:
        """Rows of one hidden representation of nodes, prompts and surroundings."""
        return self.rows.shape[0] * (self.rows.shape[1] + 2 * self.x.shape[1])

    def true_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return h_v of the training nodes and the mean of their neighbours' (K, n, q).

        From the hidden representations (R', q) of all rows.
        """
        around = self.task.graph.level(1).propagate(hidden, "mean")
        if type(self.task.graph) is GraphInput:
            around = around[self.task.index]
        return self.training(hidden[self.task.index]), self.training(around)

    def distance(
        self, prompts: Tensor, made: Tensor, true: Tensor, *, is_whole: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compare the gradients of the first layer's weights W and W', Eq. (12).

        From ``prompts`` p (K, m, d), the sum and the difference ``made`` (K, 2, m, q) of
        ℓ_syn's slopes at node and prompt, and ℓ_true's slopes ``true`` (K, R, q) at all
        rows. Returns the squared distance (K,), and its derivatives by ``prompts`` and
        by ``made``. Unless ``is_whole``, a constant may be missing.

        Notes
        -----
        1. W and W' are compared as W + W' and W − W', whose gradients are half the sum and
           half the difference of theirs: ``‖a‖² + ‖b‖² = 2‖(a + b)/2‖² + 2‖(a − b)/2‖²``.
        2. Such a gradient is a product ``AᵀB`` of slopes A and features B. If there are
           fewer nodes than features, neither it nor its derivative is computed: ``⟨AᵀB,
           CᵀD⟩ = ⟨ACᵀ, BDᵀ⟩`` needs products over nodes only.
        """
        pairs = torch.stack([self.x + prompts, self.x - prompts], dim=1)
        if not self._by_nodes:
            gap = pairs.mT @ made - self.both.mT @ true[:, None]  # (K, 2, d, q)
            first, second = (made @ gap.mT).unbind(1)
            value = gap.square().flatten(1).sum(1) / 2
            return value, first - second, pairs @ gap
        leaf = prompts.detach().requires_grad_()
        with torch.enable_grad():
            own, around = self._products(leaf)
        known, near = self._known
        cross = torch.cat(
            [known + near + own + around, known - near - own + around], dim=2
        )  # (K, R, 2·m)
        among, beside = pairs @ pairs.mT, true @ made.flatten(1, 2).mT
        slopes = made @ made.mT  # (K, 2, m, m)
        to_made = among @ made
        to_made -= (cross.detach().mT @ true).view_as(made)
        plus, minus = beside.chunk(2, dim=2)
        found = torch.autograd.grad(
            (own, around), leaf, (minus - plus, -minus - plus)
        )[0]  # fmt: skip
        first, second = (slopes @ pairs).unbind(1)
        value = (slopes * among).flatten(1).sum(1) / 2
        value = value - (beside * cross.detach()).flatten(1).sum(1)
        if is_whole:
            rest = (true @ true.mT)[:, None] * (self.both @ self.both.mT)
            value = value + rest.flatten(1).sum(1) / 2
        return value, first - second + found, to_made

    @cached_property
    def both(self) -> Tensor:
        """Sum and difference (K, 2, R, d) of a row's features and its neighbours' mean."""
        own, around = self._mapped(torch.eye(self.x.shape[2], device=self.x.device))
        parts = [self.rows(own + around), self.rows(own - around)]
        return torch.stack(parts, dim=1)

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor]:
        """Products of the rows with the nodes."""
        return self._products(self.x)

    def _mapped(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Map the rows' features, and their neighbours' mean, by weights (q, d)."""
        graph = self.task.graph
        around = graph.filtered_linear(None, weight, kind="mean", coefficients=ONE_STEP)
        return graph.linear(None, weight), around

    def _products(self, others: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the features of :meth:`_mapped` by vectors (K, p, d): (K, R, p) each."""
        clients, width, _ = others.shape
        client = torch.arange(clients, device=others.device)
        own, around = (
            self.rows(found.view(-1, clients, width))[client, :, client]
            for found in self._mapped(others.flatten(0, 1))
        )
        return own, around


class Second(NamedTuple):
    """The second layer and the classifier for nodes (K, n) of clients, with gradients.

    ``losses`` (K,) are Σ_n ℓ, ``chance`` (K, n, N, C) the probabilities, ``slope`` (K, n,
    N, 64) the derivative by the layer's outputs; ``weights`` are those by ``own_2`` and
    ``around_2`` (K, N, 128, 64) and ``bias_2`` (K, N, 64), ``inputs`` those by the hidden
    representations of node and neighbours, (K, n, q) each.
    """

    losses: Tensor
    chance: Tensor
    slope: Tensor
    weights: tuple[Tensor, Tensor, Tensor]
    inputs: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class RandomNets:
    """N randomly initialised GraphSAGE networks with linear classifiers, as one.

    First layer: ``own`` and ``around`` (d, q), the weights of a node and of its
    neighbours' mean, and ``bias`` (q,), grouped by network, q = N·128. Products with
    features read these weights row by row. Second layer: ``own_2`` and ``around_2`` (N,
    128, 64), ``bias_2`` (N, 64). ``classifier`` (N, 64, C), ``classifier_bias`` (N, C).
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
    ) -> Self:
        """Initialise as :class:`torch.nn.Linear` does, uniform in ±1/√(inputs).

        Draws from a generator on the CPU, by default torch's global one.
        """

        def uniform(shape: tuple[int, ...], inputs: int) -> Tensor:
            bound = inputs**-0.5
            values = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            return values.to(device)

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

    def part(self, start: int, stop: int) -> Self:
        """Return some of the networks, from ``start`` up to ``stop``."""
        if (start, stop) == (0, self.number):
            return self
        wide = slice(start * HIDDEN, stop * HIDDEN)
        deep = (self.own_2, self.around_2, self.bias_2)
        top = (self.classifier, self.classifier_bias)
        return type(self)(
            stop - start,
            self.own[:, wide].contiguous(),
            self.around[:, wide].contiguous(),
            self.bias[wide],
            *(t[start:stop] for t in (*deep, *top)),
        )

    @cached_property
    def turned(self) -> tuple[Tensor, Tensor]:
        """W + W' and W − W' of the first layer."""
        return self.own + self.around, self.own - self.around

    def first(self, task: PromptTask) -> Tensor:
        """Apply the first layer, without ReLU, to the training nodes' surroundings.

        Returns a Tensor of shape (task.num_rows, q).
        """
        graph = task.graph
        h = graph.filtered_linear(
            None, self.around.t(), self.bias, kind="mean", coefficients=ONE_STEP
        )
        return h + graph.linear(None, self.own.t())

    def second(
        self, own: Tensor, around: Tensor, labels: Tensor, share: Tensor
    ) -> Second:
        """Apply the second layer and the classifier; average the cross-entropies.

        ``own`` and ``around`` (K, n, q) are h of the nodes and the mean of their
        neighbours'; ``share`` (K, n) is the weight of a node in its client's mean.
        """
        own, around = self.by_network(own), self.by_network(around)
        out = torch.einsum("kvnh,nho->kvno", own, self.own_2)
        out = out + torch.einsum("kvnh,nho->kvno", around, self.around_2) + self.bias_2
        logits = torch.einsum("kvno,noc->kvnc", out, self.classifier)
        log_chance = (logits + self.classifier_bias).log_softmax(dim=3)
        targets = F.one_hot(labels, log_chance.shape[3])[:, :, None]
        chance, share = log_chance.exp(), share[:, :, None, None]
        losses = -(targets * log_chance * share).flatten(1).sum(1)
        slope = torch.einsum(
            "kvnc,noc->kvno", (chance - targets) * share, self.classifier
        )
        weights = (
            torch.einsum("kvnh,kvno->knho", own, slope),
            torch.einsum("kvnh,kvno->knho", around, slope),
            slope.sum(1),
        )
        to_own, to_around = (
            torch.einsum("kvno,nho->kvnh", slope, weight).flatten(2)
            for weight in (self.own_2, self.around_2)
        )
        return Second(losses, chance, slope, weights, (to_own, to_around))

    def by_network(self, hidden: Tensor) -> Tensor:
        """Return hidden representations (K, n, q) as (K, n, N, 128)."""
        return hidden.view(*hidden.shape[:2], self.number, HIDDEN)

    def true_slopes(self, stack: TaskStack) -> tuple[Second, Tensor]:
        """Return ℓ_true, and its slopes (K, R, q) by the first layer's outputs."""
        first = self.first(stack.task).requires_grad_()
        with torch.enable_grad():
            inputs = stack.true_inputs(first.relu())
        share = stack.training.share
        own, around = (h.detach() for h in inputs)
        true = self.second(own, around, stack.training_labels, share)
        (slopes,) = torch.autograd.grad(inputs, first, true.inputs)
        return true, stack.rows(slopes)

    @torch.no_grad()
    def mismatch(
        self,
        stack: TaskStack,
        prompts: Tensor,
        *,
        is_mean: bool = False,
        is_whole: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return ``Σ_n Σ_W ‖∇_W ℓ_syn − ∇_W ℓ_true‖²``, FedLoG Eq. (12), and its slope.

        The sum is (K,), its derivative by the ``prompts`` (K, m, d). Networks share no
        weights, so the gradient of the summed loss is that of each. With ``is_mean`` each
        squared norm is divided by the number of entries of W, as in the published code.
        Unless ``is_whole``, a summand that does not depend on the prompts may be missing.

        Notes
        -----
        1. First and second derivatives are written out: with piecewise linear ReLU the
           second ones are products with the same weights, and a third of the memory and
           half of the operations of ``autograd.grad`` of ``autograd.grad`` remain.
        2. Node x and prompt p are each other's only neighbour. The sum and the difference
           of ``(x + p)(W + W')`` and ``(x − p)(W − W')`` give their first layer by two
           products instead of four.
        """
        true, true_slope = self.true_slopes(stack)
        plus, minus = self.turned
        a, b = (stack.x + prompts) @ plus, (stack.x - prompts) @ minus
        hidden = (a + b) / 2 + self.bias, (a - b) / 2 + self.bias
        is_on = [h > 0 for h in hidden]
        hidden = hidden[0].relu_(), hidden[1].relu_()
        made = self.second(*hidden, stack.labels, stack.pairs.share)
        own, around = (s * on for s, on in zip(made.inputs, is_on, strict=True))
        sums = torch.stack([own + around, own - around], dim=1)  # (K, 2, m, q)
        far, to_prompts, to_sums = stack.distance(
            prompts, sums, true_slope, is_whole=is_whole
        )

        def scale(weight: Tensor) -> float:
            return self.number / weight.numel() if is_mean else 1.0

        gaps = [
            made_of - true_of
            for made_of, true_of in zip(made.weights, true.weights, strict=True)
        ]
        gaps.append(sums[:, 0].sum(1) - true_slope.sum(1))
        scales = [scale(w) for w in (self.own_2, self.around_2, self.bias_2, self.bias)]
        wide = scale(self.own)
        losses = wide * far
        for gap, factor in zip(gaps, scales, strict=True):
            losses = losses + factor * gap.square().flatten(1).sum(1)
            gap *= 2 * factor
        of_own, of_around, of_bias_2, of_bias = gaps
        to_sums *= wide
        to_sums[:, 0] += of_bias[:, None]
        to_inputs = to_sums[:, 0] + to_sums[:, 1], to_sums[:, 0] - to_sums[:, 1]
        to_weights = of_own, of_around, of_bias_2
        share = stack.pairs.share
        back = self._second_order(made, hidden, is_on, to_inputs, to_weights, share)
        to_a, to_b = (back[0] + back[1]) / 2, (back[0] - back[1]) / 2
        return losses, to_a @ plus.T - to_b @ minus.T + wide * to_prompts

    def _second_order(
        self,
        made: Second,
        hidden: tuple[Tensor, Tensor],
        is_on: Sequence[Tensor],
        to_inputs: tuple[Tensor, Tensor],
        to_weights: tuple[Tensor, Tensor, Tensor],
        share: Tensor,
    ) -> list[Tensor]:
        """Return derivatives by the first layer's outputs (K, m, q) of node and prompt.

        From those by the gradients ``inputs`` and ``weights`` of ``made``.
        """
        to_slope = to_weights[2][:, None]
        layer = list(zip((self.own_2, self.around_2), to_weights[:2], strict=True))
        for h, on, to_input, (weight, to_weight) in zip(
            hidden, is_on, to_inputs, layer, strict=True
        ):
            to_input = self.by_network(to_input * on)
            to_slope = to_slope + torch.einsum("kvnh,nho->kvno", to_input, weight)
            to_slope = to_slope + torch.einsum(
                "kvnh,knho->kvno", self.by_network(h), to_weight
            )
        to_chance = torch.einsum("kvno,noc->kvnc", to_slope, self.classifier)
        to_chance = to_chance * share[:, :, None, None]
        mean = (made.chance * to_chance).sum(3, keepdim=True)
        to_out = torch.einsum(
            "kvnc,noc->kvno", made.chance * (to_chance - mean), self.classifier
        )
        return [
            on
            * torch.einsum("kvno,nho->kvnh", to_out, weight)
            .add_(torch.einsum("kvno,knho->kvnh", made.slope, to_weight))
            .flatten(2)
            for on, (weight, to_weight) in zip(is_on, layer, strict=True)
        ]


def has_few_nodes(num_rows: int, num_pairs: int, num_features: int) -> bool:
    """Return whether products over nodes need fewer operations than over features.

    ``num_rows`` and ``num_pairs`` are the nodes of ℓ_true's hidden layer and of ℓ_syn.
    """
    by_nodes = 2 * num_pairs * (num_pairs + num_rows)
    return by_nodes < num_features * (3 * num_pairs + num_rows)
