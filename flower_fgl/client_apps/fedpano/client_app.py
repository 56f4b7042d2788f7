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

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano import (
    StackedPersonalNet,
    descend_distance,
    entropy_slope,
    mean_rows,
)
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedpano.training import (
    Parts,
    Trainer,
    assemble_modules,
    build_parts,
    every_classifier,
    training_part,
)
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    cross_entropy,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, SparseOperator, state_shapes
from flower_fgl.nn.layers import RepNorm
from flower_fgl.nn.stacked import (
    DescendingInput,
    Descent,
    Ragged,
    StackedInput,
    map_each,
    stack_module,
)
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedPANOClientApp", "StackedTrainer"]

Client = AnyClient[FedPANOSettings]

LOSSES = ("generic", "own", "generator", "synthetic")
"""L^s, L^c, L^g and L^ĉ of Eq. (9)."""


class FedPANOClientApp(GroupClientApp):
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

    stacked = True
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

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients with dropout or moments, or on a part of a graph."""
        config = client.config
        if config.dropout:
            return "fedpano draws dropout for a part of the graph"
        if config.optimizer != "sgd" and config.optimizer_state == "keep":
            return "fedpano keeps the moments of three optimizers"
        key = ("fedpano", "is small")

        def reads_little() -> bool:
            part = training_part(client, build_parts(client).personal)
            return (
                2 * part.around.matrix.shape[1] < client.data.training.inputs.num_nodes
            )

        is_small = client.cached(key, reads_little)
        return "its training reads less than half of its graph" if is_small else ""

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train many clients; :meth:`fit` trains one."""
        trainer = StackedTrainer(group, downloads)
        terms = trainer.train(group.config.local_epochs)
        parts = trainer.parts
        if parts.generator is not None and parts.shared.generator is None:
            states = group.split(parts.generator.state_dict())
            for client, tensors in zip(group.clients, states, strict=True):
                client.state.set_group("generator", tensors)
        values = {name: value.tolist() for name, value in terms.items()}
        rows = [
            dict(zip(values, row, strict=True))
            for row in zip(*values.values(), strict=True)
        ]
        rows = rows or [{} for _ in group.clients]
        losses = [float(sum(row[n] for n in LOSSES if n in row)) for row in rows]
        shared = parts.shared.state_dict()
        return GroupFit(
            parts.personal,
            [Weights(state) for state in group.split(shared)],
            losses,
            partial(Weights.stacked_records, len(group), shared),
            rows,
            trainer.logits(),
            trainer.states(),
        )

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
        near, labels = trainer.represent(), data.training.labels
        made = trainer.synthetic(trainer.nodes(near), trainer.around(near))
        return {
            "synthetic": (made.flatten(0, 1), labels.repeat_interleave(made.shape[1])),
            "test": (h[test], data.labels[0][test]),
            "train": (h[data.training.index], labels),
        }


class StackedTrainer(Trainer):
    """Local training of K clients as one stack, with classifiers of all C classes.

    The training nodes are padded to those n of the client with the most: nodes are (K, n,
    H), and a node's ``share`` (K, n) in a mean is 0 for padding. Losses are (K,). Clients
    have no dropout, and no moments of optimizers.
    """

    def __init__(self, group: Group, downloads: Sequence[Weights]) -> None:
        self.group, self.client = group, group.clients[0]
        self.method_config: FedPANOSettings = group.config.method_config
        self.owned = torch.stack([one.data.own_classes for one in group.clients])
        self.parts = self.assemble(downloads)
        rows, inputs = group.rows, group.inputs
        ragged = Ragged(rows.count.tolist(), group.device)
        self.slots = ragged.slots
        self.index = rows.index[ragged.index].view(-1)
        labels = rows.labels[ragged.index]
        self.labels = self.predicted = self.own_labels = labels
        share = torch.zeros(labels.shape, device=group.device)
        share.view(-1)[self.slots] = rows.share
        self.share: Tensor = share
        number = self.method_config.m
        self.copied_labels = labels.repeat_interleave(number, dim=1)
        self.copied_share = share.repeat_interleave(number, dim=1) / number
        key = ("fedpano", "around")
        if key not in group.memo:
            number = group.fill(0).numel()
            group.memo[key] = mean_rows(inputs.edge_index, rows.index, number)
        self.mean: SparseOperator = group.memo[key]
        self.draws = group.generators("noise")
        self.open_optimizers()
        config = group.config
        self.reached: Tensor | None = None
        self.descent: Descent | None = None
        self.inputs, reach = inputs, self.parts.personal.reach
        if config.optimizer == "sgd":
            self.descent = Descent(config.lr, config.weight_decay)
        if self.descent and reach and type(inputs) is StackedInput:
            key = ("fedpano", "graded")
            if key not in group.memo:
                # training nodes first, so that the rows of a client are distinct
                is_row = group.fill(0)
                is_row.view(-1)[rows.index] = 1
                order = is_row.argsort(dim=1, descending=True, stable=True)
                group.memo[key] = order[:, : labels.shape[1]].clone()
            few: Tensor = group.memo[key]
            self.inputs = DescendingInput(inputs, few, reach, self.descent)

    def assemble(self, downloads: Sequence[Weights]) -> Parts:
        """Stack the received modules, and those that the clients keep."""
        group, (first, *_) = self.group, self.group.clients
        template = build_parts(first)
        states = [one.tensors for one in downloads]
        # products with column-major weights take a fifth less
        for weight in template.generator.parameters() if template.generator else ():
            if weight.dim() == 2:
                weight.data = weight.data.t().contiguous().t()
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
            every = every_classifier(first, width).to(group.device)
            own = stack_module(every, [{}] * len(group))
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
            cast(RepNorm, self.method_config.rep_norm),
        )
        return Parts(shared, own, generator, personal, self.owned)

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each client's ``PersonalNet``."""
        tensors = self.parts.personal.state_dict()
        counts = self.owned.sum(1).tolist()
        found = self.group.split(
            {name: t for name, t in tensors.items() if name.startswith("encoder.")}
        )
        classes = torch.split(self.owned.nonzero()[:, 1], counts)
        for state, own in zip(found, classes, strict=True):
            state["classes"] = own
        for name in ("classifier.weight", "classifier.bias"):
            rows = torch.split(tensors[name][self.owned], counts)
            for state, own in zip(found, rows, strict=True):
                state[name] = own
        return found

    def represent(self) -> Tensor:
        """Return h of all nodes: (K, N, H)."""
        self.reached = self.parts.personal.embed_nodes(self.inputs)
        return self.reached

    def logits(self) -> Tensor | None:
        """Return the logits (K, N, C) after :meth:`train`, if their h is known."""
        if self.reached is None or self.reached.requires_grad:
            return None
        with torch.no_grad():
            return self.parts.personal.head(self.reached, self.group.inputs)

    def step_parts(self, h: Tensor) -> dict[str, Tensor]:
        """Step on θ^g, θ^s and θ^c; autograd takes only the derivatives of θ^g."""
        if self.descent is None:
            return super().step_parts(h)
        nodes, parts = self.nodes(h), self.parts
        at, terms, back = nodes.detach(), {}, torch.zeros_like(nodes)
        for name, layer in (("generic", parts.shared.classifier), ("own", parts.own)):
            if layer is not None:
                logits = self.classify(layer, at).detach()
                terms[name], slope = entropy_slope(logits, self.labels, self.share)
                back.baddbmm_(slope, layer.weight.detach())
                self.descent.step(layer.weight, layer.bias, slope, at)
        self.optimizers["fit"].zero_grad(set_to_none=True)
        nodes.backward(back)  # type: ignore[no-untyped-call]
        self.optimizers["fit"].step()
        return terms

    @torch.no_grad()
    def step_generator(self, nodes: Tensor, around: Tensor) -> dict[str, Tensor]:
        """Step on φ by L^g, Eqs. (6) and (7); nodes and around: (K, n, H)."""
        generator = self.parts.generator
        if self.descent is None or generator is None:
            with torch.enable_grad():
                return super().step_generator(nodes, around)
        noise, share = self.draw_noise(), self.share
        loss = descend_distance(generator, nodes, around, noise, share, self.descent)
        return {"generator": loss}

    @torch.no_grad()
    def step_classifier(self, made: Tensor) -> dict[str, Tensor]:
        """Step on the predicting classifier by L^ĉ, Eq. (8); made: (K, n, m, H)."""
        if self.descent is None:
            with torch.enable_grad():
                return super().step_classifier(made)
        layer = cast(nn.Linear, self.parts.personal.classifier)
        rows = made.flatten(1, 2)
        logits = self.classify(layer, rows)
        loss, slope = entropy_slope(logits, self.copied_labels, self.copied_share)
        self.descent.step(layer.weight, layer.bias, slope, rows)
        return {"synthetic": loss}

    def nodes(self, h: Tensor) -> Tensor:
        """Select the training nodes: (K, n, H)."""
        found = h.flatten(0, 1).index_select(0, self.index)
        return found.view(*self.labels.shape, -1)

    def around(self, h: Tensor) -> Tensor:
        """Average h over the neighbours of each training node: (K, n, H)."""
        found = self.mean.matmul(h.flatten(0, 1))
        out = h.new_zeros(self.labels.numel(), h.shape[-1])
        return out.index_copy(0, self.slots, found).view(*self.labels.shape, -1)

    def classify(self, classifier: nn.Module, nodes: Tensor) -> Tensor:
        """Return the logits of nodes (K, n, H): (K, n, C)."""
        linear = cast(nn.Linear, classifier)
        logits = map_each(nodes, linear.weight.mT, linear.bias)
        if classifier is not self.parts.own:
            return logits
        return logits.masked_fill(~self.owned[:, None], -math.inf)

    def entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of each client."""
        each = cross_entropy(logits.flatten(0, 1), labels.flatten())
        copies = labels.shape[1] // self.labels.shape[1]
        weight = self.share.repeat_interleave(copies, dim=1) / copies
        return (each.view(labels.shape) * weight).sum(1)

    def check(self, made: Tensor, h: Tensor) -> None:
        """Check nothing: the weights of a client with such nodes are not finite either."""

    def randn(self, *shape: int) -> Tensor:
        """Draw normal numbers for each client's training nodes, zero for padding."""
        out = torch.empty(*self.labels.shape, *shape)
        counts = self.group.rows.count.tolist()
        for rows, count, draw in zip(out.unbind(), counts, self.draws, strict=True):
            rows[:count].normal_(generator=draw)
            rows[count:].zero_()
        return out
