"""Client half of FED-PUB: a private mask on the received weights.

Baek et al., "Personalized Subgraph Federated Learning", ICML 2023.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
w_i                    ``download.tensors``
ν_i                    ``MaskedBackbone.masks``, kept in the client's state
θ_i ⊙ ν_i              ``MaskedBackbone.effective``
o_i                    ``proxy_embedding``
λ_1, λ_2               ``fed-pub.l1``, ``fed-pub.l2``
=====================  ==================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flower_fgl.algorithms.fedpub import MaskedBackbone
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.methods.fedpub import FedPubSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedpub import EmbeddedWeights, proxy_graph

__all__ = ["FedPubClientApp", "mask_penalty"]

Client = AnyClient[FedPubSettings]

MASK = "mask"
"""Group of the client's state that holds the private masks."""


def mask_penalty(
    masks: Sequence[Tensor],
    weights: Sequence[Tensor],
    anchors: Sequence[Tensor],
    *,
    l1: float,
    l2: float,
) -> Tensor:
    """Compute λ_1‖ν‖_1 + λ_2‖θ − w‖_2, Baek et al. 2023, Eq. (6).

    ν and θ, ``weights``, have a gradient; ``anchors`` are w, the received weights, in
    the order of θ. The norms are over all entries together; the gradient of ‖θ − w‖_2
    is 0 at θ = w.
    """
    size = torch.stack([mask.abs().sum() for mask in masks]).sum()
    moved = [
        torch.linalg.vector_norm(theta - w)
        for theta, w in zip(weights, anchors, strict=True)
    ]
    distance: Tensor = torch.linalg.vector_norm(torch.stack(moved))
    return l1 * size + l2 * distance


class FedPubClientApp(FedAvgClientApp):
    """Train the received weights under a mask that never leaves the client.

    Notes
    -----
    1. The client uploads the weights θ_i, not θ_i ⊙ ν_i. Otherwise the mask would enter the
       average and be applied a second time to the next download.
    2. Both penalties have a gradient. The published code computes them from detached
       values, so that neither has an effect there. At the paper's λ_1 = 1e-3 the first now
       outweighs the data at most entries and Adam drives them to 0: try a smaller λ_1.
    3. The mask covers every parameter, biases included. Pruned entries are 0 in o_i and in
       the model that is evaluated and kept.
    """

    down = Weights
    up = EmbeddedWeights

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train weights and mask together, then embed the proxy graph."""
        method_config = client.config.method_config
        backbone = client.receive(download.tensors)
        masks = kept_masks(client, backbone)
        model = MaskedBackbone(backbone, masks, threshold=method_config.l1)
        weights = list(backbone.parameters())
        anchors = [weight.detach().clone() for weight in weights]
        penalty = partial(
            mask_penalty,
            list(model.masks),
            weights,
            anchors,
            l1=method_config.l1,
            l2=method_config.l2,
        )
        loss = client.train(model, server_round, penalty=penalty)
        keep_masks(client, backbone, model)
        personal = client.build_model()
        load_state(personal, model.eval().effective())
        upload = EmbeddedWeights(
            backbone.state_dict(), proxy_embedding(client, personal).cpu()
        )
        return Fit(personal, upload, loss)

    def received_model(self, client: Client, download: Weights) -> Backbone:
        """Return the received weights under the client's mask."""
        backbone = client.receive(download.tensors)
        threshold = client.config.method_config.l1
        masks = kept_masks(client, backbone)
        model = MaskedBackbone(backbone, masks, threshold=threshold).eval()
        load_state(backbone, model.effective())
        return backbone


def kept_masks(client: AnyClient, backbone: Backbone) -> list[Tensor]:
    """Return the client's masks in the order of the parameters; at first they are 1."""
    kept = client.state.group(MASK)
    return [
        kept[name].to(weight.device) if kept else torch.ones_like(weight)
        for name, weight in backbone.named_parameters()
    ]


def keep_masks(client: AnyClient, network: Backbone, model: MaskedBackbone) -> None:
    """Store the masks of a network's parameters in the client's state."""
    names = [name for name, _ in network.named_parameters()]
    found = {n: m.detach() for n, m in zip(names, model.masks, strict=True)}
    client.state.set_group(MASK, found)


@torch.no_grad()
def proxy_embedding(client: Client, model: Backbone) -> Tensor:
    """Return o_i (p,), the mean embedding of the proxy graph's nodes.

    The proxy graph is drawn once per client graph and seed.
    """
    seed, width = client.config.seed, client.data.graph.num_features
    proxy = client.cached(
        ("proxy", seed), lambda: GraphInput(*proxy_graph(seed, width)).to(client.device)
    )
    model.eval()
    return model.embed_nodes(proxy).mean(dim=0)
