"""Server half of FedGen: FedAvg, and a generator that the clients' heads teach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms import fedgen
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.methods.fedgen import FedGenSettings
from flower_fgl.nn import GraphInput, optimizers
from flower_fgl.nn.stacked import Ensemble
from flower_fgl.protocols.weights import GeneratorDownload
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, draw_model

__all__ = ["FedGen"]

WEIGHT_DECAY = 0.01
"""Weight decay of the generator, as in the published code."""


class FedGen(FedAvg):
    """Average weights, and train a generator of embeddings on the clients' heads.

    Notes
    -----
    1. A generated embedding is a node without edges: a head that propagates reads it
       alone.
    2. Classes are drawn by the clients' numbers of training nodes. If the clients do not
       share these (``share-class-counts``), all classes are drawn equally often and all
       heads count equally. The clients draw by the numbers of all clients, the server by
       those of the round's clients, since a class that none of them has would weigh 0.
    3. Until the generator has been trained, the download tells the clients not to use it.
    """

    config: RunConfig[FedGenSettings]
    down = GeneratorDownload
    kept = ("generator",)

    def prepare(self) -> None:
        """Build the initial model and generator."""
        super().prepare()
        config, settings = self.config, self.config.method_config
        with seeded(derive_seed(config.seed, 0, SERVER, "generator")):
            self.network = draw_model(config, self.federation).eval()
            self.generator = fedgen.LatentGenerator(
                self.federation.num_classes,
                self.network.hidden_channels,
                noise_channels=settings.noise_channels,
                hidden_channels=settings.generator_channels,
            )
        self.network.requires_grad_(requires_grad=False)
        self.optimizer = optimizers.Adam(
            self.generator.parameters(),
            lr=settings.server_lr,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.optimizers = {"generator": self.optimizer}
        self.restored()

    def counts(self, partition_ids: list[int]) -> Tensor:
        """Return the training nodes (K, C) by class; ones if they are not shared."""
        clients = self.federation.clients
        known = [clients[pid].class_counts for pid in partition_ids]
        if all(known):
            found = torch.tensor(known, dtype=torch.float32)
            if found.any():
                return found
        return torch.ones(len(partition_ids), self.federation.num_classes)

    def restored(self) -> None:
        """Make the download of the next round."""
        total = self.counts(list(self.federation.clients)).sum(dim=0)
        if not self.optimizer.state:  # the generator has not been trained
            total = torch.zeros_like(total)
        state = {name: t.clone() for name, t in self.generator.sent_state().items()}
        classes = total / total.sum().clamp(min=1)
        self.sent = GeneratorDownload(self.weights.tensors, state, classes)

    def download(self, server_round: int, partition_id: int) -> Any:
        """Return the weights and the generator."""
        return self.sent

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the weights and train the generator."""
        super().aggregate(server_round, uploads)
        states = {pid: upload.payload.tensors for pid, upload in uploads.items()}
        self.train_generator(server_round, states)
        self.restored()

    def train_generator(
        self, server_round: int, states: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        """Minimise the ensemble's loss and the diversity loss, Eq. (4)."""
        settings = self.config.method_config
        clients = Ensemble(self.network, list(states.values()))
        counts = self.counts(list(states))
        weights, total = fedgen.class_shares(counts), counts.sum(dim=0)
        draw = torch_generator(self.config.seed, server_round, SERVER, "generated")
        size = settings.generated
        graph = GraphInput(torch.zeros(size, 1), torch.zeros(2, 0, dtype=torch.int64))
        self.generator.train()
        numbers: dict[str, Tensor] = {}
        for _ in range(settings.server_steps):
            labels = torch.multinomial(total, size, replacement=True, generator=draw)
            noise = torch.randn(size, settings.noise_channels, generator=draw)
            made = self.generator(labels, noise)
            loss = fedgen.ensemble_loss(clients.classify(made, graph), labels, weights)
            diversity = fedgen.diversity_loss(noise, made)
            self.optimizer.zero_grad()
            total_loss = loss + settings.diversity_weight * diversity
            total_loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            numbers = {"ensemble": loss.detach(), "diversity": diversity.detach()}
        self.generator.eval()
        self.log(**{name: float(number) for name, number in numbers.items()})
