"""Local training of many FedPANO clients as one stack.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano.generator import mean_rows
from flower_fgl.algorithms.fedpano.model import StackedPersonalNet
from flower_fgl.client_apps.fedpano_modules import Parts, build_parts, every_classifier
from flower_fgl.client_apps.fedpano_training import Trainer
from flower_fgl.client_apps.stacked.group import Group, cross_entropy
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import Backbone, SparseOperator
from flower_fgl.nn.layers import RepNorm
from flower_fgl.nn.stacked import map_each, stack_model
from flower_fgl.protocols.fedavg import Weights

__all__ = ["StackedTrainer"]

Module = TypeVar("Module", bound=nn.Module)


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
        return self.parts.personal.embed_nodes(self.group.inputs)

    def nodes(self, h: Tensor) -> Tensor:
        """Select the training nodes: (K, n, H)."""
        return h.flatten(0, 1)[self.index].view(*self.labels.shape, -1)

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
