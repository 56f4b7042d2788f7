"""Client half of FedPANO: shared representation, own classifier, synthetic nodes.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.

===============================  ==================================================
symbol                           argument or attribute
===============================  ==================================================
θ_i^g, θ_i^s                     ``Parts.shared.encoder``, ``.classifier``
φ_i                              ``Parts.generator``
θ_i^c                            ``Parts.own``, kept in the client's state
V_i in the losses                ``client.data.training``: the training nodes
Y_i                              ``Parts.classes``: those of the training nodes
h_u                              rows of ``Trainer.represent``
m, ε                             ``fedpano.m``, ``Trainer.draw_noise``
===============================  ==================================================

===============================================  ===========================
Algorithm 1, client                              function
===============================================  ===========================
step 5, Eqs. (2), (5)                            ``Trainer.step_parts``
step 6, Eqs. (6), (7)                            ``Trainer.step_generator``
step 7, Eq. (8)                                  ``Trainer.step_classifier``
step 16                                          ``PersonalNet``
===============================================  ===========================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano.generator import (
    gaussian_copies,
    mean_distance,
    spread,
    synthesise,
)
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.fedpano_modules import (
    Parts,
    assemble_modules,
    build_parts,
    training_part,
)
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import make_optimizer
from flower_fgl.core.errors import FglError
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedPANOClientApp", "Trainer"]

Client = AnyClient[FedPANOSettings]

LOSSES = ("generic", "own", "generator", "synthetic")
"""L^s, L^c, L^g and L^ĉ of Eq. (9)."""
GAUSSIAN_STD = 0.1
"""Standard deviation of the noise on training nodes with ``augment = gaussian`` (nG)."""


class FedPANOClientApp(FglClientApp):
    """Train the shared parts and the client's own classifier, with synthetic nodes.

    Notes
    -----
    1. Each of the four losses is minimised in turn over its own modules, as in
       Algorithm 1, and not as the sum of Eq. (9). In that sum L^g would be smallest if
       all nodes had the same representation.
    2. Steps 6 and 7 use the representations from which step 5 of the next epoch starts:
       the graph network does not change in between.
    3. Own classifiers start from the same weights for the same class on all clients, as
       the heads of FedPer and FedRep do. In the paper each client draws its own. Such
       classifiers pull the averaged encoders apart, most of all in variant nS.
    4. A client without training nodes has no classifier of its own and predicts with the
       generic one; in variant nS with an untrained one.
    5. One pass computes the representations of training nodes and their neighbours. A
       pass with gradient over the training nodes and one without over the rest is slower
       on CS.
    """

    down = Weights
    up = Weights

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parts that the variant shares."""
        return client.cached(
            ("shared parts",), lambda: state_shapes(build_parts(client).shared)
        )

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Run steps 5 to 7 of Algorithm 1 ``local-epochs`` times."""
        parts = assemble_modules(client, download)
        trainer = Trainer(client, parts, server_round)
        with seeded(client.seed(server_round, "training"), client.device):
            terms = trainer.run(client.config.local_epochs)
        if parts.generator is not None and parts.shared.generator is None:
            client.state.set_group("generator", parts.generator.state_dict())
        loss = sum(terms[name] for name in LOSSES if name in terms)
        upload = Weights(parts.shared.state_dict())
        return Fit(parts.personal, upload, loss, terms=terms)

    def build(self, client: Client) -> Backbone:
        """Build the network that predicts."""
        return build_parts(client).personal

    def first_model(self, client: Client, download: Weights | None) -> Backbone | None:
        """Return the received model."""
        return None if download is None else assemble_modules(client, download).personal

    @torch.no_grad()
    def embed_kinds(
        self, client: Client, weights: Mapping[str, Tensor]
    ) -> Mapping[str, tuple[Tensor, Tensor]] | None:
        """Embed with θ_*^g and generate nodes with φ_*, Fig. 5; ``None`` in variant nN."""
        if not client.config.method_config.use_generator:
            return None
        parts = assemble_modules(client, Weights(weights))
        trainer = Trainer(client, parts, server_round=0)
        parts.personal.eval()
        data = client.data
        h = parts.personal.embed_nodes(data.training.inputs)
        test = data.columns[0]["test"] & (data.labels[0] >= 0)
        labels, made = data.training.labels, trainer.synthetic(trainer.represent())
        return {
            "synthetic": (made.flatten(0, 1), labels.repeat_interleave(made.shape[1])),
            "test": (h[test], data.labels[0][test]),
            "train": (h[data.training.index], labels),
        }


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
        fitted = [parts.shared.encoder, parts.shared.classifier, parts.own]
        self.modules: dict[str, nn.Module] = {
            "fit": nn.ModuleList(module for module in fitted if module is not None),
            "classifier": parts.personal.classifier,
        }
        if parts.generator is not None:
            self.modules["generator"] = parts.generator
        self.optimizers = {
            name: make_optimizer(module, client.config)
            for name, module in self.modules.items()
        }
        for name, optimizer in self.optimizers.items():
            group = f"optimizer/{name}"
            client.restore_moments(group, self.modules[name], optimizer)

    def run(self, epochs: int) -> dict[str, float]:
        """Train for full-batch steps of each kind; return the losses of the last epoch.

        They are named as in ``LOSSES``, with the ``spread`` of the synthetic nodes; only
        those that the variant has.
        """
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
        for name, optimizer in self.optimizers.items():
            group = f"optimizer/{name}"
            self.client.keep_moments(group, self.modules[name], optimizer)
        return {name: float(value) for name, value in terms.items()}

    def represent(self) -> Tensor:
        """Return h of the training nodes and their neighbours: (M, H)."""
        return self.parts.personal.embed_nodes(self.part.inputs)

    def step_parts(self, h: Tensor) -> dict[str, Tensor]:
        """Step on θ^g, θ^s and θ^c by ``L^s + L^c``, Eqs. (2) and (5)."""
        nodes = h[self.part.index]
        terms = {}
        if self.parts.shared.classifier is not None:
            logits = self.parts.shared.classifier(nodes)
            terms["generic"] = F.cross_entropy(logits, self.labels)
        if self.parts.own is not None:
            terms["own"] = F.cross_entropy(self.parts.own(nodes), self.own_labels)
        self.step("fit", torch.stack(list(terms.values())).sum())
        return {name: value.detach() for name, value in terms.items()}

    def step_again(self, h: Tensor) -> None:
        """Step on the predicting classifier by L^c, in place of L^ĉ; h: constant."""
        logits = self.modules["classifier"](h[self.part.index])
        self.step("classifier", F.cross_entropy(logits, self.predicted))

    def augment(self, h: Tensor) -> dict[str, Tensor]:
        """Train φ, then the classifier on synthetic nodes; h: (M, H), constant."""
        terms = {}
        if self.parts.generator is not None:
            nodes = h[self.part.index]
            terms = self.step_generator(nodes, self.part.around.matmul(h))
        return terms | self.step_classifier(self.synthetic(h))

    @torch.no_grad()
    def synthetic(self, h: Tensor) -> Tensor:
        """Generate ĥ (n, m, H) by Eq. (6) or variant nG from h of :meth:`represent`.

        FglError if the generator returns non-finite values for finite ``h``.
        """
        nodes = h[self.part.index]
        noise = self.draw_noise()
        if self.parts.generator is None:
            return gaussian_copies(nodes, noise)
        around = self.part.around.matmul(h)
        made = synthesise(self.parts.generator, nodes, around, noise)
        if not bool(made.isfinite().all()) and bool(h.isfinite().all()):
            raise FglError(
                "the node generator returned non-finite values; the client keeps its "
                "state from before the round. Try a smaller lr."
            )
        return made

    def step_generator(self, nodes: Tensor, around: Tensor) -> dict[str, Tensor]:
        """Step on φ by L^g, Eqs. (6) and (7); nodes and around: (n, H)."""
        generator = self.modules["generator"]
        made = synthesise(generator, nodes, around, self.draw_noise())
        loss = mean_distance(nodes, made)
        self.step("generator", loss)
        return {"generator": loss.detach()}

    def step_classifier(self, made: Tensor) -> dict[str, Tensor]:
        """Step on the predicting classifier by L^ĉ, Eq. (8); made: (n, m, H)."""
        logits = self.modules["classifier"](made.flatten(0, 1))
        labels = self.predicted.repeat_interleave(self.method_config.m)
        loss = F.cross_entropy(logits, labels)
        self.step("classifier", loss)
        return {"synthetic": loss.detach(), "spread": spread(made)}

    def draw_noise(self) -> Tensor:
        """Draw ε: (n, m, 2H) for Eq. (6), (n, m, H) for variant nG."""
        width = self.parts.shared.encoder.hidden_channels
        method_config = self.method_config
        is_context = self.parts.generator is not None
        shape = (len(self.labels), method_config.m, 2 * width if is_context else width)
        noise = torch.randn(shape, generator=self.noise)
        noise *= method_config.noise_std if is_context else GAUSSIAN_STD
        if is_context and method_config.noise_on == "agg":
            noise[..., :width] = 0
        return noise.to(self.labels.device)

    def step(self, name: str, loss: Tensor) -> None:
        """Take a step of one optimizer."""
        self.optimizers[name].zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[name].step()
