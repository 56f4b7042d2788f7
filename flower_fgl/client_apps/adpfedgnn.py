"""Client half of ADPFedGNN: two masked branches over neighbours chosen by an agent.

Guan et al., "ADPFedGNN: Adaptive Decoupling Personalized Federated Graph Neural
Network", IJCAI 2025.

===============================  ==================================================
symbol                           argument or attribute
===============================  ==================================================
θ_i                              ``TwoBranchNet.backbone``
M^g_i, M^l_i                     ``TwoBranchNet.global_mask``, ``.local_mask``
θ_μ, θ_σ                         ``networks["estimator"]``
θ_q                              ``networks["agent"]``
N(v, b)                          ``kept[b]`` of the candidates of a ``Block``
D                                ``ReplayBuffer``
R                                ``NeighbourAgent.history``
Δ                                download minus ``state.group("received")``
===============================  ==================================================

===============================================  ===========================
Algorithm 1, client                              function
===============================================  ===========================
Eq. (15)                                         ``personalise``
sample a two-layer block                         ``sample_block``
actions by Eq. (2)                               ``NeighbourAgent.choose``
train by Eq. (13)                                ``LocalTraining.descend``
reward by Eq. (3), learn from the buffer         ``NeighbourAgent.learn``
new masks                                        ``local_mask``, ``global_mask``
===============================================  ===========================
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import nn

from flower_fgl.algorithms.adpfedgnn.dqn import QNetwork
from flower_fgl.algorithms.adpfedgnn.masks import (
    global_mask,
    local_mask,
    per_tensor,
    personalise,
)
from flower_fgl.algorithms.adpfedgnn.network import (
    TwoBranchNet,
    build_backbone,
    build_networks,
    two_branches,
)
from flower_fgl.client_apps.adpfedgnn_training import LocalTraining
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.nn.state import state_to_vector
from flower_fgl.protocols.adpfedgnn import MaskedWeights, SharedWeights, Sizes

__all__ = ["ADPFedGNNClientApp"]

Client = AnyClient[ADPFedGNNSettings]


class ADPFedGNNClientApp(FglClientApp):
    """Train both branches, upload the weights under the global mask, keep the rest.

    Notes
    -----
    1. Masks are all ones until a client has received two global models: the paper does not
       describe rounds without a global direction Δ. A client that has not trained yet
       starts from the global weights; a local mask of ones would discard them.
    2. Mask scores use gradients with respect to the effective weights θ ⊙ M. With respect
       to θ, a masked-out weight would have no gradient and would stay masked out.
    3. The paper does not say whether the two masks may overlap. By default the local mask
       excludes the weights of the global mask (``adpfedgnn.overlap``). The shares of
       weights in both and in no mask are logged.
    4. The paper does not say which neighbours a prediction uses. Training draws actions by
       Eq. (2), so a prediction weights each neighbour by its probability. Taking the better
       action alone would drop whole neighbourhoods because of differences that are noise.
    """

    down = SharedWeights
    up = MaskedWeights

    def download_spec(self, client: Client) -> Sizes:
        """Return the shapes of the weights of backbone, agent and estimator."""

        def sizes() -> Sizes:
            backbone = backbone_of(client)
            networks = networks_of(client, backbone.hidden_channels)
            return Sizes(state_shapes(backbone), state_shapes(networks))

        return client.cached(("adpfedgnn", "sizes"), sizes)

    def fit(self, client: Client, server_round: int, download: SharedWeights) -> Fit:
        """Apply Eq. (15), train by Eq. (13), update the masks, return shared weights."""
        net, networks = open_networks(client, download)
        training = LocalTraining(client, server_round, net, networks)
        loss = training.train()
        with training.timed("masks"):
            self.refresh_masks(client, net, download, training)
        training.keep()
        upload = MaskedWeights(
            net.weights().cpu() * net.global_mask.cpu(),
            net.global_mask.cpu(),
            {name: t.detach().cpu() for name, t in networks.state_dict().items()},
            int(client.weight),
        )
        return Fit(net, upload, loss, training.seconds, training.numbers())

    def refresh_masks(
        self,
        client: Client,
        net: TwoBranchNet,
        download: SharedWeights,
        training: LocalTraining,
    ) -> None:
        """Compute both masks from the gradients of the round and Δ."""
        method_config = client.config.method_config
        if not method_config.decouple:
            return
        received = state_to_vector(download.weights)
        before = client.state.group("received")
        client.state.set_group("received", {"weights": received})
        if not before:
            return
        of_global, of_local = training.gradients
        direction = (received - before["weights"]).to(client.device)
        net.global_mask = per_tensor(
            partial(global_mask, share=method_config.q, score=method_config.mask_score),
            net.shapes,
            of_global,
            direction,
        )
        taken = [net.global_mask] if method_config.overlap == "excluded" else []
        net.local_mask = per_tensor(
            partial(local_mask, share=method_config.q), net.shapes, of_local, *taken
        )

    def personal_model(
        self, client: Client, download: SharedWeights | None
    ) -> Backbone | None:
        """Return the model trained last, combined with the download by Eq. (15)."""
        if download is None and not client.state.group("model"):
            return None
        return open_networks(client, download)[0]

    def refreshed_model(
        self, client: Client, server_round: int, download: SharedWeights
    ) -> Backbone | None:
        """Apply Eq. (15) with the newest global model, without training."""
        return self.personal_model(client, download)


def backbone_of(client: Client) -> Backbone:
    """Build the client's backbone with the initial weights of the run."""
    graph = client.data.graph
    return build_backbone(
        client.config,
        client.model_name,
        num_features=graph.num_features,
        num_classes=graph.num_classes,
    )


def networks_of(client: Client, width: int) -> nn.ModuleDict:
    """Build agent and estimator for embeddings of the given width."""
    return build_networks(client.config, client.data.graph.num_features, width)


def open_networks(
    client: Client, download: SharedWeights | None
) -> tuple[TwoBranchNet, nn.ModuleDict]:
    """Return the client's network, and its agent and estimator, updated by a download."""
    method_config = client.config.method_config
    backbone = backbone_of(client)
    networks = networks_of(client, backbone.hidden_channels).to(client.device)
    agent = cast(QNetwork, networks["agent"]) if method_config.has_agent else None
    seed = client.seed(0, "evaluation")
    net = two_branches(method_config, backbone, agent, seed).to(client.device)
    saved = client.state.group("model")
    load_state(net, saved)
    if download is not None:
        load_state(networks, download.networks)
        weights = state_to_vector(download.weights).to(client.device)
        # without own weights or decoupling, the download replaces all weights
        if saved and method_config.decouple:
            weights = personalise(net.weights(), weights, net.local_mask)
        net.load_weights(weights)
    return net, networks
