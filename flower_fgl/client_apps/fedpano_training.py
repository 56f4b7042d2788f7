"""Local training of FedPANO: of one client, or of many as one stack.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano.generator import (
    gaussian_copies,
    mean_distance,
    mean_rows,
    spread,
    synthesise,
)
from flower_fgl.algorithms.fedpano.model import StackedPersonalNet
from flower_fgl.client_apps.fedpano_modules import (
    Parts,
    build_parts,
    every_classifier,
    training_part,
)
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import make_optimizer
from flower_fgl.client_apps.stacked.group import Group, cross_entropy
from flower_fgl.core.errors import FglError
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, SparseOperator
from flower_fgl.nn.stacked import map_each, stack_model
from flower_fgl.protocols.fedavg import Weights

__all__ = ["StackedTrainer", "Trainer"]

Client = AnyClient[FedPANOSettings]
Module = TypeVar("Module", bound=nn.Module)

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

    def classify(self, classifier: nn.Linear, nodes: Tensor) -> Tensor:
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


class StackedTrainer(Trainer):
    """Local training of K clients as one stack, with classifiers of all C classes.

    The training nodes are padded to those n of the client with the most: nodes are (K, n,
    H), and a node's ``share`` (K, n) in a mean is 0 for padding. Losses are (K,). Clients
    have no dropout, and no moments of optimizers.
    """

    def __init__(self, group: Group, downloads: Sequence[Weights]) -> None:
        self.group, self.client = group, group.clients[0]
        self.method_config = group.config.method_config
        self.owned = torch.stack([one.data.own_classes for one in group.clients])
        self.parts = self.assemble(downloads)
        rows, count = group.rows, group.rows.count
        size, inputs = int(count.max()), group.inputs
        first = count.cumsum(0) - count
        place = torch.arange(len(rows.index), device=group.device) - first[rows.client]
        self.slots = rows.client * size + place
        shape = (len(group), size)
        # padding reads a client's first training node
        self.index = rows.index[first][:, None].repeat(1, size).view(-1)
        self.index[self.slots] = rows.index
        labels = rows.labels[first][:, None].repeat(1, size).view(-1)
        labels[self.slots] = rows.labels
        self.labels = self.predicted = self.own_labels = labels.view(shape)
        share = torch.zeros(len(labels), device=group.device)
        share[self.slots] = rows.share
        self.share = share.view(shape)
        key = ("fedpano", "around")
        if key not in group.memo:
            number = group.fill(0).numel()
            group.memo[key] = mean_rows(inputs.edge_index, rows.index, number)
        self.mean: SparseOperator = group.memo[key]
        self.draws = group.generators("noise")
        self.open_optimizers()

    def assemble(self, downloads: Sequence[Weights]) -> Parts:
        """Stack the received modules, and those that the clients keep."""
        group, (first, *_) = self.group, self.group.clients
        template = build_parts(first)
        states = [one.tensors for one in downloads]
        shared = stack_module(template.shared, states)
        generator, own = shared.generator, None
        if template.generator is not None and generator is None:
            kept = [
                state or build_parts(client).generator.state_dict()  # type: ignore[union-attr]
                for state, client in zip(
                    group.stored("generator"), group.clients, strict=True
                )
            ]
            generator = stack_module(template.generator, kept)
        if self.method_config.use_client_classifier:
            width = shared.encoder.hidden_channels
            own = stack_module(every_classifier(first, width), [{}] * len(group))
            with torch.no_grad():
                for key, values in own.named_parameters():
                    rows = [
                        values[place, mask] if not state else state[f"classifier.{key}"]
                        for place, (state, mask) in enumerate(
                            zip(group.stored(), self.owned, strict=True)
                        )
                    ]
                    values[self.owned] = torch.cat(rows).to(group.device)
        else:
            self.owned = torch.ones_like(self.owned)
        classifier = cast(nn.Linear, own or shared.classifier)
        personal = StackedPersonalNet(
            shared.encoder,
            classifier,
            self.owned,
            group.num_classes,
            self.method_config.rep_norm,
        )
        return Parts(shared, own, generator, personal, self.owned)

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each client's ``PersonalNet``."""
        tensors = self.parts.personal.state_dict()
        counts = self.owned.sum(1).tolist()
        found = self.group.split(
            {name: t for name, t in tensors.items() if name.startswith("encoder.")}
        )
        classes = self.owned.nonzero()[:, 1].split(counts)
        for state, own in zip(found, classes, strict=True):
            state["classes"] = own
        for name in ("classifier.weight", "classifier.bias"):
            rows = tensors[name][self.owned].split(counts)
            for state, own in zip(found, rows, strict=True):
                state[name] = own
        return found

    def represent(self) -> Tensor:
        """Return h of all nodes: (K, N, H)."""
        return self.parts.personal.embed_nodes(self.group.inputs)

    def nodes(self, h: Tensor) -> Tensor:
        """Select the training nodes: (K, n, H)."""
        return h.flatten(0, 1)[self.index].view(*self.labels.shape, -1)

    def around(self, h: Tensor) -> Tensor:
        """Average h over the neighbours of each training node: (K, n, H)."""
        found = self.mean.matmul(h.flatten(0, 1))
        out = h.new_zeros(self.labels.numel(), h.shape[-1])
        return out.index_copy(0, self.slots, found).view(*self.labels.shape, -1)

    def classify(self, classifier: nn.Linear, nodes: Tensor) -> Tensor:
        """Return the logits of nodes (K, n, H): (K, n, C)."""
        logits = map_each(nodes, classifier.weight.mT, classifier.bias)
        if classifier is not self.parts.own:
            return logits
        return logits.masked_fill(~self.owned[:, None], -math.inf)

    def entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of each client."""
        each = cross_entropy(logits.flatten(0, 1), labels.flatten())
        copies = labels.shape[1] // self.labels.shape[1]
        weight = cast(Tensor, self.share).repeat_interleave(copies, dim=1) / copies
        return (each.view(labels.shape) * weight).sum(1)

    def check(self, made: Tensor, h: Tensor) -> None:
        """Check nothing: the weights of a client with such nodes are not finite either."""

    def randn(self, *shape: int) -> Tensor:
        """Draw normal numbers for each client's training nodes, zero for padding."""
        out = torch.zeros(*self.labels.shape, *shape)
        counts = self.group.rows.count.tolist()
        for rows, count, draw in zip(out, counts, self.draws, strict=True):
            rows[:count].normal_(generator=draw)
        return out


def stack_module(module: Module, states: Sequence[Mapping[str, Tensor]]) -> Module:
    """Give a module the weights of K clients, (K, ...); of empty states its own, copied."""
    own = {name: value.detach().clone() for name, value in module.named_parameters()}
    is_same = all(state is states[0] for state in states)
    given = [state or own for state in states]
    stack_model(
        cast(Backbone, module),
        given[0] if is_same else given,
        len(states),
        torch.rand_like,
        is_spare=True,
    )
    return module
