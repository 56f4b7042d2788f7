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

from flower_fgl.algorithms.fedpub import MaskedBackbone, proxy_graph
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.methods.fedpub import FedPubSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.stacked import SharedInput
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import EmbeddedWeights

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
    is_stacked: bool = False,
) -> Tensor:
    """Compute λ_1‖ν‖_1 + λ_2‖θ − w‖_2, Baek et al. 2023, Eq. (6): (), or (K,).

    ν and θ, ``weights``, have a gradient; ``anchors`` are w, the received weights, in
    the order of θ. The norms are over all entries of a client together; those of K clients
    are (K, ...) if they are stacked. The gradient of ‖θ − w‖_2 is 0 at θ = w.
    """

    def own(tensor: Tensor) -> tuple[int, ...]:
        return tuple(range(int(is_stacked), tensor.dim()))

    size = torch.stack([mask.abs().sum(own(mask)) for mask in masks]).sum(0)
    moved = [
        torch.linalg.vector_norm(theta - w, dim=own(w))
        for theta, w in zip(weights, anchors, strict=True)
    ]
    distance: Tensor = torch.linalg.vector_norm(torch.stack(moved), dim=0)
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

    stacked = True
    fit = GroupClientApp.fit
    down = Weights
    up = EmbeddedWeights

    def stack_key(self, client: Client, download: Weights) -> bool:
        """Separate clients in their first round: their masks are 1."""
        return client.state.has_group(MASK)

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train weights and masks together, then embed the proxy graph."""
        settings: FedPubSettings = group.config.method_config
        network, number = group.receive(downloads, self.build), len(group)
        weights = dict(network.named_parameters())
        masks = {name: torch.ones_like(weight) for name, weight in weights.items()}
        if self.stack_key(group.clients[0], downloads[0]):
            kept = group.join(group.stored(MASK))
            masks = {name: mask.copy_(kept[name]) for name, mask in masks.items()}
        model = MaskedBackbone(network, list(masks.values()), threshold=settings.l1)
        penalty = partial(
            mask_penalty,
            list(model.masks),
            list(weights.values()),
            [weight.detach().clone() for weight in weights.values()],
            l1=settings.l1,
            l2=settings.l2,
            is_stacked=group.is_stacked,
        )
        losses = group.train(model, penalty=penalty)
        group.keep(MASK, dict(zip(weights, model.masks, strict=True)))
        sent = {name: t.clone() for name, t in network.state_dict().items()}
        load_state(network, model.eval().effective())
        proxies = proxy_embedding(group, network).cpu()
        uploads = [
            EmbeddedWeights(state, proxy)
            for state, proxy in zip(
                group.split(sent), proxies.view(number, -1), strict=True
            )
        ]
        records = partial(EmbeddedWeights.stacked_records, number, sent, proxies)
        return GroupFit(network, uploads, losses, records)

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


@torch.no_grad()
def proxy_embedding(group: Group, model: Backbone) -> Tensor:
    """Return o_i (K, p), of one client (p,), the mean embedding of the proxy graph's nodes.

    The proxy graph is drawn once per client graph, or stack of them, and seed.
    """
    client = group.clients[0]
    seed, width = client.config.seed, client.data.graph.num_features
    key = ("proxy", seed)
    if key not in group.memo:
        group.memo[key] = GraphInput(*proxy_graph(seed, width)).to(group.device)
    proxy: GraphInput = group.memo[key]
    model.eval()
    inputs = SharedInput(proxy) if group.is_stacked else proxy
    return model.embed_nodes(inputs).mean(dim=-2)
