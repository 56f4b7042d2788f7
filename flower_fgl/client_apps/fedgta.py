"""Client half of FedGTA: FedAvg, and moments of the propagated labels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms import fedgta
from flower_fgl.client_apps.fedavg import DescribingClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fedgta import FedGTASettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.weights import MomentWeights

__all__ = ["FedGTAClientApp"]

Client = AnyClient[FedGTASettings]


class FedGTAClientApp(DescribingClientApp):
    """Train as in FedAvg; describe the result by moments of its propagated labels.

    Notes
    -----
    1. The published code scores the mixture before local training. Here a client scores
       the model that it trained, as with every personalized method.
    2. The published code adds the classes to the training rows in every step of label
       propagation; ``fedgta.propagation = "add"`` does that.
    """

    up = MomentWeights

    def describe(
        self, client: Client, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return moments and confidence, and the logits."""
        settings, data = client.config.method_config, client.data.training
        graph = data.inputs
        logits: Tensor = model(graph)
        one_hot = F.one_hot(data.labels, logits.shape[1]).to(logits.dtype)
        soft = logits.softmax(dim=1).index_copy(0, data.index, one_hot)
        labels = fedgta.propagate_labels(
            graph.operator("normalised"),
            soft,
            data.index,
            adds=settings.propagation == "add",
        )
        sharp = fedgta.sharpen(labels, data.index, one_hot)
        flat = fedgta.sharpen(labels, data.index, one_hot, temperature=fedgta.FLAT)
        source, target = graph.edge_index
        degree = torch.bincount(target[source != target], minlength=graph.num_nodes)
        described = {
            "moments": fedgta.moments(
                sharp, orders=settings.orders, kind=settings.moments
            ),
            "confidence": fedgta.confidence(flat, degree)[None],
        }
        return described, logits
