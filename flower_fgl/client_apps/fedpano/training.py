"""Modules of FedPANO's clients, the part of their graphs that they read, and training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms import fedpano
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.client_apps.stacked.group import Group, cross_entropy
from flower_fgl.core.errors import FglError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import GraphInput, SparseOperator
from flower_fgl.nn.computation_graph import Level, receptive_field
from flower_fgl.nn.layers import RepNorm
from flower_fgl.nn.stacked import (
    DescendingInput,
    Descent,
    Ragged,
    StackedInput,
    map_rows,
)
from flower_fgl.protocols.fedavg import Weights

__all__ = ["DescendingTrainer", "Parts", "Trainer", "TrainingPart", "assemble_modules"]
__all__ += ["build_parts", "split_personal", "stack_modules", "training_part"]

Client = AnyClient[FedPANOSettings]


@dataclass(frozen=True, eq=False)
class Parts:
    """All modules that a client trains, or a stack of them.

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
            rows = classes.cpu()
            whole = every_classifier(client, width).state_dict()
            own = nn.Linear(width, len(classes))
            load_state(own, {name: t[rows] for name, t in whole.items()})
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


def stack_modules(group: Group, downloads: Sequence[Weights]) -> Parts:
    """Stack the modules of many clients, see :func:`assemble_modules`.

    Their own classifiers have all C classes; ``classes`` (K, C), bool, are those that each
    client predicts.
    """
    clients: Sequence[Client] = group.clients
    first, method_config = clients[0], clients[0].config.method_config
    owned = torch.stack([one.data.own_classes for one in clients])
    template, own = build_parts(first), None
    # products with column-major weights take a fifth less
    for weight in template.generator.parameters() if template.generator else ():
        if weight.dim() == 2:
            weight.data = weight.data.t().contiguous().t()
    shared = group.load(template.shared, [one.tensors for one in downloads])
    generator = shared.generator
    if template.generator is not None and generator is None:
        kept = [
            state or build_parts(client).generator.state_dict()  # type: ignore[union-attr]
            for state, client in zip(group.stored("generator"), clients, strict=True)
        ]
        generator = group.load(template.generator, kept)
    if method_config.use_client_classifier:
        width = shared.encoder.hidden_channels
        every = every_classifier(first, width).to(group.device)
        own = group.load(every, every.state_dict())
        with torch.no_grad():
            for key, values in own.named_parameters():
                rows = [
                    values[place, mask] if not state else state[f"classifier.{key}"]
                    for place, (state, mask) in enumerate(
                        zip(group.stored(), owned, strict=True)
                    )
                ]
                values[owned] = torch.cat(rows).to(group.device)
    else:
        owned = torch.ones_like(owned)
    personal = fedpano.StackedPersonalNet(
        shared.encoder,
        cast(nn.Linear, own or shared.classifier),
        owned,
        group.num_classes,
        cast(RepNorm, method_config.rep_norm),
    )
    return Parts(shared, own, generator, personal, owned)


def split_personal(
    group: Group, personal: fedpano.PersonalNet
) -> list[dict[str, Tensor]]:
    """Return the state of each client's ``PersonalNet`` from that of the stack."""
    tensors, owned = personal.state_dict(), personal.classes
    found = group.split(
        {name: t for name, t in tensors.items() if name.startswith("encoder.")}
    )
    of_client = {
        "classes": owned.nonzero()[:, 1],
        **{n: t[owned] for n, t in tensors.items() if n.startswith("classifier.")},
    }
    for name, rows in of_client.items():
        for state, own in zip(
            found, torch.split(rows, owned.sum(1).tolist()), strict=True
        ):
            state[name] = own
    return found


@dataclass(frozen=True, eq=False)
class TrainingPart:
    """The part of the clients' graphs that their training reads.

    ``inputs`` are the whole graphs, or the computation graph of the M nodes needed of one
    client: the training nodes, in the rows ``index`` (n,), and their neighbours. ``around``
    (n, M) averages over the neighbours of each training node.
    """

    inputs: GraphInput
    index: Tensor
    around: SparseOperator

    @cached_property
    def num_bytes(self) -> int:
        """Memory of the extracted part, in bytes; whole graphs are counted elsewhere."""
        own = self.inputs.num_bytes if isinstance(self.inputs, Level) else 0
        return own + self.around.num_bytes


def training_part(group: Group, reach: int | None) -> TrainingPart:
    """Extract the part that training reads, once for each graph and network's reach."""
    key = ("training part", reach)
    if key not in group.memo:
        inputs, nodes, size = group.inputs, group.rows.index, group.fill(0).numel()
        edges = inputs.edge_index
        if not group.is_stacked and reach:
            is_near = torch.zeros(size, dtype=torch.bool, device=edges.device)
            is_near[nodes] = True
            is_near[edges[0][is_near[edges[1]]]] = True
            near = is_near.nonzero().squeeze(1)
            part = receptive_field(inputs, near, reach)
            if part:
                place = torch.arange(size, device=edges.device)
                place[near] = torch.arange(len(near), device=edges.device)
                inputs, nodes, size = part, place[nodes], len(near)
                edges = place[edges[:, is_near[edges].all(0)]]
        around = fedpano.mean_rows(edges, nodes, size)
        group.memo[key] = TrainingPart(inputs, nodes, around)
    found: TrainingPart = group.memo[key]
    return found


GAUSSIAN_STD = 0.1
"""Standard deviation of the noise on training nodes with ``augment = gaussian`` (nG)."""


class Trainer:
    """Local training in one round, steps 5 to 7 of Algorithm 1, of one client or a stack.

    The training nodes of a stack are padded to those n of the client with the most: nodes
    are (K, n, H), and a node's ``share`` (K, n) in a mean is 0 for padding. Of one client
    they are (n, H), without ``share``. Losses are (K,) or (). The ``parts`` are trained in
    place, and the clients' states keep moments. ``made`` are the last synthetic nodes.
    """

    made: Tensor | None = None
    share: Tensor | None = None
    reached: Tensor | None = None
    """h of all nodes after :meth:`train`, if it is known."""

    def __init__(self, group: Group, parts: Parts) -> None:
        self.group, self.parts = group, parts
        self.method_config: FedPANOSettings = group.config.method_config
        self.part = training_part(group, parts.personal.reach)
        rows = group.rows
        ragged = Ragged(rows.count.tolist(), group.device)
        place, self.slots = ragged.index, ragged.slots
        if group.is_stacked:
            self.share = torch.zeros(place.shape, device=group.device)
            self.share.view(-1)[self.slots] = rows.share
        else:
            place = place[0]
        self.index, self.labels = self.part.index[place], rows.labels[place]
        self.own_labels = self.labels
        if not group.is_stacked:
            self.own_labels = torch.searchsorted(parts.classes, self.labels)
        self.predicted = self.labels if parts.own is None else self.own_labels
        self.draws = group.generators("noise")
        fitted = [parts.shared.encoder, parts.shared.classifier, parts.own]
        self.modules: dict[str, nn.Module] = {
            "fit": nn.ModuleList(module for module in fitted if module is not None),
            "classifier": parts.personal.classifier,
        }
        if parts.generator is not None:
            self.modules["generator"] = parts.generator
        self.optimizers = {
            name: group.open_optimizer(f"optimizer/{name}", module, group.config)
            for name, module in self.modules.items()
        }

    def train(self, epochs: int) -> dict[str, Tensor]:
        """Train for full-batch steps of each kind; return the losses of the last epoch.

        They are named as in ``LOSSES``, with the ``spread`` of the synthetic nodes; only
        those that the variant has.
        """
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
        self.reached = h if epochs and not h.requires_grad else None
        if self.made is not None:
            terms["spread"] = fedpano.spread(self.made, self.share)
        for optimizer in self.optimizers.values():
            optimizer.save()
        return terms

    def represent(self) -> Tensor:
        """Return h of the training nodes and their neighbours, (M, H), or (K, N, H)."""
        return self.parts.personal.embed_nodes(self.part.inputs)

    def logits(self) -> Tensor | None:
        """Return the logits (K, N, C) of a stack after :meth:`train`, if h is known."""
        if self.share is None or self.reached is None:
            return None
        with torch.no_grad():
            return self.parts.personal.head(self.reached, self.group.inputs)

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
        """Train φ, then the classifier on synthetic nodes, from a constant h."""
        terms, nodes = {}, self.nodes(h)
        around = nodes
        if self.parts.generator is not None:
            around = self.around(h)
            terms = self.step_generator(nodes, around)
        self.made = self.synthetic(nodes, around)
        return terms | self.step_classifier(self.made)

    def nodes(self, h: Tensor) -> Tensor:
        """Select the training nodes of :meth:`represent`: (n, H), or (K, n, H)."""
        found = h.flatten(0, -2).index_select(0, self.index.flatten())
        return found.view(*self.index.shape, h.shape[-1])

    def around(self, h: Tensor) -> Tensor:
        """Average h over the neighbours of each training node: (n, H), or (K, n, H)."""
        found = self.part.around.matmul(h.flatten(0, -2))
        if self.share is None:
            return found
        out = h.new_zeros(self.index.numel(), h.shape[-1])
        return out.index_copy(0, self.slots, found).view(*self.index.shape, -1)

    def classify(self, classifier: nn.Module, nodes: Tensor) -> Tensor:
        """Return the logits of nodes (n, H) by one of the classifiers, or of (K, n, H)."""
        logits = map_rows(classifier, nodes)
        if self.share is None or classifier is not self.parts.own:
            return logits
        return logits.masked_fill(~self.parts.classes[:, None], -math.inf)

    def entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of each client."""
        if self.share is None:
            return F.cross_entropy(logits, labels)
        each = cross_entropy(logits.flatten(0, 1), labels.flatten())
        copies = labels.shape[1] // self.labels.shape[1]
        weight = self.share.repeat_interleave(copies, dim=1) / copies
        return (each.view(labels.shape) * weight).sum(1)

    @torch.no_grad()
    def synthetic(self, nodes: Tensor, around: Tensor) -> Tensor:
        """Generate ĥ (n, m, H) by Eq. (6) or variant nG from nodes and around (n, H).

        FglError for non-finite nodes of finite ones; in a stack the weights of such a
        client are not finite either.
        """
        noise = self.draw_noise()
        if self.parts.generator is None:
            return fedpano.gaussian_copies(nodes, noise)
        made = fedpano.synthesise(self.parts.generator, nodes, around, noise)
        is_finite = self.share is not None or bool(made.isfinite().all())
        if not is_finite and bool((nodes + around).isfinite().all()):
            raise FglError(
                "the node generator returned non-finite values; the client keeps its "
                "state from before the round. Try a smaller lr."
            )
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
        """Draw ε: (n, m, 2H) for Eq. (6), (n, m, H) for variant nG; zero for padding."""
        method_config, is_context = self.method_config, self.parts.generator is not None
        width = self.parts.shared.encoder.hidden_channels
        shape = method_config.m, 2 * width if is_context else width
        noise = torch.empty(*self.labels.shape, *shape)
        counts = self.group.rows.count.tolist()
        every = noise.view(len(counts), self.labels.shape[-1], *shape)
        for rows, count, draw in zip(every, counts, self.draws, strict=True):
            rows[:count].normal_(generator=draw)
            rows[count:].zero_()
        std = method_config.noise_std if is_context else GAUSSIAN_STD
        noise = noise if std == 1 else noise.mul_(std)
        if is_context and method_config.noise_on == "agg":
            noise[..., :width] = 0
        return noise.to(self.labels.device)

    def step(self, name: str, loss: Tensor) -> None:
        """Take a step of one optimizer."""
        for parameter in self.modules[name].parameters():
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[name].step()


class DescendingTrainer(Trainer):
    """Local training of a stack by SGD, with most steps written out.

    Clients have no dropout; autograd takes only the derivatives of θ^g.
    """

    def __init__(self, group: Group, parts: Parts) -> None:
        super().__init__(group, parts)
        config, number = group.config, self.method_config.m
        assert self.share is not None
        self.weight = self.share
        self.descent = Descent(config.lr, config.weight_decay)
        self.copied_labels = self.labels.repeat_interleave(number, dim=1)
        self.copied_share = self.share.repeat_interleave(number, dim=1) / number
        self.inputs, reach = group.inputs, parts.personal.reach
        if reach and type(group.inputs) is StackedInput:
            key = ("fedpano", "graded")
            if key not in group.memo:
                # training nodes first, so that the rows of a client are distinct
                is_row = group.fill(0)
                is_row.view(-1)[group.rows.index] = 1
                order = is_row.argsort(dim=1, descending=True, stable=True)
                group.memo[key] = order[:, : self.labels.shape[1]].clone()
            few: Tensor = group.memo[key]
            self.inputs = DescendingInput(group.inputs, few, reach, self.descent)

    def represent(self) -> Tensor:
        """Return h of all nodes: (K, N, H)."""
        return self.parts.personal.embed_nodes(self.inputs)

    def step_parts(self, h: Tensor) -> dict[str, Tensor]:
        """Step on θ^g, θ^s and θ^c; autograd takes only the derivatives of θ^g."""
        nodes, parts = self.nodes(h), self.parts
        at, terms, back = nodes.detach(), {}, torch.zeros_like(nodes)
        for name, layer in (("generic", parts.shared.classifier), ("own", parts.own)):
            if layer is not None:
                logits = self.classify(layer, at).detach()
                terms[name], slope = fedpano.entropy_slope(
                    logits, self.labels, self.weight
                )
                back.baddbmm_(slope, layer.weight.detach())
                self.descent.step(layer.weight, layer.bias, slope, at)
        for parameter in self.modules["fit"].parameters():
            parameter.grad = None
        nodes.backward(back)  # type: ignore[no-untyped-call]
        self.optimizers["fit"].step()
        return terms

    @torch.no_grad()
    def step_generator(self, nodes: Tensor, around: Tensor) -> dict[str, Tensor]:
        """Step on φ by L^g, Eqs. (6) and (7); nodes and around: (K, n, H)."""
        generator, noise = self.parts.generator, self.draw_noise()
        assert generator is not None
        loss = fedpano.descend_distance(
            generator, nodes, around, noise, self.weight, self.descent
        )
        return {"generator": loss}

    @torch.no_grad()
    def step_classifier(self, made: Tensor) -> dict[str, Tensor]:
        """Step on the predicting classifier by L^ĉ, Eq. (8); made: (K, n, m, H)."""
        layer, rows = (
            cast(nn.Linear, self.parts.personal.classifier),
            made.flatten(1, 2),
        )
        logits = self.classify(layer, rows)
        loss, slope = fedpano.entropy_slope(
            logits, self.copied_labels, self.copied_share
        )
        self.descent.step(layer.weight, layer.bias, slope, rows)
        return {"synthetic": loss}
