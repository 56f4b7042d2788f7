"""Client half of FedTAD: FedAvg, and the reliability of the client's classes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flower_fgl.algorithms.fedtad import class_reliability, node_features
from flower_fgl.client_apps.fedavg import DescribingClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.nn import Backbone
from flower_fgl.protocols.weights import ReliableWeights

__all__ = ["FedTADClientApp"]


class FedTADClientApp(DescribingClientApp):
    """Train as in FedAvg; upload how alike the labelled nodes are to their neighbours.

    Notes
    -----
    1. The reliabilities are constant. They travel with every upload, 4·C bytes, so that
       the server needs them of no earlier round.
    2. The published code appends the numbers of the nodes that random walks visit, which
       depend on the numbering. Here the structure part is the probability of returning
       after 1 to 5 steps.
    """

    stacked = True
    up = ReliableWeights

    def describe(
        self, group: Group, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return κ, computed once for each client's graph."""
        return {"reliability": torch.stack(list(map(reliability, group.clients)))}, None


def reliability(client: Client) -> Tensor:
    """Return κ of a client, computed once."""
    data = client.data.training
    return client.cached(
        ("fedtad-reliability",),
        lambda: class_reliability(
            node_features(data.inputs),
            data.inputs.edge_index.cpu(),
            data.index.cpu(),
            data.labels.cpu(),
            client.data.num_classes,
        ),
    )
