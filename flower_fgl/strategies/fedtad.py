"""Server half of FedTAD: FedAvg, then distillation on generated graphs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms import fedtad
from flower_fgl.algorithms.dense import nearest_neighbors
from flower_fgl.algorithms.fedgen import diversity_loss
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedtad import FedTADSettings
from flower_fgl.nn import Backbone, GraphInput, optimizers
from flower_fgl.nn.stacked import Ensemble
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import ReliableWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, draw_model

__all__ = ["FedTAD"]

DECAY = 5e-4
"""Weight decay of both optimizers."""


class FedTAD(FedAvg):
    """Average the models, then move the mean towards the models that know a class.

    Notes
    -----
    1. Reliabilities are normalised over the clients of a round, as the published code
       does. The benchmark OpenFGL divides by the sum over the classes of a client.
    2. Both Adam optimizers keep their moments over the rounds.
    3. The server holds all models of a round at once.
    4. A negative reliability, of nodes unlike their neighbours, counts as 0. The published
       code divides by the sum over the clients without this cut.
    """

    config: RunConfig[FedTADSettings]
    up = ReliableWeights
    kept = ("generator", "model")

    def prepare(self) -> None:
        """Build the initial model and the generator."""
        super().prepare()
        with seeded(derive_seed(self.config.seed, 0, SERVER, "generator")):
            self.model: Backbone = draw_model(self.config, self.federation)
            self.generator = fedtad.GraphGenerator(
                self.federation.num_classes,
                self.federation.num_features,
                is_bounded=self.config.method_config.output == "tanh",
            )
        rate = self.config.method_config.server_lr
        self.optimizers = {
            name: optimizers.Adam(
                getattr(self, name).parameters(),
                lr=rate,
                weight_decay=DECAY,
                fused=True,
            )
            for name in self.kept
        }

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and of the reliabilities."""
        return self.shapes, {"reliability": (self.federation.num_classes,)}

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the models and distil."""
        super().aggregate(server_round, uploads)
        if not self.config.method_config.server_epochs:
            return
        payloads = [upload.payload for upload in uploads.values()]
        found = torch.stack([payload.descriptor["reliability"] for payload in payloads])
        self.model.load_state_dict(dict(self.weights.tensors))
        teachers = Ensemble(self.model, [payload.tensors for payload in payloads])
        seed = derive_seed(self.config.seed, server_round, SERVER, "distillation")
        with seeded(seed), torch.enable_grad():
            self.distil(teachers, fedtad.normalise_reliability(found.clamp(min=0)))
        state = {
            name: t.detach().clone() for name, t in self.model.state_dict().items()
        }
        self.weights = Weights(state)

    def distil(self, teachers: Ensemble, reliability: Tensor) -> None:
        """Train generator and global model; all random numbers are torch's global ones."""
        settings = self.config.method_config
        classes = fedtad.balanced_classes(settings.nodes, self.federation.num_classes)
        weights = fedtad.row_weights(reliability, classes)
        for _ in range(settings.server_epochs):
            noise = torch.randn(len(classes), fedtad.NOISE)
            self.model.eval()
            for _ in range(settings.generator_steps):
                x = self.generator(classes, noise)
                graph = GraphInput(x, nearest_neighbors(x, settings.neighbors))
                loss = fedtad.generator_loss(
                    self.model(graph),
                    teachers.predict(graph),
                    weights,
                    classes,
                    diversity_loss(noise, x),
                )
                self._step("generator", loss)
            with torch.no_grad():
                x = self.generator(classes, noise)
                graph = GraphInput(x, nearest_neighbors(x, settings.neighbors))
                targets = teachers.predict(graph)
                found = fedtad.discrepancy(self.model(graph), targets, weights)
            self.model.train()
            for _ in range(settings.model_steps):
                loss = fedtad.discrepancy(self.model(graph), targets, weights)
                self._step("model", loss)
        # of the last graph, before the model learned from it
        self.log(discrepancy=float(found))

    def _step(self, name: str, loss: Tensor) -> None:
        """Take one step of one of the two optimizers."""
        wanted = list(getattr(self, name).parameters())
        for parameter in wanted:
            parameter.grad = None
        loss.backward(inputs=wanted)  # type: ignore[no-untyped-call]
        self.optimizers[name].step()
