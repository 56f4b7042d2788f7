"""Client half of FedGen: FedAvg with two terms on generated embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.fedgen import (
    LatentGenerator,
    divergence_terms,
    generator_shapes,
)
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    Rows,
    RowsLoss,
    cross_entropy,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedgen import FedGenSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.stacked import Ragged, StackedInput
from flower_fgl.protocols.base import Shapes
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

    stacked = True
    fit = GroupClientApp.fit
    down = GeneratorDownload
    up = Weights

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the weights and of the generator, and C."""
        classes, settings = client.data.num_classes, client.config.method_config

        def spec() -> tuple[Shapes, Shapes, int]:
            generator = generator_shapes(
                classes,
                client.build_model().hidden_channels,
                settings.noise_channels,
                settings.generator_channels,
            )
            return client.state_shapes(), generator, classes

        return client.cached(("fedgen spec", client.model_name, settings), spec)

    def data_losses(
        self,
        group: Group,
        model: Backbone,
        downloads: Sequence[GeneratorDownload],  # type: ignore[override]
    ) -> RowsLoss | None:
        """Return the cross-entropy plus both terms, Eq. (5) and the published code.

        All clients received one generator and one distribution of classes.
        """
        settings: FedGenSettings = group.config.method_config
        device, number, size = group.device, len(group), settings.generated
        download = downloads[0]
        if not download.classes.any():
            return None
        with seeded(0):  # its weights are overwritten
            generator = LatentGenerator(
                group.num_classes,
                model.hidden_channels,
                noise_channels=settings.noise_channels,
                hidden_channels=settings.generator_channels,
            )
        load_state(generator, download.generator)
        generator.to(device).eval()
        draws = group.generators("generated")
        assert group.server_round is not None
        fall = float(settings.decay**group.server_round)
        graphs: dict[int, GraphInput] = {}

        def without_edges(size: int) -> GraphInput:
            if size not in graphs:
                edges = torch.zeros(2, 0, dtype=torch.int64, device=device)
                graph = GraphInput(torch.zeros(size, 1, device=device), edges)
                is_one = not group.is_stacked
                graphs[size] = graph if is_one else StackedInput([graph] * number)
            return graphs[size]

        def predict(
            labels: Tensor, noise: Sequence[Tensor], counts: Sequence[int]
        ) -> Tensor:
            """Return the heads' logits (b, C) of generated embeddings, client by client."""
            with torch.no_grad():
                made = generator(labels, torch.cat(list(noise)).to(device))
            if not group.is_stacked:
                return model.head(made, without_edges(len(made)))
            padded = Ragged(counts, device)
            graph = without_edges(padded.index.shape[1])
            return model.head(made[padded.index], graph).flatten(0, 1)[padded.slots]

        def loss(logits: Tensor, rows: Rows) -> Tensor:
            drawn, noise, more, counts = [], [], [], rows.count.tolist()
            for draw, count in zip(draws, counts, strict=True):
                drawn.append(
                    torch.multinomial(
                        download.classes, size, replacement=True, generator=draw
                    )
                )
                width = settings.noise_channels
                noise.append(torch.randn(size, width, generator=draw))
                more.append(torch.randn(count, width, generator=draw))
            classes = torch.cat(drawn).to(device)
            taught = cross_entropy(predict(classes, noise, [size] * number), classes)
            with torch.no_grad():
                generated = predict(rows.labels, more, counts)
            near = rows.mean(divergence_terms(logits, generated).sum(dim=1))
            extra = settings.label_weight * taught.view(number, size).mean(dim=1)
            extra = extra + settings.latent_weight * near
            entropy = rows.mean(cross_entropy(logits, rows.labels))
            return entropy + fall * extra

        return loss
