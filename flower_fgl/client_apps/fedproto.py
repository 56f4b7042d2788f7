"""Client half of FedProto and FedTGP: upload class means instead of weights.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import TrainingSet
from flower_fgl.methods.fedproto import FedProtoSettings
from flower_fgl.methods.fedtgp import FedTGPSettings
from flower_fgl.nn import Backbone
from flower_fgl.nn.embedding_recorder import RecordingBackbone
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["FedProtoClientApp", "PrototypeClientApp", "class_distance"]


def class_distance(
    embedding: Tensor, labels: Tensor, target: Tensor, present: Tensor
) -> Tensor:
    """Sum the mean squared distance of each class to its prototype, FedProto Eq. (7).

    ``Σ_c MSE(f(x_{y=c}), P̄^c)``.

    Parameters
    ----------
    embedding : Tensor of shape (n, p), float32
        f(x) of the training nodes, with gradient.
    labels : Tensor of shape (n,), int64
        Their classes.
    target : Tensor of shape (C, p), float32
        P̄, a constant.
    present : Tensor of shape (C,), bool
        Classes that have a prototype; the others add nothing.

    Returns
    -------
    Tensor of shape ()
        Mean over nodes and dimensions within each class, summed over classes.
    """
    count = torch.bincount(labels, minlength=len(target))
    weight = present[labels] / count[labels]
    per_node = F.mse_loss(embedding, target[labels], reduction="none").mean(dim=1)
    return (weight * per_node).sum()


def labelled_embeddings(
    model: RecordingBackbone, data: TrainingSet
) -> tuple[Tensor, Tensor]:
    """Return the last embeddings (n, p) of the training items, and their classes (n,)."""
    if model.items is None:
        return model.embedding[data.index], data.labels
    return model.embedding, data.labels[torch.searchsorted(data.index, model.items)]


class PrototypeClientApp(FglClientApp):
    """Base of the client halves that keep their model and exchange prototypes.

    Notes
    -----
    1. All clients of one backbone start from the same weights, unless
       :meth:`starts_alone` says otherwise.
    """

    down = Prototypes
    up = LocalPrototypes

    def num_hops(self, client: Client) -> int:
        """Return the number of prototypes per class."""
        return 1

    def starts_alone(self, client: Client) -> bool:
        """Return whether the initial weights are the client's own."""
        return False

    def download_spec(self, client: Client) -> tuple[int, int, int]:
        """Return (C, H, p): at most one prototype of each class and hop."""
        classes = client.data.num_classes
        return classes, self.num_hops(client), client.config.hidden_channels

    def personal_model(self, client: Client, download: Prototypes) -> Backbone:
        """Return the model trained last, or the initial one before the first training."""
        own = super().personal_model(client, download)
        if own is not None:
            return own
        return client.build_model(
            initialise=True, own_weights=self.starts_alone(client)
        )


class FedProtoClientApp(PrototypeClientApp):
    """Pull the embeddings of each class towards its global prototype.

    Notes
    -----
    1. The trained model computes the prototypes without dropout.
    """

    stacked = "flower_fgl.client_apps.stacked.prototypes:StackedFedProto"

    def fit(self, client: Client, server_round: int, download: Prototypes) -> Fit:
        """Train, then average the embeddings of the training nodes by class."""
        model = RecordingBackbone(self.personal_model(client, download))
        penalty = self.penalty(client, model, download)
        loss = client.train(model, server_round, penalty=penalty)
        data = client.data.training
        model.eval()
        with torch.no_grad():
            embedding = model.embed(data.inputs)[data.index]
        classes = client.data.num_classes
        means = class_means(embedding, data.labels, classes)
        counts = torch.bincount(data.labels, minlength=classes)
        upload = LocalPrototypes(means[:, None].cpu(), counts[:, None].cpu())
        return Fit(model.backbone, upload, loss)

    def penalty(
        self, client: Client, model: RecordingBackbone, download: Prototypes
    ) -> Callable[[], Tensor] | None:
        """Return the prototype term, or ``None`` while there are no prototypes."""
        if not download.present.any():
            return None
        data = client.data.training
        target = download.values[:, 0].to(client.device)
        present = download.present[:, 0].to(client.device)
        settings: FedProtoSettings | FedTGPSettings = client.config.method_config
        weight = settings.proto_weight
        return lambda: (
            weight * class_distance(*labelled_embeddings(model, data), target, present)
        )
