"""Pseudo-graph that the server generates from class statistics, O-pFGL Eqs. (5), (10)-(13).

The generator and its losses follow Xiao et al., "Simple graph condensation", ECML-PKDD
2024.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.opfgl.alignment import ClassTargets, alignment_loss
from flower_fgl.algorithms.opfgl.few_nodes import THRESHOLD, FewNodes
from flower_fgl.algorithms.opfgl.pairwise import EPSILON, pair_scores, smoothness_loss
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.opfgl import OPFGLSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.optimizers import Adam, quick
from flower_fgl.nn.sparse import apply_function

__all__ = ["LinkPredictor", "PseudoGraph", "PseudoGraphGenerator", "generate"]
__all__ += ["link_weights", "propagated", "pseudo_counts"]


def link_weights(scores: Tensor, *, is_hard: bool = False) -> Tensor:
    """Turn scores into an adjacency matrix (s, s), O-pFGL Eq. (10).

    ``A_ij = σ(z_ij)`` where it is at least δ = ``THRESHOLD`` and i ≠ j, else 0; z are
    ``scores`` (s, s), symmetric. If it ``is_hard``, kept edges have weight 1, with the
    gradient of σ(z).

    Notes
    -----
    1. Eq. (10) prints the indicator, which has no gradient. By default the weight itself
       is kept, as in the published code.
    """
    weight = torch.sigmoid(scores)
    weight = (weight + weight.T) / 2  # a vectorised σ may differ in the last bit
    kept = (weight.detach() >= THRESHOLD).to(weight.dtype).fill_diagonal_(0)
    weight = weight * kept
    return weight + (kept - weight).detach() if is_hard else weight


def propagated(x: Tensor, adjacency: Tensor, depth: int) -> Tensor:
    """Concatenate propagated features of a dense weighted graph, O-pFGL Eq. (5).

    From X' (s, d) and A' (s, s), symmetric and not negative, normalised here as A' + I:
    (s, (h + 1)·d) for h = ``depth``, differentiable once in both.
    """
    return apply_function(_Propagation, x, adjacency, depth)


class _Propagation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Tensor, depth: int) -> Tensor:
        inverse = (adjacency.sum(dim=1) + 1).rsqrt()
        normalised = adjacency * inverse * inverse[:, None]
        normalised.diagonal().add_(inverse.square())
        out = x.new_empty((len(x), (depth + 1) * x.shape[1]))
        hops = out.view(len(x), depth + 1, -1).unbind(1)
        hops[0].copy_(x)
        for before, after in pairwise(hops):
            torch.mm(normalised, before, out=after)
        ctx.save_for_backward(out, normalised, inverse)
        ctx.depth = depth
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, normalised, inverse = ctx.saved_tensors
        hops, grads = (t.view(len(t), ctx.depth + 1, -1).unbind(1) for t in (out, grad))
        to_hop, to_adjacency = grads[-1], None
        to_normalised = torch.zeros_like(normalised)
        for h in range(ctx.depth, 0, -1):
            if ctx.needs_input_grad[1]:
                to_normalised.addmm_(to_hop, hops[h - 1].T)
            to_hop = torch.addmm(grads[h - 1], normalised, to_hop)  # symmetric
        if ctx.needs_input_grad[1]:
            # Ã_ij = r_i r_j (A + I)_ij with r = (row sum of A + I)^(−1/2)
            both = to_normalised * normalised
            of_degree = (both.sum(dim=0) + both.sum(dim=1)) * inverse.square() / -2
            to_adjacency = to_normalised * inverse * inverse[:, None]
            to_adjacency += of_degree[:, None]
        return to_hop, to_adjacency, None


FEW_NODES = 16
"""Pseudo-nodes up to which a step computes all pairs at once."""

PERIOD, LINK_STEPS = 50, 10
"""In each 50 steps, the first 10 train the link predictor, the others the features."""

Progress = Callable[[int, int, float], None]
"""Called with the number of finished steps, of all steps, and the loss."""


@dataclass(frozen=True, eq=False)
class PseudoGraph:
    """A small weighted graph of s nodes with labels.

    X' (s, d); Y' (s,), non-decreasing; A' (s, s) in [0, 1], symmetric, with a zero
    diagonal.
    """

    features: Tensor
    labels: Tensor
    adjacency: Tensor

    def as_input(self) -> GraphInput:
        """Return it as the input of backbones, with edges in both directions."""
        row, column = self.adjacency.nonzero(as_tuple=True)
        weight = self.adjacency[row, column]
        return GraphInput(self.features, torch.stack([row, column]), weight)


class LinkPredictor(nn.Module):
    """Predict how strongly two nodes are connected, g_θ of O-pFGL Eq. (10).

    An MLP 2d → h → h → 1 with batch normalisation over all s² pairs and ReLU after each
    hidden layer, symmetrised: ``z_ij = (g([x_i ‖ x_j]) + g([x_j ‖ x_i])) / 2``.

    The first layer is a_i + b_j. Over all ordered pairs its mean and variance are the
    sums of those of a and b, so its exact normalisation costs O(s·h). Normalisation
    always uses the statistics of the batch, so the two layers before it need no bias.
    With a single node there is one pair, whose normalised value is the shift.
    """

    def __init__(self, num_features: int, hidden_channels: int) -> None:
        super().__init__()
        first = nn.Linear(2 * num_features, hidden_channels, bias=False).weight
        halves = first.detach().chunk(2, dim=1)
        self.first = nn.Parameter(torch.cat(halves))  # (2h, d): those of x_i, of x_j
        self.second = nn.Linear(hidden_channels, hidden_channels, bias=False)
        self.last = nn.Linear(hidden_channels, 1)
        self.scale = nn.Parameter(torch.ones(2, hidden_channels))
        self.shift = nn.Parameter(torch.zeros(2, hidden_channels))
        self._pool: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return z of shape (s, s), symmetric, for features of shape (s, d)."""
        left, right = (x @ self.first.T).chunk(2, dim=1)
        left, right = left - left.mean(dim=0), right - right.mean(dim=0)
        variance = left.square().mean(dim=0) + right.square().mean(dim=0)
        slope = self.scale[0] / (variance + EPSILON).sqrt()
        scores = pair_scores(
            left * slope + self.shift[0],
            right * slope,
            self.second.weight,
            self.scale[1],
            self.shift[1],
            self.last.weight[0],
            pool=self._pool,
        )
        out: Tensor = (scores + scores.T) / 2 + self.last.bias
        return out


def pseudo_counts(counts: Tensor, *, share: float | None = None) -> Tensor:
    """Compute the number of pseudo-nodes of each class (C,), O-pFGL Sec. IV-C.

    ``max(⌈p·N⌉, 1)`` for N labelled nodes, without reliable ones, and p = ``share``; by
    default one node per class. 0 for a class that no client has.
    """
    present = (counts > 0).long()
    if share is None:
        return present
    number = torch.ceil(share * counts.double() - 1e-9).long()
    return torch.maximum(number, present)


class PseudoGraphGenerator:
    """Training of features and link predictor, O-pFGL Eq. (13).

    ``mean`` and ``variance`` (C, D) are μ and s² of propagated features, D = (h + 1)·d
    with h = ``depth``; ``counts`` (C,) is N, 0 omits a class, and ``num_nodes`` (C,)
    the numbers of pseudo-nodes, see :func:`pseudo_counts`. ``generator`` draws X' ~
    N(0, 1) and the initial weights of g_θ. PayloadError if no
    client has any class.
    """

    def __init__(
        self,
        mean: Tensor,
        variance: Tensor,
        counts: Tensor,
        num_nodes: Tensor,
        *,
        num_features: int,
        depth: int,
        settings: OPFGLSettings,
        generator: torch.Generator,
    ) -> None:
        number = num_nodes * (counts > 0)
        if not int(number.sum()):
            raise PayloadError(
                "No client uploaded statistics of any class: on every client, each class "
                "has fewer labelled nodes than min-class-count. Use more labelled nodes, "
                "fewer clients, or a smaller min-class-count."
            )
        self.settings, self.depth = settings, depth
        self.labels = torch.repeat_interleave(
            torch.arange(len(number), device=number.device), number
        )
        self.targets = ClassTargets.of(self.labels, mean, variance.sqrt(), counts)
        shape = (len(self.labels), num_features)
        start = torch.randn(shape, generator=generator).to(mean)
        self.features = nn.Parameter(start)
        with seeded(int(torch.randint(2**62, (), generator=generator))):
            links = LinkPredictor(num_features, settings.link_channels)
        self.links = links.to(mean)
        self._link_weights = list(self.links.parameters())
        self._similarity: list[Tensor] = []
        self._few = FewNodes(self.targets, self.links, settings, depth=depth)
        self._for_links, self._for_features = (
            quick(Adam(parameters, lr=lr, fused=True))
            for parameters, lr in (
                (links.parameters(), settings.lr_links),
                ([self.features], settings.lr_features),
            )
        )

    def adjacency(self) -> Tensor:
        """Return A', of shape (s, s), see :func:`link_weights`."""
        scores = self.links(self.features)
        return link_weights(scores, is_hard=self.settings.links == "hard")

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Take one step: of g_θ if ``number``, of previous steps, mod 50 < 10, else of X'.

        Returns alignment and smoothness before the step, without weights and gradient.
        """
        is_link_step = number % PERIOD < LINK_STEPS
        if 1 < len(self.labels) <= FEW_NODES:
            align, smooth, gradients = self._few.gradients(
                self.features, of_links=is_link_step
            )
            trained = self._link_weights if is_link_step else [self.features]
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
        else:
            align, smooth = self._backward(is_link_step=is_link_step)
        (self._for_links if is_link_step else self._for_features).step()
        return align, smooth

    def _backward(self, *, is_link_step: bool) -> tuple[Tensor, Tensor]:
        """Compute the losses, and the gradients by autograd."""
        self.links.requires_grad_(is_link_step).zero_grad()
        self.features.requires_grad_(not is_link_step).grad = None
        adjacency = self.adjacency()
        hops = propagated(self.features, adjacency, self.depth)
        align = alignment_loss(hops, self.targets)
        smooth = smoothness_loss(self.features, adjacency, self._similarity)
        if not is_link_step:
            self._similarity.clear()
        signed = self.settings.signed_smoothness * smooth
        (self.settings.alignment_weight * align + signed).backward()  # type: ignore[no-untyped-call]
        return align.detach(), smooth.detach()

    @torch.no_grad()
    def result(self) -> PseudoGraph:
        """Return the current pseudo-graph."""
        return PseudoGraph(
            self.features.detach().clone(), self.labels, self.adjacency()
        )


def generate(
    *statistics: Tensor,
    settings: OPFGLSettings,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[PseudoGraph, Tensor]:
    """Generate a pseudo-graph with given class statistics, O-pFGL Sec. IV-C.

    Parameters and errors are those of :class:`PseudoGraphGenerator`. ``progress`` is
    called every 50 steps and after the last. Returns the graph, and alignment and
    smoothness before each step, without weights: (steps, 2).
    """
    trainer = PseudoGraphGenerator(*statistics, settings=settings, **options)
    losses = []
    for number in range(settings.server_steps):
        align, smooth = trainer.step(number)
        losses += [align, smooth]
        done = number + 1
        if progress is not None and (
            done % PERIOD == 0 or done == settings.server_steps
        ):
            value = settings.alignment_weight * align
            value += settings.signed_smoothness * smooth
            progress(done, settings.server_steps, float(value))
    rows = torch.stack(losses) if losses else trainer.features.new_zeros(0)
    return trainer.result(), rows.detach().view(-1, 2)
