"""Server half of FedLIT: match the clients' types of edges, then average each type."""

from collections.abc import Mapping
from typing import Any

import torch

from flower_fgl.algorithms import fedlit
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import TypedWeights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedLIT"]


class FedLIT(FedAvg):
    """Average the shared layers as FedAvg does, and each type over the clients' own.

    Notes
    -----
    1. Each client receives the types in its own order. In the published code all clients
       get them in the order of the last one.
    2. A client without an upload keeps its order, and its last centroids do not count. One
       that never uploaded receives the server's order.
    3. The centres of round 1 are the centroids of the lowest partition-id that has edges.
    """

    down = Weights
    up = TypedWeights
    kept = ("groups",)
    averages_network = True

    def prepare(self) -> None:
        """Build the initial model; no client has an order of its own yet."""
        super().prepare()
        self.groups: dict[int, list[int]] = {}

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Return the weights and centres, with the types in the client's order."""
        order = self.groups.get(partition_id)
        if order is None:
            return self.weights
        return Weights(fedlit.in_order(self.weights.tensors, order))

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and centroids, and the client's edges."""
        return self.shapes, self.federation.clients[partition_id].num_edges

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Match the types, and average."""
        before = self.weights.tensors
        found = {pid: uploads[pid].payload for pid in sorted(uploads)}
        centres = before[fedlit.CENTROIDS]
        if not centres.any():
            known = [p for p in found.values() if p.sizes.any()]
            centres = known[0].tensors[fedlit.CENTROIDS] if known else centres
        states, sizes, groups = [], [], {}
        for pid, payload in found.items():
            own, edges = payload.tensors[fedlit.CENTROIDS], payload.sizes
            groups[pid] = fedlit.match_types(own, edges[:, 0] > 0, centres)
            # the place of each centre among the client's types
            back = sorted(range(len(centres)), key=groups[pid].__getitem__)
            states.append(fedlit.in_order(payload.tensors, back))
            sizes.append(edges[back])
        kept = {**before, fedlit.CENTROIDS: centres}
        types = fedlit.average_types(states, torch.stack(sizes), kept)
        shared = [
            {
                n: t
                for n, t in state.items()
                if not n.startswith((fedlit.CHANNEL, fedlit.CENTROIDS))
            }
            for state in states
        ]
        weights = [uploads[pid].num_examples for pid in found]
        mean = weighted_mean(shared, weights) | types
        self.weights = Weights({name: mean[name] for name in self.shapes})
        self.groups = {**self.groups, **groups}
        used = torch.stack(sizes)[:, :, 0] > 0
        self.log(types=float(used.sum(dim=1).float().mean()))
