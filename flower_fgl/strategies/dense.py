"""Server halves of DENSE and Co-Boosting: distil the clients' models, in one round."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms import dense
from flower_fgl.algorithms.coboosting import (
    hard_cross_entropy,
    perturb,
    stepped_weights,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.methods.dense import DenseSettings
from flower_fgl.nn import Backbone, GraphInput, optimizers
from flower_fgl.nn.stacked import Ensemble
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, draw_model

__all__ = ["Batch", "BoostingDistiller", "CoBoosting", "Dense", "Distiller"]

log = logging.getLogger(__name__)
BETAS = (0.5, 0.999)
"""Adam's decay rates for the generator."""
MOMENTUM = 0.9
"""Momentum of the student's SGD."""
LOG_EPOCHS = 50
"""Epochs between two lines of the log."""


@dataclass(frozen=True)
class Batch:
    """Generated nodes (b, d) with edges, their classes (b,), and logits (K, b, C)."""

    graph: GraphInput
    labels: Tensor
    logits: Tensor


class Distiller:
    """Train a generator against the ensemble, and the student, in place, on its nodes.

    ``states`` are the K models of the student's architecture. ``sizes`` are d and C,
    ``generator`` draws noise, classes and initial weights, ``seed`` is that of the
    student's dropout.
    """

    def __init__(
        self,
        states: Sequence[Mapping[str, Tensor]],
        student: Backbone,
        sizes: tuple[int, int],
        settings: Any,
        *,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        self.student, self.settings = student, settings
        self.ensemble = Ensemble(student, states)
        self.num_features, self.num_classes = sizes
        self.draw, self.seed = generator, seed
        self.weights = torch.full((len(states),), 1 / len(states))
        self.pool: list[Batch] = []
        with seeded(seed):
            self.network = dense.FeatureGenerator(
                settings.noise_channels,
                settings.generator_channels,
                self.num_features,
                settings.feature_length,
            )
        self.optimizer = optimizers.SGD(
            student.parameters(), lr=settings.student_lr, momentum=MOMENTUM
        )

    def teaching_loss(self, ensemble: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's cross-entropy on the ensemble."""
        return F.cross_entropy(ensemble, labels)

    def apart(self, ensemble: Tensor, student: Tensor) -> Tensor:
        """Return how much ensemble and student disagree."""
        return dense.disagreement(ensemble, student)

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch that weights and student learn from."""
        return batch

    def reweigh(self, epoch: int) -> None:
        """Change the weights of the clients' models; by default they stay equal."""

    def predict(self, graph: GraphInput) -> Tensor:
        """Return the logits (K, b, C) of the clients' models."""
        return self.ensemble.predict(graph)

    def generator_loss(self, graph: GraphInput, labels: Tensor) -> Tensor:
        """Return cross-entropy minus disagreement; no model has BatchNorm to match."""
        ensemble = dense.ensemble_logits(self.predict(graph), self.weights)
        loss = self.teaching_loss(ensemble, labels)
        weight = self.settings.adversarial_weight
        if weight:
            loss = loss - weight * self.apart(ensemble, self.student(graph))
        return loss

    def generate(self) -> Batch:
        """Train the generator from new weights; return its best nodes."""
        settings, network = self.settings, self.network
        network.draw(self.draw)
        network.train()
        self.student.eval().requires_grad_(requires_grad=False)
        shape = (settings.batch, settings.noise_channels)
        noise = torch.randn(shape, generator=self.draw).requires_grad_()
        labels = torch.randint(self.num_classes, (settings.batch,), generator=self.draw)
        optimizer = optimizers.Adam(
            [*network.parameters(), noise], lr=settings.generator_lr, betas=BETAS
        )
        lowest, best = torch.inf, torch.empty(0)
        for _ in range(settings.generator_steps):
            features = network(noise)
            edges = dense.nearest_neighbors(features, settings.neighbors)
            loss = self.generator_loss(GraphInput(features, edges), labels)
            if float(loss.detach()) < lowest or not best.numel():
                lowest, best = float(loss.detach()), features.detach()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.student.requires_grad_()
        return self.batch_of(best, labels)

    def batch_of(self, features: Tensor, labels: Tensor) -> Batch:
        """Connect features and predict them with the clients' models."""
        edges = dense.nearest_neighbors(features, self.settings.neighbors)
        graph = GraphInput(features, edges)
        with torch.no_grad():
            return Batch(graph, labels, self.predict(graph))

    def learn(self) -> float:
        """Train the student once on every batch of the pool; return the last loss."""
        self.student.train()
        value = float("nan")
        for number in torch.randperm(len(self.pool), generator=self.draw).tolist():
            batch = self.pool[number]
            target = dense.ensemble_logits(batch.logits, self.weights)
            loss = dense.student_loss(
                self.student(batch.graph), target, self.settings.tau
            )
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            value = float(loss.detach())
        return value

    def run(self) -> dict[str, float]:
        """Distil for ``server-epochs``; return numbers for the log of the round."""
        epochs, loss = self.settings.server_epochs, float("nan")
        with seeded(self.seed):
            for epoch in range(1, epochs + 1):
                self.pool.append(self.prepared(self.generate()))
                self.reweigh(epoch)
                loss = self.learn()
                if epoch % LOG_EPOCHS == 0 or epoch == epochs:
                    log.info("Distillation: epoch %d of %d, %.5f", epoch, epochs, loss)
        self.student.eval()
        if not epochs:
            return {}
        hits = [
            dense.ensemble_logits(batch.logits, self.weights).argmax(dim=1)
            == batch.labels
            for batch in self.pool
        ]
        return {
            "student_loss": loss,
            "generated_accuracy": float(torch.cat(hits).float().mean()),
        }


class Dense(FedAvg):
    """Collect the trained models, distil them, and let every client fine-tune.

    Notes
    -----
    1. The single round has two exchanges. The first sends the initial weights and collects
       the trained ones; the second sends the distilled model and returns scores.
    2. The backbones have no BatchNorm, so the generator's term on its statistics is left
       out.
    3. The student starts from the mean of the clients' weights.
    4. The server runs on its CPU. The pool of generated nodes takes 4·E·b·d bytes for E
       epochs and batches of b nodes.
    """

    config: RunConfig[DenseSettings]
    scores_uploads = False
    distiller: ClassVar[type[Distiller]] = Distiller

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the models, then distil them into the average."""
        super().aggregate(server_round, uploads)
        self.contributors = list(uploads)
        with seeded(0):  # the weights are overwritten
            student = draw_model(self.config, self.federation)
        student.load_state_dict(dict(self.weights.tensors))
        seed = self.config.seed
        distiller = self.distiller(
            [upload.payload.tensors for upload in uploads.values()],
            student,
            (self.federation.num_features, self.federation.num_classes),
            self.config.method_config,
            generator=torch_generator(seed, server_round, SERVER, "generated"),
            seed=derive_seed(seed, server_round, SERVER, "distillation"),
        )
        self.log(**distiller.run())
        state = {n: t.detach().contiguous() for n, t in student.state_dict().items()}
        self.weights = Weights(state)

    def complete_round(self, server_round: int) -> bool:
        """Send the distilled model; clients fine-tune it and reply with scores."""
        # the model of the upload is not the one to score
        return self.train_again(server_round, self.contributors, "finetune")

    def finish(self) -> None:
        """Do nothing: the clients have fine-tuned."""


class BoostingDistiller(Distiller):
    """Generate hard nodes, and weigh the clients' models by them.

    Notes
    -----
    1. A batch is perturbed once, when it joins the pool, by a step of fixed length along
       the gradient of a random combination of the ensemble's probabilities. The published
       code perturbs images anew in every step of the student, by the gradient's sign; such
       a step would be longer than the features of a node. The published code computes
       the probabilities with temperature 4; here the temperature is 1.
    2. From the second epoch on the weights make one step for each earlier batch of the
       pool, as in the published code.
    """

    def teaching_loss(self, ensemble: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy in which hard nodes count more."""
        return hard_cross_entropy(ensemble, labels, self.settings.hardness)

    def apart(self, ensemble: Tensor, student: Tensor) -> Tensor:
        """Return the disagreement on all nodes."""
        return dense.student_loss(student, ensemble, self.settings.adversarial_tau)

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch with perturbed features."""
        if not self.settings.perturbation:
            return batch
        features = batch.graph.x.clone().requires_grad_()
        graph = GraphInput(features, batch.graph.edge_index)
        said = dense.ensemble_logits(self.predict(graph), self.weights).softmax(dim=1)
        direction = torch.rand(said.shape, generator=self.draw) * 2 - 1
        (gradient,) = torch.autograd.grad((direction * said).sum(), features)
        harder = perturb(batch.graph.x, gradient, self.settings.perturbation)
        return self.batch_of(harder, batch.labels)

    def reweigh(self, epoch: int) -> None:
        """Step the weights of the clients' models."""
        settings = self.settings
        step = settings.weight_step * settings.step_decay ** (epoch - 1)
        for batch in self.pool[:-1]:
            self.weights = stepped_weights(
                self.weights, batch.logits, batch.labels, step
            )

    def run(self) -> dict[str, float]:
        """Distil; return the extreme weights too."""
        numbers = super().run()
        low, high = (float(end) for end in self.weights.aminmax())
        return {**numbers, "smallest_weight": low, "largest_weight": high}


class CoBoosting(Dense):
    """DENSE's round with the distillation of Co-Boosting."""

    distiller = BoostingDistiller
