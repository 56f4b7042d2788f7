"""A group of clients that train and are evaluated together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from flower_fgl.client_apps.runtime.client import EMPTY, MASKED, Client
from flower_fgl.client_apps.runtime.training import Checks, copied
from flower_fgl.client_apps.stacked.group import (
    GraphLoss,
    Group,
    Module,
    Rows,
    RowsLoss,
    cross_entropy,
    take_steps,
)
from flower_fgl.client_apps.stacked.optimizer import StackedOptimizer
from flower_fgl.core.config import RunConfig
from flower_fgl.core.metrics import AbsentClasses, Scores, score_areas, score_rows
from flower_fgl.nn import Backbone
from flower_fgl.nn.computation_graph import output_nodes
from flower_fgl.nn.gcn_gradient import GCNGradient
from flower_fgl.nn.sparse import memo_bytes
from flower_fgl.nn.stacked import pad_rows, split_state, stack_graphs, stack_model

__all__ = ["Cohort", "StackedData", "Uniform"]

MOST_LEFT = 0.9
"""Share of a stack's clients up to which those that still train get their own stack."""


def stacked_rows(
    nodes: Sequence[Tensor], labels: Sequence[Tensor], num_rows: int
) -> Rows:
    """Return nodes of each client, of ``num_rows``, as rows of stacked representations."""
    counts = torch.tensor([len(one) for one in nodes])
    place = torch.repeat_interleave(torch.arange(len(nodes)), counts)
    place = place.to(nodes[0].device)
    index = torch.cat(list(nodes)) + place * num_rows
    return Rows(index, place, torch.cat(list(labels)), len(nodes))


class TaskLoss:
    """The cross-entropy of the training nodes of each client, as a :class:`GraphLoss`."""

    of_training_nodes: ClassVar[bool] = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, model: Backbone) -> Tensor:
        """Return the loss of each client, (K,)."""
        return self._group.task_loss(model, self._group.rows)

    def gradient(self, model: Backbone) -> GCNGradient | None:
        """Return what computes loss and gradients, ``None`` for autograd."""
        inputs, rows = self._group.inputs, self._group.rows
        if not GCNGradient.suits(model, inputs):
            return None
        shape = (*self._group.fill(0).shape, self._group.num_classes)
        targets = rows.share.new_zeros(shape)
        targets.flatten(0, -2)[rows.index, rows.labels] = rows.share
        return GCNGradient(model, inputs, targets, targets.new_zeros(len(self._group)))


class StackedData:
    """Graphs, training nodes and score columns of K clients, for many rounds.

    ``inputs`` are the training graphs, then each evaluation graph; all clients have the
    same columns.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        datas = [client.data for client in clients]
        self.inputs = [
            stack_graphs(graphs)
            for graphs in zip(*(data.inputs for data in datas), strict=True)
        ]
        self.datas = datas  # kept, so that their ids stay theirs
        trained = [data.training for data in datas]
        self.rows = stacked_rows(
            [one.index for one in trained],
            [one.labels for one in trained],
            self.inputs[0].num_rows,
        )
        self._fields: dict[int, dict[int, list[Tensor]]] = {}
        self.memo: dict[tuple[Any, ...], Any] = {}
        self.columns: list[dict[str, Rows]] = []
        for number, inputs in enumerate(self.inputs):
            every = [data.labels[number] for data in datas]
            columns = {}
            for name in datas[0].columns[number]:
                nodes = [
                    (data.columns[number][name] & (y >= 0)).nonzero().squeeze(1)
                    for data, y in zip(datas, every, strict=True)
                ]
                known = [y[index] for y, index in zip(every, nodes, strict=True)]
                columns[name] = stacked_rows(nodes, known, inputs.num_rows)
            self.columns.append(columns)

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory, in bytes."""
        return sum(inputs.num_bytes for inputs in self.inputs) + memo_bytes(self.memo)

    def fields(self, reach: int | None) -> dict[int, list[Tensor]]:
        """Return the nodes that each layer computes, by place of a client.

        Only clients that train on the receptive field of all their training nodes are
        contained, see :meth:`TrainingSet.field_of`.
        """
        if not reach:
            return {}
        if reach not in self._fields:
            found = {
                place: data.training.field_of(reach, data.training.index)
                for place, data in enumerate(self.datas)
            }
            self._fields[reach] = {
                place: output_nodes(field, reach)
                for place, field in found.items()
                if field is not None
            }
        return self._fields[reach]


class Uniform:
    """Uniform numbers of each client from its own generator on its device.

    The padding beyond a client's ``sizes`` gets zeros; −1 means no padding. For clients
    that train on a receptive field, ``fields`` names the nodes that each layer computes;
    other rows, which do not reach the loss, get zeros.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        sizes: Sequence[int],
        fields: Mapping[int, Sequence[Tensor]],
    ) -> None:
        self._generators, self._sizes, self._fields = generators, sizes, fields
        self._layer = 0

    def restart(self) -> None:
        """Begin a forward pass."""
        self._layer = 0

    def __call__(self, h: Tensor) -> Tensor:
        """Draw numbers of the shape (K, n, p) of ``h``."""
        out = torch.zeros_like(h, memory_format=torch.contiguous_format)
        for place, (rows, size, generator) in enumerate(
            zip(out.unbind(), self._sizes, self._generators, strict=True)
        ):
            if place in self._fields:
                nodes = self._fields[place][self._layer]
                few = h.new_empty(len(nodes), h.shape[2]).uniform_(generator=generator)
                rows.index_copy_(0, nodes, few)
            elif size in (-1, len(rows)):
                rows.uniform_(generator=generator)
            else:
                rows[:size].uniform_(generator=generator)
        self._layer += 1
        return out


class Cohort(Group):
    """Clients that train together in one exchange, as one stack.

    :class:`~flower_fgl.client_apps.stacked.grouping.Backbones` says which may. The states
    of clients share memory if ``is_whole``: the same clients will train together again.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        data: StackedData,
        server_round: int,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__(clients[0], server_round)
        self.clients, self.inputs, self.rows = clients, data.inputs[0], data.rows
        self.data, self._is_whole = data, is_whole
        self.memo, self.real = data.memo, data.inputs[0].real

    def load(
        self,
        network: Module,
        states: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor],
    ) -> Module:
        """Give a network the weights of all clients, see :meth:`Group.load`."""
        if not isinstance(states, Mapping) and all(s is states[0] for s in states):
            states = states[0]
        return stack_model(network, states, len(self), is_spare=True)

    def split(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the part of each client."""
        return split_state(tensors, len(self))

    def pad(self, parts: Sequence[Tensor]) -> Tensor:
        """Stack tensors of each client, a row per node, with rows of zeros."""
        return pad_rows(parts, self.data.inputs[0].num_rows)

    def join(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the tensors of each client."""
        return {
            name: torch.stack([state[name] for state in states]).to(self.device)
            for name in states[0]
        }

    def split_rows(self, values: Tensor) -> list[Tensor]:
        """Return the rows of each client without padding."""
        rows = zip(values.unbind(), self.clients, strict=True)
        return [row[: client.data.inputs[0].num_nodes] for row, client in rows]

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Stack the rows of each client."""
        out = self.fill(-1)
        out.view(-1)[self.all_rows.index] = torch.cat(list(parts)).to(self.device)
        return out

    @cached_property
    def all_rows(self) -> Rows:
        """All nodes of the training graphs, without labels (-1)."""
        assert self.real is not None
        real = self.real
        index = real.flatten().nonzero().squeeze(1)
        client = real.nonzero()[:, 0]
        return Rows(index, client, torch.full_like(index, -1), len(real))

    def task_loss(self, model: Backbone, rows: Rows) -> Tensor:
        """Return the loss of the task, (K,)."""
        logits = rows.pick(model(self.inputs))
        return rows.mean(cross_entropy(logits, rows.labels))

    def train(
        self,
        model: Backbone,
        *,
        epochs: int | None = None,
        data_loss: RowsLoss | None = None,
        penalty: Callable[[], Tensor] | None = None,
        after_epoch: Callable[[], None] | None = None,
        purpose: str = "training",
    ) -> list[float]:
        """Train the network, see :meth:`Group.train`.

        With ``check-every`` there are no batches, moments that are kept, or other losses.
        """
        assert self.server_round is not None
        size = self.config.batch_size
        epochs = self.config.local_epochs if epochs is None else epochs
        if self.config.check_every and after_epoch is None:
            if data_loss is not None or penalty is not None:
                raise ValueError("a stack checks clients with the plain loss only")
            best, losses = self.train_to_best(
                model, TaskLoss, lr=self.config.lr, purpose=purpose, epochs=epochs
            )
            model.load_state_dict(best.state_dict())
            return losses
        optimizer = self.open_optimizer("optimizer", model, self.config)
        fields = {} if size else self.data.fields(model.reach)
        uniform = self.draw_for(model, self.draws(purpose), fields)
        drawn_for = "batches" if purpose == "training" else f"batches of {purpose}"
        order = self.generators(drawn_for) if size else []
        model.train()
        total = torch.full((len(self),), math.nan, device=self.device)
        for _ in range(epochs):
            total = torch.zeros(len(self), device=self.device)
            for rows in self.batches(size, order) if size else (self.rows,):
                uniform.restart()
                logits = rows.pick(model(self.inputs))
                if data_loss is None:
                    loss = rows.mean(cross_entropy(logits, rows.labels))
                else:
                    loss = data_loss(logits, rows)
                if penalty is not None:
                    loss = loss + penalty()
                loss.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.detach()
            if after_epoch is not None:
                after_epoch()
                model.train()
        optimizer.save()
        steps = math.ceil(int(self.rows.count.max()) / size) if size else 1
        return [value / steps for value in total.tolist()]

    def open_optimizer(
        self, name: str, model: nn.Module, config: RunConfig
    ) -> StackedOptimizer:
        """Return the optimizer of some settings, see :meth:`Group.open_optimizer`."""
        return StackedOptimizer(
            model, self.clients, config=config, group=name, is_shared=self._is_whole
        )

    def draws(self, purpose: str) -> list[torch.Generator]:
        """Return the generator of each client's dropout, on its device."""
        assert self.server_round is not None
        seeds = [client.seed(self.server_round, purpose) for client in self.clients]
        return [torch.Generator(self.device).manual_seed(seed) for seed in seeds]

    def _uniform(
        self,
        draws: Sequence[torch.Generator],
        fields: Mapping[int, Sequence[Tensor]],
    ) -> Uniform:
        """Return numbers of each client for the rows of its training graph."""
        sizes = [client.data.inputs[0].num_nodes for client in self.clients]
        return Uniform(draws, sizes, fields)

    @contextmanager
    def drawing(self, purpose: str) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a source of uniform numbers, see :meth:`Group.drawing`."""
        yield self._uniform(self.draws(purpose), {})

    def draw_for(
        self,
        model: Backbone,
        draws: Sequence[torch.Generator],
        fields: Mapping[int, Sequence[Tensor]],
    ) -> Uniform:
        """Let the dropout of a network draw from the clients' generators."""
        uniform = self._uniform(draws, fields)
        for module in model.modules():
            if isinstance(module, Backbone):
                module.uniform = uniform
        return uniform

    def train_to_best(
        self, model: Backbone, loss_of: Callable[[Group], GraphLoss], *, lr: float,
        purpose: str, epochs: int | None = None,
    ) -> tuple[Backbone, list[float]]:  # fmt: skip
        """Train by whole-graph steps, see :meth:`Group.train_to_best`.

        A client that has stopped leaves the stack, alone or with the next ones.
        """
        config = self.config
        draws = self.draws(purpose)
        checks = [Checks(config.patience) for _ in self.clients]
        ends: list[dict[str, Tensor]] = [{} for _ in self.clients]
        losses = [math.nan] * len(self)
        stack, places, stopped = self, list(range(len(self))), set[int]()
        optimizer = StackedOptimizer(model, self.clients, lr=lr)
        epochs = config.local_epochs if epochs is None else epochs
        every = config.check_every or epochs
        for start in range(0, epochs, every):
            loss, mine = loss_of(stack), [draws[place] for place in places]
            fields = stack.data.fields(model.reach) if loss.of_training_nodes else {}
            uniform = stack.draw_for(model, mine, fields)
            steps = min(every, epochs - start)
            found = take_steps(model, loss, optimizer, steps, before=uniform.restart)
            states = stack.split(model.state_dict())
            for row, (place, value) in enumerate(
                zip(places, stack.validate(model), strict=True)
            ):
                if place in stopped:
                    continue
                losses[place], ends[place] = found[row], states[row]
                if checks[place].note(value, partial(copied, states[row])):
                    ends[place] = copied(states[row])
                    stopped.add(place)
            if len(stopped) == len(self):
                break
            left = [row for row, place in enumerate(places) if place not in stopped]
            if len(left) <= MOST_LEFT * len(places):
                places = [places[row] for row in left]
                clients = [self.clients[place] for place in places]
                stack = Cohort(clients, StackedData(clients), self.server_round or 0)
                model = stack.build_model([states[row] for row in left])
                optimizer = optimizer.part(model, left)
        kept = [one.kept or end for one, end in zip(checks, ends, strict=True)]
        return self.build_model(kept), losses

    @torch.inference_mode()
    def validate(self, model: Backbone) -> list[float]:
        """Return each client's accuracy on its validation nodes, NaN without any."""
        model.eval()
        hits, total = torch.zeros(len(self)), torch.zeros(len(self))
        for inputs, columns in zip(self.data.inputs, self.data.columns, strict=True):
            column = columns.get("val")
            if column is not None:
                rows = column.pick(model(inputs))
                right = column.client[rows.argmax(dim=1) == column.labels]
                hits += torch.bincount(right, minlength=len(self)).cpu()
                total += column.count.cpu()
        accuracy: list[float] = (hits.double() / total.double()).tolist()
        return accuracy

    @torch.inference_mode()
    def evaluate(
        self, model: Backbone, known_logits: Tensor | None = None
    ) -> list[dict[str, Scores]]:
        """Score each client's model, as :meth:`Client.evaluate` does.

        ``known_logits`` (K, n, C) are predictions for the training graphs.
        """
        model.eval()
        config, datas = self.config, [client.data for client in self.clients]
        is_few_shot = config.setting == "few-shot"
        extra = [MASKED] if is_few_shot else []
        out = [dict.fromkeys([*data.sizes, *extra], EMPTY) for data in datas]
        absent = cast(AbsentClasses, config.absent_classes)

        for inputs, columns in zip(self.data.inputs, self.data.columns, strict=True):
            used = {name: one for name, one in columns.items() if len(one.index)}
            if not used:
                continue
            if known_logits is not None and inputs is self.data.inputs[0]:
                logits = known_logits
            else:
                wanted = torch.zeros_like(inputs.real)
                for column in used.values():
                    wanted.view(-1)[column.index] = True
                logits = model.predict(inputs, wanted)
            parts = [(name, logits, column) for name, column in used.items()]
            if is_few_shot and "test" in used:
                own = torch.stack([data.own_classes for data in datas])
                masked = logits.masked_fill(~own[:, None], -math.inf)
                parts.append((MASKED, masked, used["test"]))
            for name, values, column in parts:
                picked, number = column.pick(values), len(self)
                nodes = picked.argmax(dim=-1), column.labels, column.client
                found = score_rows(
                    *nodes, number, self.num_classes, absent_classes=absent
                )
                if config.owners and name != MASKED:
                    found = self._with_areas(found, picked, column)
                for scores, score in zip(out, found, strict=True):
                    scores[name] = score
        return out

    def _with_areas(
        self, scores: Sequence[Scores], logits: Tensor, column: Rows
    ) -> list[Scores]:
        """Add AUROC and AUPRC to each client's scores of the ``logits`` (t, C)."""
        sizes = column.count.tolist()
        each = zip(
            *(torch.split(t, sizes) for t in (logits, column.labels)), strict=True
        )
        return [
            score_areas(score, own, y, y >= 0, self.num_classes)
            for score, (own, y) in zip(scores, each, strict=True)
        ]
