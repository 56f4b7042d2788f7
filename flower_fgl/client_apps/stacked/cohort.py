"""A group of clients that train and are evaluated together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.runtime.client import EMPTY, MASKED, Client
from flower_fgl.client_apps.stacked.optimizer import StackedOptimizer
from flower_fgl.client_apps.stacked.scores import Column, score_segments
from flower_fgl.core.metrics import AbsentClasses, Scores
from flower_fgl.core.seeds import torch_generator
from flower_fgl.nn import Backbone
from flower_fgl.nn.computation_graph import output_nodes
from flower_fgl.nn.stacked import StackedInput, stack_model

__all__ = ["Cohort", "Rows", "StackedData", "StackedLoss"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Training nodes of K clients: those of one optimizer step, or all.

    Parameters
    ----------
    index : Tensor of shape (t,), int64
        Rows of the flattened representations (K·n, p), client by client.
    client : Tensor of shape (t,), int64
        Client of each row, 0 to K − 1.
    labels : Tensor of shape (t,), int64
        Classes.
    num_clients : int
        K.
    """

    index: Tensor
    client: Tensor
    labels: Tensor
    num_clients: int

    count: Tensor = field(init=False)
    """Rows of each client, of shape (K,), int64."""
    share: Tensor = field(init=False)
    """One divided by the number of rows of a row's client, of shape (t,)."""

    def __post_init__(self) -> None:
        count = torch.bincount(self.client, minlength=self.num_clients)
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "share", 1 / count.clamp(min=1)[self.client])

    def sum(self, values: Tensor) -> Tensor:
        """Add the values (t, ...) of each client: (K, ...)."""
        shape = (self.num_clients, *values.shape[1:])
        return values.new_zeros(shape).index_add(0, self.client, values)

    def mean(self, values: Tensor) -> Tensor:
        """Average the values (t,) of each client: (K,)."""
        return self.sum(values * self.share)

    def pick(self, h: Tensor) -> Tensor:
        """Select the rows (t, p) of representations (K, n, p)."""
        return h.flatten(0, 1).index_select(0, self.index)

    def select(self, places: Tensor) -> Rows:
        """Return the rows at some places, client by client."""
        return Rows(
            self.index[places],
            self.client[places],
            self.labels[places],
            self.num_clients,
        )


StackedLoss = Callable[[Tensor, Rows], Tensor]
"""Loss that replaces the cross-entropy of a step: takes logits (t, C) of the rows and the
rows, returns one loss per client, (K,)."""


class StackedData:
    """Graphs, training nodes and score columns of K clients, for many rounds.

    Parameters
    ----------
    clients : sequence of Client
        The clients, with the same columns.

    Attributes
    ----------
    inputs : list of StackedInput
        Training graphs, then each evaluation graph.
    rows : Rows
        All training nodes.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        datas = [client.data for client in clients]
        self.inputs = [
            StackedInput(graphs)
            for graphs in zip(*(data.inputs for data in datas), strict=True)
        ]
        counts = torch.tensor([data.training.index.numel() for data in datas])
        device = datas[0].training.index.device
        place = torch.repeat_interleave(torch.arange(len(datas)), counts).to(device)
        index = torch.cat([data.training.index for data in datas])
        labels = torch.cat([data.training.labels for data in datas])
        first = place * self.inputs[0].num_rows
        self.rows = Rows(index + first, place, labels, len(datas))
        self._first = (counts.cumsum(0) - counts).tolist()
        self._counts = counts.tolist()
        self._training = [data.training for data in datas]
        self._fields: dict[int, dict[int, list[Tensor]]] = {}
        self.columns = [
            {
                name: Column(
                    [data.columns[number][name] & (data.labels[number] >= 0)
                     for data in datas],
                    [data.labels[number] for data in datas],
                    inputs.num_rows,
                )
                for name in datas[0].columns[number]
            }
            for number, inputs in enumerate(self.inputs)
        ]  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory, in bytes."""
        return sum(inputs.num_bytes for inputs in self.inputs)

    def all_rows(self) -> Rows:
        """Return all nodes of the training graphs, without labels (-1)."""
        real = self.inputs[0].real
        index = real.flatten().nonzero().squeeze(1)
        client = real.nonzero()[:, 0]
        return Rows(index, client, torch.full_like(index, -1), len(real))

    def fields(self, reach: int | None) -> dict[int, list[Tensor]]:
        """Return the nodes that each layer computes, by place of a client.

        Only clients that train on the receptive field of all their training nodes are
        contained, see :meth:`TrainingSet.field_of`.
        """
        if not reach:
            return {}
        if reach not in self._fields:
            found = {
                place: training.field_of(reach, training.index)
                for place, training in enumerate(self._training)
            }
            self._fields[reach] = {
                place: output_nodes(field, reach)
                for place, field in found.items()
                if field is not None
            }
        return self._fields[reach]

    def steps(self, size: int) -> int:
        """Return the optimizer steps of one epoch with batches of ``size`` (0: all)."""
        return math.ceil(max(self._counts) / size) if size else 1

    def batches(
        self, size: int, generators: Sequence[torch.Generator]
    ) -> Iterator[Rows]:
        """Draw one epoch's batches of every client from its own generator."""
        orders = [
            torch.split(torch.randperm(count, generator=generator) + first, size)
            for count, first, generator in zip(
                self._counts, self._first, generators, strict=True
            )
        ]
        for parts in zip(*orders, strict=True):
            yield self.rows.select(torch.cat(parts).to(self.rows.index.device))


class Uniform:
    """Uniform numbers of each client from its own generator.

    Parameters
    ----------
    generators : sequence of torch.Generator
        One per client, on the clients' device.
    sizes : sequence of int
        Nodes of each client; the padding gets zeros.
    fields : mapping of int to (sequence of Tensor of shape (n_l,), int64)
        For clients that train on a receptive field: the nodes that each layer computes.
        Other rows, which do not reach the loss, get zeros.
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
            elif size == len(rows):
                rows.uniform_(generator=generator)
            else:
                rows[:size].uniform_(generator=generator)
        self._layer += 1
        return out


class Cohort:
    """Clients that train together in one exchange.

    Parameters
    ----------
    clients : sequence of Client
        K clients that :func:`~flower_fgl.client_apps.stacked.grouping.stack_key` puts
        together.
    data : StackedData
        Their graphs.
    server_round : int
        Round; part of the seeds.
    is_whole : bool
        Whether the same clients will train together again, so that their states may
        share memory.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        data: StackedData,
        server_round: int,
        *,
        is_whole: bool = False,
    ) -> None:
        self.clients, self.data, self.server_round = clients, data, server_round
        self.config, self.device = clients[0].config, clients[0].device
        self.num_classes = clients[0].data.num_classes
        self._is_whole = is_whole
        self._sizes = [client.data.inputs[0].num_nodes for client in clients]

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def inputs(self) -> StackedInput:
        """The training graphs."""
        return self.data.inputs[0]

    @property
    def rows(self) -> Rows:
        """All training nodes."""
        return self.data.rows

    def build_model(
        self, states: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor]
    ) -> Backbone:
        """Build the stacked backbone with copies of one state, or of one per client."""
        template = self.clients[0].build_model()
        if not isinstance(states, Mapping) and all(s is states[0] for s in states):
            states = states[0]
        return stack_model(template, states, len(self), torch.rand_like, is_spare=True)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the initial weights, the same for all clients of a backbone."""
        return self.clients[0].build_model(initialise=True).state_dict()

    def stored_models(self) -> list[dict[str, Tensor]]:
        """Return the state of the model that each client trained last, or nothing."""
        start = "model/"
        return [
            {
                name[len(start) :]: tensor
                for name, tensor in client.state.tensors.items()
                if name.startswith(start)
            }
            for client in self.clients
        ]

    def generators(
        self, purpose: str, device: torch.device | None = None
    ) -> list[torch.Generator]:
        """Return one generator per client, as :meth:`Client.train` derives its seeds."""
        if device is None:
            return [
                torch_generator(
                    self.config.seed, self.server_round, client.partition_id, purpose
                )
                for client in self.clients
            ]
        return [
            torch.Generator(device).manual_seed(client.seed(self.server_round, purpose))
            for client in self.clients
        ]

    def train(
        self,
        model: Backbone,
        *,
        epochs: int | None = None,
        data_loss: StackedLoss | None = None,
        penalty: Callable[[], Tensor] | None = None,
        purpose: str = "training",
    ) -> list[float]:
        """Train the stacked model, as :meth:`Client.train` trains each client's.

        Parameters
        ----------
        model : Backbone
            From :meth:`build_model`, or a wrapper of it. Trained in place.
        epochs : int, optional
            Number of epochs; by default ``local-epochs``.
        data_loss : StackedLoss, optional
            Loss of the training nodes; by default the cross-entropy.
        penalty : callable, optional
            Returns a term per client, of shape (K,), added to the loss.
        purpose : str
            Part of the seeds.

        Returns
        -------
        list of float
            Mean loss of each client's last epoch; NaN without epochs.
        """
        size = self.config.batch_size
        epochs = self.config.local_epochs if epochs is None else epochs
        optimizer = StackedOptimizer(model, self.clients)
        fields = {} if size else self.data.fields(model.reach)
        uniform = Uniform(self.generators(purpose, self.device), self._sizes, fields)
        for module in model.modules():
            if isinstance(module, Backbone):
                module.uniform = uniform
        is_main = purpose == "training"
        order = (
            self.generators("batches" if is_main else f"batches of {purpose}")
            if size
            else []
        )
        model.train()
        total = torch.full((len(self),), math.nan, device=self.device)
        for _ in range(epochs):
            total = torch.zeros(len(self), device=self.device)
            for rows in self.data.batches(size, order) if size else (self.rows,):
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
        optimizer.save(is_shared=self._is_whole)
        steps = self.data.steps(size)
        return [value / steps for value in total.tolist()]

    @torch.inference_mode()
    def evaluate(self, model: Backbone) -> list[dict[str, Scores]]:
        """Score each client's model, as :meth:`Client.evaluate` does."""
        model.eval()
        config, datas = self.config, [client.data for client in self.clients]
        is_few_shot = config.setting == "few-shot"
        extra = [MASKED] if is_few_shot else []
        out = [dict.fromkeys([*data.sizes, *extra], EMPTY) for data in datas]
        absent = cast(AbsentClasses, config.absent_classes)

        def add(name: str, logits: Tensor, column: Column) -> None:
            found = score_segments(
                logits, column, self.num_classes, absent_classes=absent
            )
            for scores, values in zip(out, found, strict=True):
                scores[name] = values

        for inputs, columns in zip(self.data.inputs, self.data.columns, strict=True):
            used = {name: column for name, column in columns.items() if len(column)}
            if not used:
                continue
            logits = model(inputs)
            for name, column in used.items():
                add(name, logits, column)
            if is_few_shot and "test" in used:
                own = torch.stack([data.own_classes for data in datas])
                masked = logits.masked_fill(~own[:, None], -math.inf)
                add(MASKED, masked, used["test"])
        return out


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row."""
    return F.cross_entropy(logits, labels, reduction="none")
