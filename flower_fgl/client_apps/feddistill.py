"""Client half of FedDistill: exchange mean logits of classes instead of weights.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data", arXiv 1811.11479, 2018.

===========  ==========================================================
symbol       argument
===========  ==========================================================
z            ``logits``
z̄^c          ``target[c]``, mean logits of class c of all its owners
===========  ==========================================================
"""

from collections import deque

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedproto import PrototypeClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.feddistill import FedDistillSettings
from flower_fgl.nn.sparse import index_sum
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["FedDistillClientApp", "distillation_term"]


def distillation_term(
    logits: Tensor, labels: Tensor, target: Tensor, present: Tensor
) -> Tensor:
    """Compute the cross-entropy of softmax(z) with softmax(z̄^y), mean over nodes.

    z are ``logits`` (b, C), with gradient, of the classes ``labels`` (b,). ``target``
    (C, C) are mean logits by class, constants, and ``present`` (C,) the classes that
    have them; nodes of other classes add 0.
    """
    soft = (target.softmax(dim=1) * present[:, None])[labels]
    return -(soft * F.log_softmax(logits, dim=1)).sum(dim=1).mean()


Client = AnyClient[FedDistillSettings]


class FedDistillClientApp(PrototypeClientApp):
    """Pull the predictions of each class towards the mean logits of all its owners.

    Notes
    -----
    1. In its first round a client trains by the cross-entropy alone if there are no mean
       logits yet.
    2. The uploaded means are those of the last epoch's steps, with dropout, as the model
       changed from step to step.
    """

    def download_spec(self, client: Client) -> tuple[int, int, int]:
        """Return (C, 1, C): at most one vector of logits of each class."""
        classes = client.data.num_classes
        return classes, 1, classes

    def fit(self, client: Client, server_round: int, download: Prototypes) -> Fit:
        """Train, and average the logits of the last epoch by class."""
        model = self.personal_model(client, download)
        classes, size = client.data.num_classes, len(client.data.training.index)
        steps = -(-size // (client.config.batch_size or max(size, 1)))
        last: deque[tuple[Tensor, Tensor]] = deque(maxlen=max(steps, 1))
        target = download.values[:, 0].to(client.device)
        present = download.present[:, 0].to(client.device)
        weight = client.config.method_config.distill_weight
        has_target = bool(present.any())

        def data_loss(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            last.append((logits.detach(), labels))
            loss = F.cross_entropy(logits, labels)
            if has_target:
                loss = loss + weight * distillation_term(
                    logits, labels, target, present
                )
            return loss

        loss = client.train(model, server_round, data_loss=data_loss)
        total = torch.zeros(classes, classes, device=client.device)
        counts = torch.zeros(classes, dtype=torch.int64, device=client.device)
        for logits, labels in last:
            total += index_sum(logits, labels, classes)
            counts += torch.bincount(labels, minlength=classes)
        means = total / counts.clamp(min=1)[:, None]
        upload = LocalPrototypes(means[:, None].cpu(), counts[:, None].cpu())
        return Fit(model, upload, loss)
