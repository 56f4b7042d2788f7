"""Client half of FedGTA: FedAvg, and moments of the propagated labels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms import fedgta
from flower_fgl.client_apps.fedavg import DescribingClientApp
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.methods.fedgta import FedGTASettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.weights import MomentWeights

__all__ = ["FedGTAClientApp"]


class FedGTAClientApp(DescribingClientApp):
    """Train as in FedAvg; describe the result by moments of its propagated labels.

    Notes
    -----
    1. The published code scores the mixture before local training. Here a client scores
       the model that it trained, as with every personalized method.
    2. The published code adds the classes to the training rows in every step of label
       propagation; ``fedgta.propagation = "add"`` does that.
    """

    stacked = True
    up = MomentWeights

    def describe(
        self, group: Group, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return moments and confidence, and the logits."""
        settings: FedGTASettings = group.config.method_config
        inputs, rows, classes = group.inputs, group.rows, group.num_classes
        logits: Tensor = model(inputs)
        one_hot = F.one_hot(rows.labels, classes).to(logits.dtype)
        soft = logits.softmax(dim=-1).view(-1, classes)
        labels = fedgta.propagate_labels(
            inputs.topology.operator("normalised"),
            soft.index_copy(0, rows.index, one_hot),
            rows.index,
            adds=settings.propagation == "add",
        )
        sharp = fedgta.sharpen(labels, rows.index, one_hot)
        flat = fedgta.sharpen(labels, rows.index, one_hot, temperature=fedgta.FLAT)
        source, target = inputs.edge_index
        degree = torch.bincount(target[source != target], minlength=inputs.num_nodes)
        number = len(group)
        described = {
            "moments": fedgta.moments(
                sharp.view(number, -1, classes),
                orders=settings.orders,
                kind=settings.moments,
                real=group.real,
            ),
            "confidence": fedgta.confidence(
                flat.view(number, -1, classes), degree.view(number, -1)
            )[:, None],
        }
        return described, logits
