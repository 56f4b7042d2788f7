"""Client half of FGGP: two views of the graph, and confident class prototypes.

Wan, Huang and Ye, "Federated Graph Learning under Domain Shift with Generalizable
Prototypes", AAAI 2024.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes import graph_views
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    cross_entropy,
)
from flower_fgl.methods.fggp import FGGPSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import Prototypes
from flower_fgl.protocols.weights import ModelAndPrototypes

__all__ = ["FGGPClientApp", "TwoViews"]

EDGE_TAU = 0.5
"""Temperature at which the edges of the second view are drawn."""


class TwoViews(RecordingBackbone):
    """Backbone that stores its last embedding and its last ``logits`` (N, C)."""

    logits: Tensor

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from the result of :meth:`embed`, and store the logits."""
        self.logits = super().head(h, graph)
        return self.logits


class FGGPClientApp(FedAvgClientApp):
    """Train on two views of the graph; upload the model and its class prototypes.

    Notes
    -----
    1. The published code draws the second view's edges among all N² pairs, by a softmax
       over each row. Here each pair of the union graph is drawn independently, once for
       both directions, so that the view stays sparse and suits every backbone.
    2. The published code predicts edges from embeddings without gradient, so that their
       loss trains nothing; here it trains the encoder.
    3. The model's own head predicts the nodes. The cluster prototypes in the download
       enter no loss, as in the published code.
    4. With mini-batches, the second view's terms use all training nodes in every step.
    5. Fine-tuning trains the first view's cross-entropy alone, without prototypes, and
       starts with fresh moments of the optimizer.
    """

    stacked = True
    fit = GroupClientApp.fit
    down = ModelAndPrototypes
    up = ModelAndPrototypes

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the weights and of one cluster per class and client."""
        classes, _, width = self.table(client)
        return client.state_shapes(), (classes, client.num_partitions, width)

    def table(self, client: Client) -> tuple[int, int, int]:
        """Return the shape of the prototypes in an upload."""
        return client.data.num_classes, 1, client.config.hidden_channels

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train on both views, then compute the prototypes without dropout."""
        model = TwoViews(group.receive(downloads, self.build))
        losses = group.train(model, penalty=self.second_view(group, model))
        model.eval()
        with torch.no_grad():
            model(group.inputs)
        cells, confidence, present = self.cells(group, model)
        means = class_prototypes(group, model.embedding, cells, confidence)
        found = zip(
            group.split(model.backbone.state_dict()),
            means[:, :, None].cpu(),
            present[:, :, None].cpu(),
            strict=True,
        )
        uploads = [ModelAndPrototypes(s, Prototypes(m, p)) for s, m, p in found]
        return GroupFit(model.backbone, uploads, losses)

    def cells(self, group: Group, model: TwoViews) -> tuple[Tensor, Tensor, Tensor]:
        """Return client · C + class and confidence (t,) of all nodes, and classes present.

        The nodes are those of :attr:`Group.all_rows`; ``present`` has the shape (K, C).
        """
        every, rows, classes = group.all_rows, group.rows, group.num_classes
        flat = model.logits.flatten(0, -2)
        found, confidence = graph_views.confident_labels(flat, rows.index, rows.labels)
        cells = every.client * classes + found[every.index]
        count = torch.bincount(cells, minlength=len(group) * classes)
        return cells, confidence[every.index], count.view(-1, classes) > 0

    def second_view(self, group: Group, model: TwoViews) -> Callable[[], Tensor]:
        """Return a function for all loss terms beside the first view's cross-entropy.

        ``model`` holds the received weights.
        """
        settings: FGGPSettings = group.config.method_config
        inputs, rows = group.inputs, group.rows
        parts = self.union_graphs(group, model)
        counts = [part.shape[1] for part in parts]
        pairs = torch.cat(parts, dim=1)
        both = torch.cat([pairs, pairs.flip(0)], dim=1)
        client = torch.repeat_interleave(
            torch.arange(len(group)), torch.tensor(counts)
        ).to(group.device)
        generators = group.generators("edges")
        size = model.embedding.shape[-2]
        real = torch.zeros(len(group), size, dtype=torch.bool, device=group.device)
        real.view(-1)[group.all_rows.index] = True

        def terms() -> Tensor:
            first = model.embedding
            drawn = [
                torch.rand(count, generator=generator)
                for count, generator in zip(counts, generators, strict=True)
            ]
            noise = torch.cat(drawn).to(group.device)
            scores = graph_views.edge_scores(first.flatten(0, -2), pairs)
            weight = graph_views.resample_edges(scores, noise, tau=EDGE_TAU)
            view = inputs.with_edges(both, torch.cat([weight, weight]))
            cells, confidence, present = self.cells(group, model)
            second = model.backbone.embed(view)
            predicted = rows.pick(model.backbone.head(second, view))
            means = [
                class_prototypes(group, h, cells, confidence) for h in (first, second)
            ]
            entropy = rows.mean(cross_entropy(predicted, rows.labels))
            stacked = first.view(*real.shape, -1)
            out: Tensor = (
                settings.view_weight * entropy
                + settings.edge_weight
                * graph_views.edge_loss(stacked, pairs, client, real)
                + settings.contrast_weight
                * graph_views.view_contrast(
                    means[0], means[1], present, tau=settings.tau
                )
            )
            return out

        return terms

    def union_graphs(self, group: Group, model: TwoViews) -> list[Tensor]:
        """Return each client's pairs (2, E_k) of the union graph, as flattened rows."""
        h = model.at_rest(group.inputs)
        stacked = h.view(len(group), *h.shape[-2:])
        parts = []
        for place, client in enumerate(group.clients):
            graph = client.data.training.inputs
            near = graph_views.nearest_neighbours(
                stacked[place, : graph.num_nodes], group.config.method_config.neighbors
            )
            pairs = graph_views.union_pairs(graph.num_nodes, graph.edge_index, near)
            parts.append(pairs + place * stacked.shape[1])
        return parts


def class_prototypes(
    group: Group, embedding: Tensor, cells: Tensor, confidence: Tensor
) -> Tensor:
    """Average embeddings of all nodes by client and class: (K, C, p)."""
    number = len(group) * group.num_classes
    rows = group.all_rows.pick(embedding)
    means = graph_views.confidence_means(rows, cells, confidence, number)
    return means.view(len(group), group.num_classes, -1)
