"""Client half of pFedFSL: learn an embedding, and evaluate models of other clients.

Zhao et al., "Personalized Federated Few-Shot Learning", IEEE TNNLS 2024.
"""

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.nearest_mean import NearestMean, held_out_loss
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.methods.pfedfsl import PFedFSLSettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.weights import CandidateModels, ScoredModel

__all__ = ["PFedFSLClientApp"]

Client = AnyClient[PFedFSLSettings]


WORST = 100.0
"""Loss of a model with no finite embeddings; any other loss is at most 20 + log C."""


class PFedFSLClientApp(FglClientApp):
    """Train by distances to class means; evaluate the candidates on the training nodes.

    Notes
    -----
    1. The embedding network is the backbone with p = ``hidden-channels`` outputs instead of
       C. It has the depth set in the experiment, and the same shape whatever classes a
       client has.
    2. The loss is the cross-entropy of −‖h_u − μ_c‖ / 0.1 over the client's own classes,
       with h of unit length. It pulls nodes towards the mean of their class and away from
       the others. With only one class it is 0.
    3. Candidates and the trained model are evaluated without dropout on the client's few
       training nodes; validation nodes are not used. Every node is once the query, and the
       other nodes of its class are the support. A node that is part of its class mean is
       close to it in every model, and the mixing weights are then almost equal.
    4. A candidate whose embeddings are not finite gets the loss ``WORST``, so that it has
       no weight in the mixture.
    """

    down = CandidateModels
    up = ScoredModel

    def download_spec(self, client: Client) -> tuple[Shapes, int]:
        """Return the shapes of the client's start and the maximum number of candidates."""
        shapes = state_shapes(self.build(client).network)
        return shapes, int(client.config.method_config.candidates)

    def build(self, client: Client) -> NearestMean:
        """Build the client's model; its weights are to be overwritten."""
        data = client.data.training
        network = client.build_model(num_outputs=client.config.hidden_channels)
        return NearestMean(
            network,
            data.inputs,
            data.index,
            data.labels,
            client.data.num_classes,
            data.part_for(network),
        )

    def fit(self, client: Client, server_round: int, download: CandidateModels) -> Fit:
        """Evaluate the candidates, train from the client's start, evaluate the result."""
        model = self.build(client)
        losses = []
        for number in range(1, 1 + download.num_candidates):
            load_state(model.network, download.model(number))
            losses.append(loss_of(client, model))
        load_state(model.network, download.model(0))
        loss = client.train(model, server_round)
        scored = torch.stack([loss_of(client, model), *losses])
        return Fit(model, ScoredModel(model.network.state_dict(), scored), loss)

    def first_model(
        self, client: Client, download: CandidateModels | None
    ) -> Backbone | None:
        """Return the client's start."""
        if download is None:
            return None
        model = self.build(client)
        load_state(model.network, download.model(0))
        return model


@torch.no_grad()
def loss_of(client: Client, model: NearestMean) -> Tensor:
    """Return the loss () of a model on the client's training nodes, each held out once."""
    model.eval()
    labels = client.data.training.labels
    loss = held_out_loss(model.embed_training(), labels, client.data.num_classes)
    return loss.nan_to_num(nan=WORST, posinf=WORST)
