"""Client half of FedNH: train the body under a fixed head of unit prototypes."""

import torch

from flower_fgl.algorithms import fednh
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import LocalPrototypes
from flower_fgl.protocols.weights import ModelAndMeans

__all__ = ["FedNHClientApp"]


class FedNHClientApp(FedAvgClientApp):
    """Train body and scale; upload them with the mean direction of each class.

    Notes
    -----
    1. All layers of the backbone belong to the body, and their linear output is compared
       with the prototypes. A backbone whose last layer is the classifier, such as GCN,
       therefore has one wider layer than in FedAvg.
    2. The means are taken without dropout.
    """

    up = ModelAndMeans

    def build(self, client: Client) -> fednh.FedNHNet:
        """Build FedNH's network."""
        return client.build_own(fednh.FedNHNet)

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train from the received weights, then average each class's embeddings."""
        model = client.receive(download.tensors, self.build)
        loss = client.train(model, server_round)
        data, classes = client.data.training, client.data.num_classes
        model.eval()
        with torch.no_grad():
            h = model.embed(data.inputs)
            logits = model.head(h, data.inputs)
        means = fednh.unit_class_means(h[data.index], data.labels, classes)
        counts = torch.bincount(data.labels, minlength=classes)
        state = {n: t for n, t in model.state_dict().items() if n != fednh.PROTOTYPES}
        found = LocalPrototypes(means[:, None].cpu(), counts[:, None].cpu())
        upload = ModelAndMeans(state, found)
        return Fit(model, upload, loss, logits=logits)
