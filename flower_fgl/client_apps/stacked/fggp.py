"""Stacked form of FGGP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.graph_views import (
    BLOCK,
    all_pairs,
    confidence_means,
    confident_labels,
    edge_scores,
    nearest_neighbours,
    resample_edges,
    union_pairs,
)
from flower_fgl.client_apps.fggp import EDGE_TAU, TwoViews
from flower_fgl.client_apps.stacked.cohort import Cohort, Rows, cross_entropy
from flower_fgl.client_apps.stacked.half import StackedFit, StackedHalf
from flower_fgl.nn.stacked import split_state
from flower_fgl.protocols.fggp import ModelAndPrototypes
from flower_fgl.protocols.prototypes import Prototypes

__all__ = ["StackedFGGP", "edge_losses", "pair_sums", "view_contrasts"]


def view_contrasts(
    first: Tensor, second: Tensor, present: Tensor, *, tau: float
) -> Tensor:
    """Align both views' prototypes of every client by InfoNCE.

    Parameters
    ----------
    first, second : Tensor of shape (K, C, p), float32
        f and s; rows of absent classes are not read.
    present : Tensor of shape (K, C), bool
        Classes of each client, at least one.
    tau : float, positive
        Temperature.

    Returns
    -------
    Tensor of shape (K,)
        :func:`~flower_fgl.algorithms.prototypes.graph_views.view_contrast` of each.
    """
    across = F.normalize(first, dim=2).transpose(1, 2)
    similarity = torch.bmm(F.normalize(second, dim=2), across) / tau
    # a finite mark instead of −∞: its exponential is 0, and no gradient is NaN
    least = torch.finfo(similarity.dtype).min / 2
    columns = similarity.masked_fill(~present[:, None], least)
    own = -columns.log_softmax(2).diagonal(dim1=1, dim2=2)  # (K, C)
    return torch.where(present, own, 0).sum(1) / present.sum(1)


def pair_sums(embedding: Tensor, real: Tensor) -> Tensor:
    """Sum softplus(h_u·h_v) over all u < v of every client.

    Parameters
    ----------
    embedding : Tensor of shape (K, n, p), float32
        h, with gradient.
    real : Tensor of shape (K, n), bool
        Rows that are nodes, the first of each client.

    Returns
    -------
    Tensor of shape (K,)
    """
    if embedding.shape[1] ** 2 > BLOCK:
        sizes = real.sum(1).tolist()
        parts = zip(embedding.unbind(), sizes, strict=True)
        return torch.stack([all_pairs(h[:size]) for h, size in parts])
    out: Tensor = _PairSums.apply(embedding, real)  # type: ignore[no-untyped-call]
    return out


class _PairSums(torch.autograd.Function):
    """The sums of clients whose matrices of pairs fit into memory."""

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, real: Tensor) -> Tensor:
        """Sum groups of clients, and their gradient ``Σ_v σ(h_u·h_v) h_v``."""
        size = embedding.shape[1]
        gradient, totals = torch.empty_like(embedding), []
        others = ~torch.eye(size, dtype=torch.bool, device=embedding.device)
        start = 0
        for h, is_node in zip(
            torch.split(embedding, max(1, BLOCK // size**2)),
            torch.split(real, max(1, BLOCK // size**2)),
            strict=True,
        ):
            used = is_node[:, :, None] & is_node[:, None] & others
            score = torch.bmm(h, h.transpose(1, 2))  # (g, n, n)
            loss = F.softplus(score).mul_(used)
            totals.append(loss.sum((1, 2), dtype=torch.float64) / 2)
            slope = score.sigmoid_().mul_(used)
            gradient[start : start + len(h)] = torch.bmm(slope, h)
            start += len(h)
        ctx.save_for_backward(gradient)
        return torch.cat(totals).to(embedding.dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        """Scale the stored gradient of each client."""
        gradient: Tensor = ctx.saved_tensors[0]
        return gradient * outputs[0][:, None, None], None


def edge_losses(
    embedding: Tensor, pairs: Tensor, client: Tensor, real: Tensor
) -> Tensor:
    """Compare every client's edge predictor with its union graph.

    Parameters
    ----------
    embedding : Tensor of shape (K, n, p), float32
        h, with gradient.
    pairs : Tensor of shape (2, E), int64
        Edges of the union graphs, as rows of the flattened embedding (K·n, p).
    client : Tensor of shape (E,), int64
        Client of each edge.
    real : Tensor of shape (K, n), bool
        Rows that are nodes.

    Returns
    -------
    Tensor of shape (K,)
        :func:`~flower_fgl.algorithms.prototypes.graph_views.edge_loss` of each.
    """
    number = real.sum(1)
    edges = torch.bincount(client, minlength=len(real))
    others = number * (number - 1) // 2 - edges
    scores = edge_scores(embedding.flatten(0, 1), pairs)
    zeros = scores.new_zeros(len(real))
    on_edges = zeros.index_add(0, client, F.softplus(scores))
    apart = (pair_sums(embedding, real) - on_edges) / others.clamp(min=1)
    linked = zeros.index_add(0, client, F.softplus(-scores)) / edges.clamp(min=1)
    return 0.5 * (linked + apart * (others > 0))


class StackedFGGP(StackedHalf):
    """Train on two views of every client's graph, and average prototypes."""

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train on both views, then compute the prototypes without dropout."""
        model = TwoViews(cohort.build_model([d.tensors for d in downloads]))
        losses = cohort.train(model, penalty=self.second_view(cohort, model))
        every, classes = cohort.data.all_rows(), cohort.num_classes
        model.eval()
        with torch.no_grad():
            model(cohort.inputs)
            cells, confidence, present = self.cells(cohort, model, every)
            means = confidence_means(
                every.pick(model.embedding), cells, confidence, present.numel()
            ).view(len(cohort), classes, -1)
        found = zip(
            split_state(model.backbone.state_dict(), len(cohort)),
            means[:, :, None].cpu(),
            present[:, :, None].cpu(),
            strict=True,
        )
        uploads = [ModelAndPrototypes(s, Prototypes(m, p)) for s, m, p in found]
        return StackedFit(model.backbone, uploads, losses)

    def cells(
        self, cohort: Cohort, model: TwoViews, every: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a client and class, and a confidence, for every node.

        Returns
        -------
        cells : Tensor of shape (t,), int64
            Client · C + class of each row.
        confidence : Tensor of shape (t,), float32
        present : Tensor of shape (K, C), bool
            Classes with a node.
        """
        classes = cohort.num_classes
        rows = cohort.rows
        flat = model.logits.flatten(0, 1)
        found, confidence = confident_labels(flat, rows.index, rows.labels)
        cells = every.client * classes + found[every.index]
        count = torch.bincount(cells, minlength=len(cohort) * classes)
        return cells, confidence[every.index], count.view(-1, classes) > 0

    def second_view(self, cohort: Cohort, model: TwoViews) -> Callable[[], Tensor]:
        """Return all loss terms of each client beside the cross-entropy."""
        settings, inputs, rows = cohort.config.method_config, cohort.inputs, cohort.rows
        every = cohort.data.all_rows()
        pairs, counts = self.union_graphs(cohort, model)
        both = torch.cat([pairs, pairs.flip(0)], dim=1)
        client = torch.repeat_interleave(
            torch.arange(len(cohort)), torch.tensor(counts)
        ).to(cohort.device)
        generators = cohort.generators("edges")

        def terms() -> Tensor:
            first = model.embedding
            noise = torch.cat(
                [
                    torch.rand(count, generator=generator)
                    for count, generator in zip(counts, generators, strict=True)
                ]
            ).to(cohort.device)
            scores = edge_scores(first.flatten(0, 1), pairs)
            weight = resample_edges(scores, noise, tau=EDGE_TAU)
            view = inputs.with_edges(both, torch.cat([weight, weight]))
            cells, confidence, present = self.cells(cohort, model, every)
            second = model.backbone.embed(view)
            predicted = rows.pick(model.backbone.head(second, view))
            one, other = (
                confidence_means(
                    every.pick(h), cells, confidence, present.numel()
                ).view(*present.shape, -1)
                for h in (first, second)
            )
            contrast = view_contrasts(one, other, present, tau=settings.tau)
            entropy = rows.mean(cross_entropy(predicted, rows.labels))
            edges = edge_losses(first, pairs, client, inputs.real)
            out: Tensor = (
                settings.view_weight * entropy
                + settings.edge_weight * edges
                + settings.contrast_weight * contrast
            )
            return out

        return terms

    def union_graphs(self, cohort: Cohort, model: TwoViews) -> tuple[Tensor, list[int]]:
        """Return the pairs of all union graphs, as flattened rows, and their numbers."""
        embedding = model.at_rest(cohort.inputs)
        parts = []
        for place, client in enumerate(cohort.clients):
            graph = client.data.inputs[0]
            near = nearest_neighbours(
                embedding[place, : graph.num_nodes],
                cohort.config.method_config.neighbors,
            )
            pairs = union_pairs(graph.num_nodes, graph.edge_index, near)
            parts.append(pairs + place * cohort.inputs.num_rows)
        return torch.cat(parts, dim=1), [part.shape[1] for part in parts]
