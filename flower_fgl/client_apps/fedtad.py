"""Client half of FedTAD: FedAvg, and the reliability of the client's classes."""

from collections.abc import Mapping

from torch import Tensor

from flower_fgl.algorithms.fedtad import class_reliability, node_features
from flower_fgl.client_apps.fedavg import DescribingClientApp
from flower_fgl.client_apps.runtime.client import Client
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

    up = ReliableWeights

    def describe(
        self, client: Client, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return κ, computed once for the client's graph."""
        data = client.data.training
        found = client.cached(
            ("fedtad-reliability",),
            lambda: class_reliability(
                node_features(data.inputs),
                data.inputs.edge_index.cpu(),
                data.index.cpu(),
                data.labels.cpu(),
                client.data.num_classes,
            ),
        )
        return {"reliability": found}, None
