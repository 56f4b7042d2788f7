"""Pseudo-graph that the server generates from class statistics, O-pFGL Eqs. (10)-(13).

The generator follows Xiao et al., "Simple graph condensation", ECML-PKDD 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.opfgl.class_statistics import check_statistics
from flower_fgl.algorithms.opfgl.objective import (
    ClassTargets,
    alignment_loss,
    link_weights,
    propagated,
    smoothness_loss,
)
from flower_fgl.algorithms.opfgl.pairwise import EPSILON, pair_scores
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import seeded

__all__ = [
    "GeneratorSettings",
    "LinkPredictor",
    "PseudoGraph",
    "PseudoGraphGenerator",
    "generate",
    "pseudo_counts",
]

FEW_NODES = 16
"""Pseudo-nodes up to which the link predictor computes all pairs at once, by autograd."""

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


@dataclass(frozen=True)
class GeneratorSettings:
    """Hyper-parameters of the generator, O-pFGL Sec. V-A and its published commands.

    T_c is ``steps``; ``lr_features`` and ``lr_links`` are Adam's learning rates for X'
    and for g_θ, whose width is ``hidden_channels``. Edges below δ = ``threshold`` are
    omitted; if it ``is_hard``, kept edges have weight 1, with the gradient of their
    weight. ``alignment_weight`` and ``smoothness_weight`` are factors of the two losses,
    and ``smooth_sign`` is +1 as in the paper and its code, −1 as in graph condensation.
    """

    steps: int = 3000
    lr_features: float = 5e-3
    lr_links: float = 1e-3
    hidden_channels: int = 128
    threshold: float = 0.01
    is_hard: bool = False
    alignment_weight: float = 10.0
    smoothness_weight: float = 0.1
    smooth_sign: Literal[1, -1] = 1


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
        if 1 < len(x) <= FEW_NODES:  # as printed: fewer calls than the blocks of pairs
            pairs = (left[:, None] + right).flatten(0, 1)
            pairs = self._normalised(pairs, 0) @ self.second.weight.T
            scores = (self._normalised(pairs, 1) @ self.last.weight[0]).view(len(x), -1)
            few: Tensor = (scores + scores.T) / 2 + self.last.bias
            return few
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

    def _normalised(self, pairs: Tensor, layer: int) -> Tensor:
        """Apply batch normalisation and ReLU to rows (s², h)."""
        scale, shift = self.scale[layer], self.shift[layer]
        return F.batch_norm(pairs, None, None, scale, shift, True).relu()


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

    Parameters
    ----------
    mean, variance : Tensor of shape (C, D), float32
        μ and s² of propagated features, D = (h + 1)·d.
    counts, num_nodes : Tensor of shape (C,), int64
        N, 0 omits a class, and the number of its pseudo-nodes, see :func:`pseudo_counts`.
    num_features, depth : int
        d and h.
    settings : GeneratorSettings
        Hyper-parameters.
    generator : torch.Generator
        Draws X' ~ N(0, 1) and the initial weights of g_θ.

    Raises
    ------
    PayloadError
        If the statistics are impossible, do not have width (h + 1)·d, or no client has
        any class.
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
        settings: GeneratorSettings,
        generator: torch.Generator,
    ) -> None:
        check_statistics(mean, variance, counts)
        if mean.shape[1] != (depth + 1) * num_features:
            raise PayloadError(
                f"Statistics must be {(depth + 1) * num_features} wide, {depth + 1} hops "
                f"of {num_features} features, got {mean.shape[1]}: clients and server "
                "must use the same depth."
            )
        number = num_nodes * (counts > 0)
        if not int(number.sum()):
            raise PayloadError(
                "No client uploaded statistics of any class: on every client, each class "
                "has fewer labelled nodes than min-class-count. Use more labelled nodes, "
                "fewer clients, or a smaller min-class-count."
            )
        self.settings, self.depth = settings, depth
        held = (counts > 0)[:, None]
        self.labels = torch.repeat_interleave(
            torch.arange(len(number), device=number.device), number
        )
        self.targets = ClassTargets.of(
            self.labels,
            mean.masked_fill(~held, 0.0),
            variance.masked_fill(~held, 0.0).sqrt(),
            counts,
        )
        shape = (len(self.labels), num_features)
        start = torch.randn(shape, generator=generator).to(mean)
        self.features = nn.Parameter(start)
        with seeded(int(torch.randint(2**62, (), generator=generator))):
            links = LinkPredictor(num_features, settings.hidden_channels)
        self.links = links.to(mean)
        self._similarity: list[Tensor] = []
        self._for_links, self._for_features = (
            torch.optim.Adam(parameters, lr=lr, fused=True)
            for parameters, lr in (
                (links.parameters(), settings.lr_links),
                ([self.features], settings.lr_features),
            )
        )

    def adjacency(self) -> Tensor:
        """Return A', of shape (s, s), see :func:`link_weights`."""
        scores = self.links(self.features)
        options = self.settings
        return link_weights(
            scores, threshold=options.threshold, is_hard=options.is_hard
        )

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Take one step: of g_θ if ``number``, of previous steps, mod 50 < 10, else of X'.

        Returns alignment and smoothness before the step, without weights and gradient.
        """
        is_link_step = number % PERIOD < LINK_STEPS
        self.links.requires_grad_(is_link_step)
        self.features.requires_grad_(not is_link_step)
        optimizer = self._for_links if is_link_step else self._for_features
        optimizer.zero_grad()
        adjacency = self.adjacency()
        hops = propagated(self.features, adjacency, self.depth)
        align = alignment_loss(hops, self.targets)
        smooth = smoothness_loss(self.features, adjacency, self._similarity)
        if not is_link_step:
            self._similarity.clear()
        options = self.settings
        signed = options.smooth_sign * options.smoothness_weight * smooth
        (options.alignment_weight * align + signed).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return align.detach(), smooth.detach()

    @torch.no_grad()
    def result(self) -> PseudoGraph:
        """Return the current pseudo-graph."""
        return PseudoGraph(
            self.features.detach().clone(), self.labels, self.adjacency()
        )


def generate(
    *statistics: Tensor,
    settings: GeneratorSettings,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[PseudoGraph, Tensor]:
    """Generate a pseudo-graph with given class statistics, O-pFGL Sec. IV-C.

    Parameters and errors are those of :class:`PseudoGraphGenerator`. ``progress`` is
    called every 50 steps and after the last. Returns the graph, and alignment and
    smoothness before each step, without weights: (steps, 2).
    """
    trainer = PseudoGraphGenerator(*statistics, settings=settings, **options)
    losses = trainer.features.new_zeros((settings.steps, 2), requires_grad=False)
    for number in range(settings.steps):
        align, smooth = trainer.step(number)
        losses[number, 0], losses[number, 1] = align, smooth
        done = number + 1
        if progress is not None and (done % PERIOD == 0 or done == settings.steps):
            value = settings.alignment_weight * align
            value += settings.smooth_sign * settings.smoothness_weight * smooth
            progress(done, settings.steps, float(value))
    return trainer.result(), losses
