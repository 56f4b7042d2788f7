"""Client half of FedProto and FedTGP: upload class means instead of weights.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import TrainingSet
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit, Rows
from flower_fgl.methods.fedproto import FedProtoSettings
from flower_fgl.methods.fedtgp import FedTGPSettings
from flower_fgl.nn import Backbone
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["FedProtoClientApp", "PrototypeClientApp", "class_distance"]


def class_distance(
    embedding: Tensor, rows: Rows, target: Tensor, present: Tensor
) -> Tensor:
    """Sum the mean squared distance of each class to its prototype, FedProto Eq. (7).

    ``Σ_c MSE(f(x_{y=c}), P̄^c)``: (K,), the mean over nodes and dimensions within each
    class, summed over classes. ``embedding`` (t, p) is f(x) of the training nodes, with
    gradient, ``rows`` their clients and classes. ``target`` (K, C, p) is P̄, a
    constant; classes without a ``present`` (K, C) prototype add nothing.
    """
    own = rows.client, rows.labels
    weight = present[own] / rows.class_counts(target.shape[1])[own]
    per_node = F.mse_loss(embedding, target[own], reduction="none").mean(dim=1)
    return rows.sum(weight * per_node)


def labelled_embeddings(
    model: RecordingBackbone, data: TrainingSet
) -> tuple[Tensor, Tensor]:
    """Return the last embeddings (n, p) of the training items, and their classes (n,)."""
    h, rows = Rows.of_one(data.index, data.labels).embedded(model)
    return h, rows.labels


class PrototypeClientApp(FglClientApp):
    """Base of the client halves that keep their model and exchange prototypes.

    All clients of one backbone start from the same weights, unless :meth:`starts_alone`.
    """

    down = Prototypes
    up = LocalPrototypes

    def starts_alone(self, client: Client) -> bool:
        """Return whether the initial weights are the client's own."""
        return False

    def download_spec(self, client: Client) -> tuple[int, int, int]:
        """Return (C, 1, p): at most one prototype of each class."""
        return client.data.num_classes, 1, client.config.hidden_channels

    def personal_model(self, client: Client, download: Prototypes) -> Backbone:
        """Return the model trained last, or the initial one before the first training."""
        return client.own_model(own_weights=self.starts_alone(client))


class FedProtoClientApp(GroupClientApp, PrototypeClientApp):
    """Pull the embeddings of each class towards its global prototype."""

    stacked = True

    def fit_group(self, group: Group, downloads: Sequence[Prototypes]) -> GroupFit:
        """Train, then average the embeddings by class, without dropout."""
        model = RecordingBackbone(group.build_own())
        losses = group.train(model, penalty=self.penalty(group, model, downloads))
        rows = group.rows
        counts = rows.class_counts(group.num_classes)
        means = class_means(
            rows.pick(model.at_rest(group.inputs)),
            rows.cells(group.num_classes),
            counts.numel(),
        )
        pairs = zip(
            means.view(*counts.shape, 1, -1).cpu(), counts[..., None].cpu(), strict=True
        )
        uploads = [LocalPrototypes(*pair) for pair in pairs]
        return GroupFit(model.backbone, uploads, losses)

    def penalty(
        self, group: Group, model: RecordingBackbone, downloads: Sequence[Prototypes]
    ) -> Callable[[], Tensor] | None:
        """Return the prototype terms, or ``None`` while there are no prototypes."""
        present = torch.stack([d.present[:, 0] for d in downloads]).to(group.device)
        if not present.any():
            return None
        target = torch.stack([d.values[:, 0] for d in downloads]).to(group.device)
        settings: FedProtoSettings | FedTGPSettings = group.config.method_config
        weight = settings.proto_weight

        def term() -> Tensor:
            embedding, now = group.rows.embedded(model)
            return weight * class_distance(embedding, now, target, present)

        return term
