"""Local training of one FedPANO client.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano.generator import (
    gaussian_copies,
    mean_distance,
    spread,
    synthesise,
)
from flower_fgl.client_apps.fedpano_modules import (
    Parts,
    training_part,
)
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import make_optimizer
from flower_fgl.core.errors import FglError
from flower_fgl.methods.fedpano import FedPANOSettings

__all__ = ["Trainer"]

Client = AnyClient[FedPANOSettings]

GAUSSIAN_STD = 0.1
"""Standard deviation of the noise on training nodes with ``augment = gaussian`` (nG)."""


class Trainer:
    """Local training of one client in one round, steps 5 to 7 of Algorithm 1.

    The client's state stores optimizer moments with ``optimizer-state = "keep"``; the
    ``parts`` are trained in place.
    """

    def __init__(self, client: Client, parts: Parts, server_round: int) -> None:
        self.client, self.parts = client, parts
        self.method_config: FedPANOSettings = client.config.method_config
        data = client.data.training
        self.labels = data.labels
        self.own_labels = torch.searchsorted(parts.classes, data.labels)
        self.predicted = self.labels if parts.own is None else self.own_labels
        self.part = training_part(client, parts.personal)
        self.noise = client.generator(server_round, "noise")
        self.share: Tensor | None = None
        self.open_optimizers()
        for name, optimizer in self.optimizers.items():
            group = f"optimizer/{name}"
            client.restore_moments(group, self.modules[name], optimizer)

    def open_optimizers(self) -> None:
        """Build the optimizer of each kind of step."""
        parts = self.parts
        fitted = [parts.shared.encoder, parts.shared.classifier, parts.own]
        self.modules: dict[str, nn.Module] = {
            "fit": nn.ModuleList(module for module in fitted if module is not None),
            "classifier": parts.personal.classifier,
        }
        if parts.generator is not None:
            self.modules["generator"] = parts.generator
        self.optimizers = {
            name: make_optimizer(module, self.client.config)
            for name, module in self.modules.items()
        }

    def run(self, epochs: int) -> dict[str, float]:
        """Train for full-batch steps of each kind; return the losses of the last epoch.

        They are named as in ``LOSSES``, with the ``spread`` of the synthetic nodes; only
        those that the variant has.
        """
        terms = self.train(epochs)
        for name, optimizer in self.optimizers.items():
            group = f"optimizer/{name}"
            self.client.keep_moments(group, self.modules[name], optimizer)
        return {name: float(value) for name, value in terms.items()}

    def train(self, epochs: int) -> dict[str, Tensor]:
        """Train, see :meth:`run`."""
        self.parts.personal.train()
        terms: dict[str, Tensor] = {}
        h = self.represent() if epochs else torch.empty(0)
        for epoch in range(1, epochs + 1):
            terms = self.step_parts(h)
            is_last = epoch == epochs
            steps_again = self.method_config.classifier_steps > 1
            if not is_last or self.method_config.use_generator or steps_again:
                with torch.set_grad_enabled(not is_last):
                    h = self.represent()
            if self.method_config.use_generator:
                terms |= self.augment(h.detach())
            elif steps_again:
                self.step_again(h.detach())
        return terms

    def represent(self) -> Tensor:
        """Return h of the training nodes and their neighbours: (M, H)."""
        return self.parts.personal.embed_nodes(self.part.inputs)

    def step_parts(self, h: Tensor) -> dict[str, Tensor]:
        """Step on θ^g, θ^s and θ^c by ``L^s + L^c``, Eqs. (2) and (5)."""
        nodes = self.nodes(h)
        terms = {}
        if self.parts.shared.classifier is not None:
            logits = self.classify(self.parts.shared.classifier, nodes)
            terms["generic"] = self.entropy(logits, self.labels)
        if self.parts.own is not None:
            logits = self.classify(self.parts.own, nodes)
            terms["own"] = self.entropy(logits, self.own_labels)
        self.step("fit", torch.stack(list(terms.values())).sum())
        return {name: value.detach() for name, value in terms.items()}

    def step_again(self, h: Tensor) -> None:
        """Step on the predicting classifier by L^c, in place of L^ĉ; h: constant."""
        logits = self.classify(self.parts.personal.classifier, self.nodes(h))
        self.step("classifier", self.entropy(logits, self.predicted).sum())

    def augment(self, h: Tensor) -> dict[str, Tensor]:
        """Train φ, then the classifier on synthetic nodes; h: (M, H), constant."""
        terms = {}
        if self.parts.generator is not None:
            terms = self.step_generator(self.nodes(h), self.around(h))
        return terms | self.step_classifier(self.synthetic(h))

    def nodes(self, h: Tensor) -> Tensor:
        """Select the training nodes of :meth:`represent`: (n, H)."""
        return h[self.part.index]

    def around(self, h: Tensor) -> Tensor:
        """Average h over the neighbours of each training node: (n, H)."""
        return self.part.around.matmul(h)

    def classify(self, classifier: nn.Module, nodes: Tensor) -> Tensor:
        """Return the logits of nodes (n, H) by one of the classifiers."""
        out: Tensor = classifier(nodes)
        return out

    def entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(logits, labels)

    def check(self, made: Tensor, h: Tensor) -> None:
        """Raise an FglError for non-finite synthetic nodes of finite ``h``."""
        if not bool(made.isfinite().all()) and bool(h.isfinite().all()):
            raise FglError(
                "the node generator returned non-finite values; the client keeps its "
                "state from before the round. Try a smaller lr."
            )

    @torch.no_grad()
    def synthetic(self, h: Tensor) -> Tensor:
        """Generate ĥ (n, m, H) by Eq. (6) or variant nG from h of :meth:`represent`.

        The errors are those of :meth:`check`.
        """
        nodes, noise = self.nodes(h), self.draw_noise()
        if self.parts.generator is None:
            return gaussian_copies(nodes, noise)
        made = synthesise(self.parts.generator, nodes, self.around(h), noise)
        self.check(made, h)
        return made

    def step_generator(self, nodes: Tensor, around: Tensor) -> dict[str, Tensor]:
        """Step on φ by L^g, Eqs. (6) and (7); nodes and around: (n, H)."""
        generator = self.modules["generator"]
        made = synthesise(generator, nodes, around, self.draw_noise())
        loss = mean_distance(nodes, made, self.share)
        self.step("generator", loss.sum())
        return {"generator": loss.detach()}

    def step_classifier(self, made: Tensor) -> dict[str, Tensor]:
        """Step on the predicting classifier by L^ĉ, Eq. (8); made: (n, m, H)."""
        logits = self.classify(self.parts.personal.classifier, made.flatten(-3, -2))
        labels = self.predicted.repeat_interleave(self.method_config.m, dim=-1)
        loss = self.entropy(logits, labels)
        self.step("classifier", loss.sum())
        return {"synthetic": loss.detach(), "spread": spread(made, self.share)}

    def draw_noise(self) -> Tensor:
        """Draw ε: (n, m, 2H) for Eq. (6), (n, m, H) for variant nG."""
        width = self.parts.shared.encoder.hidden_channels
        method_config = self.method_config
        is_context = self.parts.generator is not None
        noise = self.randn(method_config.m, 2 * width if is_context else width)
        noise *= method_config.noise_std if is_context else GAUSSIAN_STD
        if is_context and method_config.noise_on == "agg":
            noise[..., :width] = 0
        return noise.to(self.labels.device)

    def randn(self, *shape: int) -> Tensor:
        """Draw normal numbers of this shape for each training node."""
        return torch.randn((len(self.labels), *shape), generator=self.noise)

    def step(self, name: str, loss: Tensor) -> None:
        """Take a step of one optimizer."""
        self.optimizers[name].zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[name].step()
