"""Client half of FedGen: FedAvg with two terms on generated embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedgen import (
    LatentGenerator,
    generator_shapes,
    mean_divergence,
)
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import DataLoss, load_state
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedgen import FedGenSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import GeneratorDownload

__all__ = ["FedGenClientApp"]

Client = AnyClient[FedGenSettings]


class FedGenClientApp(FedAvgClientApp):
    """Train the head on generated embeddings too, and predictions towards theirs.

    Notes
    -----
    1. In round 1 the generator knows nothing, and a client trains by the cross-entropy
       alone.
    2. The generator runs in evaluation mode on the clients.
    """

    down = GeneratorDownload
    up = Weights

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the weights and of the generator, and C."""
        classes, settings = client.data.num_classes, client.config.method_config
        generator = generator_shapes(
            classes,
            client.build_model().hidden_channels,
            settings.noise_channels,
            settings.generator_channels,
        )
        return client.state_shapes(), generator, classes

    def fit(  # type: ignore[override]  # the download holds the generator too
        self, client: Client, server_round: int, download: GeneratorDownload
    ) -> Fit:
        """Train for ``local-epochs`` from the received weights."""
        model = client.receive(download.tensors)
        data_loss = None
        if download.classes.any():
            data_loss = self.generated_loss(client, model, server_round, download)
        loss = client.train(model, server_round, data_loss=data_loss)
        return Fit(model, Weights(model.state_dict()), loss)

    def generated_loss(
        self,
        client: Client,
        model: Backbone,
        server_round: int,
        download: GeneratorDownload,
    ) -> DataLoss:
        """Return the cross-entropy plus both terms, Eq. (5) and the published code."""
        settings, device = client.config.method_config, client.device
        with seeded(0):  # its weights are overwritten
            generator = LatentGenerator(
                client.data.num_classes,
                model.hidden_channels,
                noise_channels=settings.noise_channels,
                hidden_channels=settings.generator_channels,
            )
        load_state(generator, download.generator)
        generator.to(device).eval()
        draw = client.generator(server_round, "generated")
        fall = float(settings.decay**server_round)
        graphs: dict[int, GraphInput] = {}

        def predict(labels: Tensor) -> Tensor:
            """Return the head's logits of generated embeddings of some classes."""
            size = len(labels)
            if size not in graphs:
                edges = torch.zeros(2, 0, dtype=torch.int64, device=device)
                graphs[size] = GraphInput(torch.zeros(size, 1, device=device), edges)
            noise = torch.randn(size, settings.noise_channels, generator=draw)
            with torch.no_grad():
                made = generator(labels, noise.to(device))
            logits: Tensor = model.head(made, graphs[size])
            return logits

        def loss(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            drawn = torch.multinomial(
                download.classes, settings.generated, replacement=True, generator=draw
            ).to(device)
            taught = F.cross_entropy(predict(drawn), drawn)
            with torch.no_grad():
                generated = predict(labels)
            near = mean_divergence(logits, generated)
            extra: Tensor = settings.label_weight * taught
            extra = extra + settings.latent_weight * near
            return F.cross_entropy(logits, labels) + fall * extra

        return loss
