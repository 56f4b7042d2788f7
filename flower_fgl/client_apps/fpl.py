"""Client half of FPL: FedAvg with two losses towards the clusters of all clients.

Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View",
CVPR 2023.

===========  ==========================================================
symbol       argument
===========  ==========================================================
z_i          ``embedding``
P^k          rows of ``clusters`` of class k
U^k          ``unbiased``, :func:`class_means` of the clusters, Eq. (9)
τ            ``tau``
===========  ==========================================================
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedproto import labelled_embeddings
from flower_fgl.client_apps.fggp import FGGPClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fpl import FPLSettings
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.prototypes import Prototypes
from flower_fgl.protocols.weights import ModelAndPrototypes

__all__ = ["FPLClientApp", "cluster_contrast", "consistency"]


def cluster_contrast(
    embedding: Tensor, labels: Tensor, clusters: Tensor, classes: Tensor, *, tau: float
) -> Tensor:
    """Compute the cluster prototype contrast, Huang et al. 2023, Eq. (8).

    ``mean_i −log( Σ_{P of the own class} e^{cos(z_i, P)/τ} / Σ_P e^{cos(z_i, P)/τ} )``,
    at least 0; 0 if all clusters are of one class. z is ``embedding`` (n, p), with
    gradient; each class of ``labels`` (n,) has at least one cluster. P are ``clusters``
    (Q, p), constants, of the ``classes`` (Q,).
    """
    similarity = F.normalize(embedding, dim=1) @ F.normalize(clusters, dim=1).T / tau
    others = labels[:, None] != classes
    own = similarity.masked_fill(others, -torch.inf)
    return (similarity.logsumexp(dim=1) - own.logsumexp(dim=1)).mean()


def consistency(embedding: Tensor, labels: Tensor, unbiased: Tensor) -> Tensor:
    """Compute the distance to the unbiased prototypes, Huang et al. 2023, Eq. (10).

    The mean of the squared differences over nodes and dimensions, with ``embedding`` and
    ``labels`` as in :func:`cluster_contrast`, and U, ``unbiased`` (C, p), constants.
    """
    return F.mse_loss(embedding, unbiased[labels])


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
        mean = class_means(clusters, classes, len(found))  # Eq. (9)

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
