"""Server half of Co-Boosting: DENSE with harder nodes and a weighted ensemble."""

import torch
from torch import Tensor

from flower_fgl.algorithms.coboosting import (
    hard_cross_entropy,
    perturb,
    stepped_weights,
)
from flower_fgl.algorithms.dense import disagreement, ensemble_logits
from flower_fgl.nn import GraphInput
from flower_fgl.strategies.dense import Dense
from flower_fgl.strategies.distiller import Batch, Distiller

__all__ = ["BoostingDistiller", "CoBoosting"]


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
        tau = self.settings.adversarial_tau
        return disagreement(ensemble, student, tau=tau, masks=False)

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch with perturbed features."""
        if not self.settings.perturbation:
            return batch
        features = batch.graph.x.clone().requires_grad_()
        graph = GraphInput(features, batch.graph.edge_index)
        said = ensemble_logits(self.predict(graph), self.weights).softmax(dim=1)
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
