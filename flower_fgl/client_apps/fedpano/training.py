"""Modules of one FedPANO client, the part of its graph that it reads, and its training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms import fedpano
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state, make_optimizer
from flower_fgl.core.errors import FglError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, GraphInput, SparseOperator
from flower_fgl.nn.computation_graph import receptive_field
from flower_fgl.nn.layers import RepNorm
from flower_fgl.protocols.fedavg import Weights

__all__ = ["Parts", "Trainer", "TrainingPart", "assemble_modules", "build_parts"]
__all__ += ["every_classifier", "training_part"]

Client = AnyClient[FedPANOSettings]


@dataclass(frozen=True, eq=False)
class Parts:
    """All modules that one client trains.

    ``shared`` are uploaded; ``own`` is θ_i^c, from H to the client's own classes
    (``None`` in variant nT); ``generator`` φ_i, that of ``shared`` or, in variant nF, the
    client's own (``None`` in nN and nG). ``personal`` predicts and consists of the same
    modules. ``classes`` (C_i,) are Y_i, ascending; all classes if there is no training
    node.
    """

    shared: fedpano.SharedParts
    own: nn.Linear | None
    generator: fedpano.NodeGenerator | None
    personal: fedpano.PersonalNet
    classes: Tensor


def build_parts(client: Client) -> Parts:
    """Build a client's modules; the weights of the shared ones are to be overwritten."""
    config, graph = client.config, client.data.graph
    method_config: FedPANOSettings = config.method_config
    every = torch.arange(graph.num_classes, device=client.device)
    labels = client.data.training.labels
    classes = every[client.data.own_classes]
    with seeded(client.seed(0, "parts")):
        shared = fedpano.SharedParts(
            client.model_name,
            in_channels=graph.num_features,
            hidden_channels=config.hidden_channels,
            num_classes=graph.num_classes,
            num_layers=config.num_layers,
            dropout=config.dropout,
            method_config=method_config,
            initialise=False,
        )
        width, own, generator = shared.encoder.hidden_channels, None, shared.generator
        if len(labels) == 0:
            classes = every
        if method_config.use_client_classifier and (
            len(labels) or shared.classifier is None
        ):
            own = _own_classifier(client, width, classes)
        if method_config.has_generator and generator is None:
            generator = fedpano.NodeGenerator(width)
    chosen = classes if own else every
    # the settings' validation ensures that there is one of the two
    classifier = cast(nn.Linear, own or shared.classifier)
    norm = cast(RepNorm, method_config.rep_norm)
    personal = fedpano.PersonalNet(shared.encoder, classifier, chosen, len(every), norm)
    for module in (shared, personal, generator):
        if module is not None:
            client.settle(module)
    return Parts(shared, own, generator, personal, classes)


def _own_classifier(client: Client, width: int, classes: Tensor) -> nn.Linear:
    """Return θ_i^c as rows of :func:`every_classifier`."""
    every = every_classifier(client, width)
    own = nn.Linear(width, len(classes))
    with torch.no_grad():
        own.weight.copy_(every.weight[classes.cpu()])
        own.bias.copy_(every.bias[classes.cpu()])
    return own


def every_classifier(client: Client, width: int) -> nn.Linear:
    """Draw a classifier of all classes that is the same on all clients."""
    with seeded(derive_seed(client.config.seed, 0, SERVER, "own classifier")):
        return nn.Linear(width, client.data.num_classes)


def assemble_modules(client: Client, download: Weights) -> Parts:
    """Combine the received modules with those that the client keeps."""
    parts = build_parts(client)
    load_state(parts.shared, download.tensors)
    kept = client.state.group("model")
    if parts.own is not None and kept:
        own = {name: kept[f"classifier.{name}"] for name in parts.own.state_dict()}
        load_state(parts.own, own)
    if parts.generator is not None:
        load_state(parts.generator, client.state.group("generator"))
    return parts


@dataclass(frozen=True, eq=False)
class TrainingPart:
    """The part of a client's graph that its training reads.

    ``inputs`` are the whole graph, or the computation graph of the M nodes needed: the
    training nodes, in the rows ``index`` (n,), and their neighbours. ``around`` (n, M)
    averages over the neighbours of each training node.
    """

    inputs: GraphInput
    index: Tensor
    around: SparseOperator

    @cached_property
    def num_bytes(self) -> int:
        """Memory of the extracted part, in bytes."""
        entries = self.around.matrix.values().numel()
        return int(getattr(self.inputs, "num_bytes", 0)) + 2 * 8 * entries


def training_part(client: Client, model: Backbone) -> TrainingPart:
    """Extract the part that training reads, once for each graph and backbone."""
    memo, key = client.data.memo, ("training part", model.reach)
    if key not in memo:
        data = client.data.training
        edges, size = data.inputs.edge_index, data.inputs.num_nodes
        is_near = torch.zeros(size, dtype=torch.bool, device=edges.device)
        is_near[data.index] = True
        is_near[edges[0][is_near[edges[1]]]] = True
        near = is_near.nonzero().squeeze(1)
        reach = model.reach
        part = receptive_field(data.inputs, near, reach) if reach else None
        place = torch.arange(size, device=edges.device)
        if part:
            place[near] = torch.arange(len(near), device=edges.device)
            size = len(near)
            edges = edges[:, is_near[edges].all(0)]
        memo[key] = TrainingPart(
            part or data.inputs,
            place[data.index],
            fedpano.mean_rows(place[edges], place[data.index], size),
        )
    found: TrainingPart = memo[key]
    return found


GAUSSIAN_STD = 0.1
"""Standard deviation of the noise on training nodes with ``augment = gaussian`` (nG)."""


class Trainer:
    """Local training of one client in one round, steps 5 to 7 of Algorithm 1.

    The client's state stores optimizer moments with ``optimizer-state = "keep"``; the
    ``parts`` are trained in place. ``made`` are the last synthetic nodes.
    """

    made: Tensor | None = None

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
        self.made = None
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
        if self.made is not None:
            terms["spread"] = fedpano.spread(self.made, self.share)
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
        terms, nodes = {}, self.nodes(h)
        around = nodes
        if self.parts.generator is not None:
            around = self.around(h)
            terms = self.step_generator(nodes, around)
        self.made = self.synthetic(nodes, around)
        return terms | self.step_classifier(self.made)

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
    def synthetic(self, nodes: Tensor, around: Tensor) -> Tensor:
        """Generate ĥ (n, m, H) by Eq. (6) or variant nG from nodes and around (n, H).

        The errors are those of :meth:`check`.
        """
        noise = self.draw_noise()
        if self.parts.generator is None:
            return fedpano.gaussian_copies(nodes, noise)
        made = fedpano.synthesise(self.parts.generator, nodes, around, noise)
        self.check(made, nodes + around)
        return made

    def step_generator(self, nodes: Tensor, around: Tensor) -> dict[str, Tensor]:
        """Step on φ by L^g, Eqs. (6) and (7); nodes and around: (n, H)."""
        generator = self.modules["generator"]
        made = fedpano.synthesise(generator, nodes, around, self.draw_noise())
        loss = fedpano.mean_distance(nodes, made, self.share)
        self.step("generator", loss.sum())
        return {"generator": loss.detach()}

    def step_classifier(self, made: Tensor) -> dict[str, Tensor]:
        """Step on the predicting classifier by L^ĉ, Eq. (8); made: (n, m, H)."""
        logits = self.classify(self.parts.personal.classifier, made.flatten(-3, -2))
        labels = self.predicted.repeat_interleave(self.method_config.m, dim=-1)
        loss = self.entropy(logits, labels)
        self.step("classifier", loss.sum())
        return {"synthetic": loss.detach()}

    def draw_noise(self) -> Tensor:
        """Draw ε: (n, m, 2H) for Eq. (6), (n, m, H) for variant nG."""
        width = self.parts.shared.encoder.hidden_channels
        method_config = self.method_config
        is_context = self.parts.generator is not None
        noise = self.randn(method_config.m, 2 * width if is_context else width)
        std = method_config.noise_std if is_context else GAUSSIAN_STD
        noise = noise if std == 1 else noise.mul_(std)
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
