"""Client half of FGGP: two views of the graph, and confident class prototypes.

Wan, Huang and Ye, "Federated Graph Learning under Domain Shift with Generalizable
Prototypes", AAAI 2024.

===============================================  ==========================
part                                             function
===============================================  ==========================
k-NN graph of the received model's features      ``nearest_neighbours``
edges of the second view, redrawn each step      ``resample_edges``
weighted cross-entropy of the edge predictor     ``edge_loss``
confidence-weighted class prototypes             ``confidence_means``
alignment of both views' prototypes              ``view_contrast``
===============================================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.graph_views import (
    confidence_means,
    confident_labels,
    edge_loss,
    edge_scores,
    nearest_neighbours,
    resample_edges,
    union_pairs,
    view_contrast,
)
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.core.seeds import torch_generator
from flower_fgl.methods.fggp import FGGPSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.embedding_recorder import RecordingBackbone
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fggp import ModelAndPrototypes
from flower_fgl.protocols.prototypes import Prototypes

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

    stacked = "flower_fgl.client_apps.stacked.fggp:StackedFGGP"
    down = ModelAndPrototypes
    up = ModelAndPrototypes

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the weights and of one cluster per class and client."""
        classes, _, width = self.table(client)
        return client.state_shapes(), (classes, client.num_partitions, width)

    def table(self, client: Client) -> tuple[int, int, int]:
        """Return the shape of the prototypes in an upload."""
        return client.data.num_classes, 1, client.config.hidden_channels

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train on both views, then compute the prototypes without dropout."""
        model = TwoViews(client.build_model())
        load_state(model.backbone, download.tensors)
        penalty = self.second_view(client, server_round, model)
        loss = client.train(model, server_round, penalty=penalty)
        data, classes = client.data.training, client.data.num_classes
        model.eval()
        with torch.no_grad():
            model(data.inputs)
        found = confident_labels(model.logits, data.index, data.labels)
        means = confidence_means(model.embedding, *found, classes)
        present = torch.bincount(found[0], minlength=classes) > 0
        prototypes = Prototypes(means[:, None].cpu(), present[:, None].cpu())
        upload = ModelAndPrototypes(model.backbone.state_dict(), prototypes)
        return Fit(model.backbone, upload, loss)

    def second_view(
        self, client: Client, server_round: int, model: TwoViews
    ) -> Callable[[], Tensor]:
        """Return a function for all loss terms beside the first view's cross-entropy."""
        method_config: FGGPSettings = client.config.method_config
        data = client.data.training
        inputs, classes = data.inputs, client.data.num_classes
        near = nearest_neighbours(model.at_rest(inputs), method_config.neighbors)
        pairs = union_pairs(inputs.num_nodes, inputs.edge_index, near)
        both = torch.cat([pairs, pairs.flip(0)], dim=1)
        generator = torch_generator(
            client.config.seed, server_round, client.partition_id, "edges"
        )

        def terms() -> Tensor:
            first, logits = model.embedding, model.logits
            noise = torch.rand(pairs.shape[1], generator=generator).to(pairs.device)
            scores = edge_scores(first, pairs)
            weight = resample_edges(scores, noise, tau=EDGE_TAU)
            view = inputs.with_edges(both, torch.cat([weight, weight]))
            second = model.backbone.embed(view)
            predicted = model.backbone.head(second, view)[data.index]
            found = confident_labels(logits, data.index, data.labels)
            present = torch.bincount(found[0], minlength=classes) > 0
            means = [confidence_means(h, *found, classes) for h in (first, second)]
            contrast = view_contrast(
                *(m[present] for m in means), tau=method_config.tau
            )
            out: Tensor = (
                method_config.view_weight * F.cross_entropy(predicted, data.labels)
                + method_config.edge_weight * edge_loss(first, pairs)
                + method_config.contrast_weight * contrast
            )
            return out

        return terms
