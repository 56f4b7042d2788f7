"""Client half of FedSpray: a private network beside a shared encoder with proxies."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.algorithms.fedgen import mean_divergence
from flower_fgl.algorithms.fedspray import (
    PROXIES,
    NodeProxies,
    SprayEncoder,
    encoder_loss,
    node_proxies,
    reliable_nodes,
)
from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.fggp import TwoViews
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state, make_optimizer
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedspray import FedSpraySettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import LocalPrototypes
from flower_fgl.protocols.weights import ModelAndMeans

__all__ = ["FedSprayClientApp"]

Client = AnyClient[FedSpraySettings]


class FedSprayClientApp(FglClientApp):
    """Distil the encoder into the network, then the network into encoder and proxies.

    Notes
    -----
    1. The network never leaves the client. All clients of one backbone start from the
       same weights.
    2. Training nodes keep the proxies that they learned; other nodes get the mixture of
       the class proxies.
    3. The encoder's predictions are computed once a round, before the network trains.
    4. The published code starts κ_2 with κ_1's weights by mistake; here they differ.
    5. ``optimizer``, ``lr`` and ``weight-decay`` hold for the encoder too. Proxies train
       with Adam, ``weight-decay`` and a learning rate of their own, whatever ``optimizer``
       is. The encoder takes one step an epoch.
    """

    down = Weights
    up = ModelAndMeans

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the encoder's state."""
        key = ("fedspray", client.config.method_config.width)
        return client.cached(key, lambda: state_shapes(self.build_encoder(client)))

    def build_encoder(self, client: Client) -> SprayEncoder:
        """Build the encoder on the client's device; its weights are overwritten."""
        with seeded(0):
            encoder = SprayEncoder(
                client.data.graph.num_features,
                client.data.num_classes,
                client.config.method_config.width,
            )
        return client.settle(encoder)

    def personal_model(self, client: Client, download: Weights | None) -> Backbone:
        """Return the model trained last, or the initial one before the first training."""
        return client.own_model()

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train the network, then encoder and proxies."""
        settings, data = client.config.method_config, client.data.training
        encoder = self.build_encoder(client)
        load_state(encoder, download.tensors)
        proxies = NodeProxies(len(data.index), settings.width).to(client.device)
        load_state(proxies, client.state.group("proxies"))
        model = TwoViews(client.own_model())
        reliable, teacher = self.teach(client, encoder, proxies)

        def term() -> Tensor:
            weight: float = settings.distill_weight
            return weight * mean_divergence(model.logits[reliable], teacher)

        loss = client.train(model, server_round, penalty=term)
        with torch.no_grad():
            logits = model.eval()(data.inputs)
        self.learn(client, encoder, proxies, logits[data.index])
        client.state.set_group("proxies", proxies.state_dict())
        number = client.data.num_classes
        means = class_means(proxies.values.detach(), data.labels, number)
        counts = torch.bincount(data.labels, minlength=number)
        found = LocalPrototypes(means[:, None].cpu(), counts[:, None].cpu())
        state = {n: t for n, t in encoder.state_dict().items() if n != PROXIES}
        terms = {"reliable_nodes": float(len(reliable))}
        upload = ModelAndMeans(state, found)
        return Fit(model.backbone, upload, loss, terms=terms, logits=logits)

    @torch.no_grad()
    def teach(
        self, client: Client, encoder: SprayEncoder, proxies: NodeProxies
    ) -> tuple[Tensor, Tensor]:
        """Return the reliable nodes (m,), and κ_1's logits (m, C) for them."""
        data = client.data.training
        hidden = encoder.hidden(data.inputs)
        soft = encoder.alone(hidden).softmax(dim=1)
        confidence = client.config.method_config.confidence
        reliable = reliable_nodes(soft, data.index, confidence=confidence)
        mixed = node_proxies(soft, encoder.proxies, data.index, proxies.values)
        return reliable, encoder.with_proxy((hidden + mixed)[reliable])

    def learn(
        self,
        client: Client,
        encoder: SprayEncoder,
        proxies: NodeProxies,
        target: Tensor,
    ) -> None:
        """Train encoder, classifiers and node proxies for ``local-epochs`` steps."""
        config, data = client.config, client.data.training
        adam, rate = replace(config, optimizer="adam"), config.method_config.proxy_lr
        trained = [
            ("encoder-optimizer", encoder, make_optimizer(encoder, config)),
            ("proxy-optimizer", proxies, make_optimizer(proxies, adam, lr=rate)),
        ]
        for group, module, optimizer in trained:
            client.restore_moments(group, module, optimizer)
        for _ in range(config.local_epochs):
            for *_, optimizer in trained:
                optimizer.zero_grad(set_to_none=True)
            hidden = encoder.hidden(data.inputs)[data.index]
            loss = encoder_loss(
                encoder.alone(hidden),
                encoder.with_proxy(hidden + proxies.values),
                data.labels,
                target,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            for *_, optimizer in trained:
                optimizer.step()
        for group, module, optimizer in trained:
            client.keep_moments(group, module, optimizer)
