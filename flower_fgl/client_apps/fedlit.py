"""Client half of FedLIT: cluster the edges into types and train a channel for each."""

from typing import cast

import torch
from torch import Tensor

from flower_fgl.algorithms import fedlit
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import TypedWeights

__all__ = ["FedLITClientApp"]


class FedLITClientApp(FedAvgClientApp):
    """Train by the cross-entropy; upload weights, centroids and sizes of the types.

    Notes
    -----
    1. Without received centroids, in round 1, the client clusters its edges by k-means++.
       Later it starts from the received ones, also if it joins late.
    2. Of a type with fewer edges than ``min-class-count``, or none, the upload has a
       centroid of zeros, the received weights of its channel, and the size 0.
    """

    up = TypedWeights

    def build(self, client: Client) -> fedlit.FedLITNet:
        """Build FedLIT's network."""
        return client.build_own(fedlit.FedLITNet)

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train from the received weights and centroids."""
        model = cast(fedlit.FedLITNet, client.receive(download.tensors, self.build))
        if not bool(model.centroids.any()):
            drawn = client.generator(server_round, "types")
            model.start_types(client.data.training.inputs, drawn)
        loss = client.train(model, server_round)
        return Fit(model, self.upload(client, model, download), loss)

    def upload(
        self, client: Client, model: fedlit.FedLITNet, download: Weights
    ) -> TypedWeights:
        """Return what leaves the client."""
        sizes = self.sizes(client, model)
        state = {name: t.cpu() for name, t in state_of(model).items()}
        for m, edges in enumerate(sizes[:, 0].tolist()):
            if not edges:
                state[fedlit.CENTROIDS][m] = 0.0
                start = f"{fedlit.CHANNEL}{m}."
                received = download.tensors.items()
                state |= {n: t for n, t in received if n.startswith(start)}
        return TypedWeights(state, sizes)

    def sizes(self, client: Client, model: fedlit.FedLITNet) -> Tensor:
        """Return the sizes (M, 2) of :class:`TypedWeights`, 0 where withheld."""
        training, count = client.data.training, len(model.centroids)
        types = model.assigned
        if types is None:  # no epoch: nothing was learned
            return torch.zeros(count, 2, dtype=torch.int32)
        graph = training.inputs
        trains = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.device)
        trains[training.index] = True
        is_near = trains[fedlit.undirected(graph.edge_index)].any(dim=0)
        edges = torch.bincount(types, minlength=count)
        near = torch.bincount(types[is_near], minlength=count)
        is_kept = edges >= max(1, client.config.min_class_count)
        sizes = torch.stack([edges, near.clamp(max=1)], dim=1) * is_kept[:, None]
        return sizes.cpu().to(torch.int32)
