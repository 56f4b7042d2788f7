"""Server half of ADPFedGNN: average the weights that the clients' masks share.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
θ^global               ``ADPFedGNN.shared.weights``
θ_μ, θ_σ, θ_q          ``ADPFedGNN.shared.networks``
M^g_i, θ_i, n_i        ``MaskedWeights.mask``, ``.values``, ``.weight``
=====================  ==================================================
"""

from collections.abc import Mapping

import torch

from flower_fgl.algorithms.adpfedgnn.masks import masked_mean
from flower_fgl.algorithms.adpfedgnn.network import (
    build_backbone,
    build_networks,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import state_shapes
from flower_fgl.nn.state import state_to_vector, vector_to_state
from flower_fgl.protocols.adpfedgnn import MaskedWeights, SharedWeights, Sizes
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.fedavg import common_model

__all__ = ["ADPFedGNN"]


class ADPFedGNN(FglStrategy):
    """Average each weight over the clients whose masks share it, Eq. (14).

    Notes
    -----
    1. All clients are evaluated after the aggregation with the newest global model,
       Eq. (15) on a copy: the method's default is ``eval-policy = "refresh"``.
    2. The algorithm's last line also masks θ_μ, θ_σ and θ_q, but the paper defines no
       masks for them. The server takes their weighted mean without masks.
    """

    config: RunConfig[ADPFedGNNSettings]
    down = SharedWeights
    up = MaskedWeights
    scores_uploads = False
    kept = ("shared",)

    def prepare(self) -> None:
        """Draw the initial weights; all clients need the same backbone."""
        federation = self.federation
        model = common_model(self.config, federation)
        backbone = build_backbone(
            self.config,
            model,
            num_features=federation.num_features,
            num_outputs=federation.target.width,
        )
        networks = build_networks(
            self.config, federation.num_features, backbone.hidden_channels
        )
        self.sizes = Sizes(state_shapes(backbone), state_shapes(networks))
        self.shared = SharedWeights(
            dict(backbone.state_dict()),
            dict(networks.state_dict()),
        )

    def download(self, server_round: int, partition_id: int) -> SharedWeights:
        """Return all global weights."""
        return self.shared

    def upload_spec(self, partition_id: int) -> Sizes:
        """Return the shapes of the weights and the networks, and the client's weight."""
        return self.sizes._replace(weight=self.messenger.weight_of(partition_id))

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Take the masked mean of the weights and the weighted mean of the networks."""
        payloads = [upload.payload for upload in uploads.values()]
        weights = [upload.num_examples for upload in uploads.values()]
        mean = masked_mean(
            state_to_vector(self.shared.weights),
            torch.stack([payload.values for payload in payloads]),
            torch.stack([payload.mask for payload in payloads]),
            torch.tensor(weights, dtype=torch.float64),
            is_literal=self.config.method_config.masked_agg == "literal",
        )
        self.shared = SharedWeights(
            vector_to_state(mean, self.sizes.weights),
            weighted_mean([payload.networks for payload in payloads], weights),
        )
