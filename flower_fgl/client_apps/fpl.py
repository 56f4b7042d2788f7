"""Client half of FPL: FedAvg with two losses towards the clusters of all clients.

Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View",
CVPR 2023.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flower_fgl.algorithms.fpl import cluster_contrast, consistency, unbiased_prototypes
from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedproto import labelled_embeddings
from flower_fgl.client_apps.fggp import FGGPClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fpl import FPLSettings
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.fggp import ModelAndPrototypes
from flower_fgl.protocols.prototypes import Prototypes

__all__ = ["FPLClientApp"]

Client = AnyClient[FPLSettings]


class FPLClientApp(FGGPClientApp):
    """Pull the embeddings of each class to its clusters, away from other classes'.

    Notes
    -----
    1. The embeddings are the backbone's, those of FedProto and FGGP. The exchange is
       FGGP's: weights and class prototypes up, mean weights and clusters down.
    2. The paper trains with SGD, learning rate 0.01 and momentum 0.9. Here the optimizer
       is that of the run, as for all methods.
    3. Before there are clusters, in round 1, the cross-entropy is the only loss. A
       training node whose class has no cluster takes no part in the two other losses.
    4. The prototypes are means over training nodes, without dropout.
    5. Fine-tuning trains the cross-entropy alone, and starts with fresh moments of the
       optimizer.
    """

    def fit(  # type: ignore[override]  # the download holds the clusters too
        self, client: Client, server_round: int, download: ModelAndPrototypes
    ) -> Fit:
        """Train with both losses, then average the embeddings of each class."""
        model = RecordingBackbone(client.receive(download.tensors))
        term = self.towards_clusters(client, model, download.prototypes)
        loss = client.train(model, server_round, penalty=term)
        data, number = client.data.training, client.data.num_classes
        model.eval()
        with torch.no_grad():
            h = model.embed(data.inputs)
            logits = model.head(h, data.inputs)
        means = class_means(h[data.index], data.labels, number)
        present = torch.bincount(data.labels, minlength=number) > 0
        prototypes = Prototypes(means[:, None].cpu(), present[:, None].cpu())
        upload = ModelAndPrototypes(model.backbone.state_dict(), prototypes)
        return Fit(model.backbone, upload, loss, logits=logits)

    def towards_clusters(
        self, client: Client, model: RecordingBackbone, received: Prototypes
    ) -> Callable[[], Tensor] | None:
        """Return both weighted losses; ``None`` while no class of the client has any."""
        settings, data = client.config.method_config, client.data.training
        found = received.present.to(client.device)
        clusters = received.values.to(client.device)[found]
        classes = found.nonzero()[:, 0]
        has_any = found.any(dim=1)
        if not has_any[data.labels].any():
            return None
        mean = unbiased_prototypes(clusters, classes, len(found))

        def terms() -> Tensor:
            z, labels = labelled_embeddings(model, data)
            known = has_any[labels]
            z, labels = z[known], labels[known]
            if not len(labels):  # a batch of graphs of other classes
                return z.sum()
            near = cluster_contrast(z, labels, clusters, classes, tau=settings.tau)
            out: Tensor = (
                settings.contrast_weight * near
                + settings.consistency_weight * consistency(z, labels, mean)
            )
            return out

        return terms
