"""Clients that a client half trains at once: one as a ``Group``, or many as a ``Cohort``.

A client half that derives from :class:`GroupClientApp` is written once, for K clients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_fgl.client_apps.base import FglClientApp, Fit, once
from flower_fgl.client_apps.runtime.state import part_of
from flower_fgl.client_apps.runtime.training import (
    DataLoss,
    TrainingSet,
    load_state,
    make_optimizer,
    train_and_check,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.protocols.fedavg import Weights

if TYPE_CHECKING:
    from flower_fgl.client_apps.runtime.client import Client
    from flower_fgl.client_apps.runtime.session import Session
    from flower_fgl.client_apps.stacked.optimizer import StackedOptimizer
    from flower_fgl.core.config import RunConfig
    from flower_fgl.nn import Backbone, GraphInput
    from flower_fgl.nn.backbone import RecordingBackbone
    from flower_fgl.nn.gcn_gradient import GCNGradient
    from flower_fgl.protocols.base import Payload

__all__ = ["GraphLoss", "Group", "GroupClientApp", "GroupFit", "Rows", "RowsLoss"]
__all__ += ["GroupOptimizer", "cross_entropy", "take_steps", "terms_of_clients"]
__all__ += ["why_checked_alone"]

Module = TypeVar("Module", bound=nn.Module)
Steps: TypeAlias = "torch.optim.Optimizer | StackedOptimizer"
GroupOptimizer: TypeAlias = "OneOptimizer | StackedOptimizer"
"""Optimizer whose moments are in the states of the clients."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Training items of K clients: those of one optimizer step, or all.

    ``index`` (t,) are rows of the representations (K·n, p), client by client; ``client``
    (t,) is the client of each row, 0 to K − 1, ``labels`` (t,) its class; all int64.
    """

    index: Tensor
    client: Tensor
    labels: Tensor
    num_clients: int

    @classmethod
    def of_one(cls, index: Tensor, labels: Tensor) -> Rows:
        """Return the rows of one client."""
        return cls(index, torch.zeros_like(index), labels, 1)

    @cached_property
    def count(self) -> Tensor:
        """Rows of each client, of shape (K,), int64."""
        if self.num_clients == 1:
            return self.index.new_full((1,), len(self.index))
        return torch.bincount(self.client, minlength=self.num_clients)

    @cached_property
    def share(self) -> Tensor:
        """One divided by the number of rows of a row's client, of shape (t,)."""
        return 1 / self.count.clamp(min=1)[self.client]

    def sum(self, values: Tensor) -> Tensor:
        """Add the values (t, ...) of each client: (K, ...)."""
        if self.num_clients == 1:
            return values.sum(0, keepdim=True)
        shape = (self.num_clients, *values.shape[1:])
        return values.new_zeros(shape).index_add(0, self.client, values)

    def mean(self, values: Tensor) -> Tensor:
        """Average the values (t,) of each client: (K,)."""
        if self.num_clients == 1:
            return values.mean(0, keepdim=True)
        return self.sum(values * self.share)

    def pick(self, h: Tensor) -> Tensor:
        """Select the rows (t, p) of representations (K, n, p), of one client (n, p)."""
        return h.flatten(0, -2).index_select(0, self.index)

    def select(self, places: Tensor) -> Rows:
        """Return the rows at some places, client by client."""
        parts = (self.index[places], self.client[places], self.labels[places])
        return Rows(*parts, self.num_clients)

    def embedded(self, model: RecordingBackbone) -> tuple[Tensor, Rows]:
        """Return the embeddings (t', p) that the last step computed, and their rows.

        These are all rows, or those of the step if it read some graphs of a batch.
        """
        if model.items is None:
            return self.pick(model.embedding), self
        return model.embedding, self.select(torch.searchsorted(self.index, model.items))

    def cells(self, num_classes: int) -> Tensor:
        """Return client · C + class of each row, of shape (t,)."""
        return self.client * num_classes + self.labels

    def class_counts(self, num_classes: int) -> Tensor:
        """Count the rows of each client and class: (K, C)."""
        size = self.num_clients * num_classes
        found = torch.bincount(self.cells(num_classes), minlength=size)
        return found.view(self.num_clients, num_classes)


RowsLoss = Callable[[Tensor, Rows], Tensor]
"""Loss that replaces the cross-entropy of a step: takes logits (t, C) of the rows and the
rows, returns one loss per client, (K,)."""


class GraphLoss(Protocol):
    """Loss of a whole step, which finds the gradients of some networks without autograd."""

    of_training_nodes: ClassVar[bool]
    """Whether only what training nodes depend on is computed, by clients one by one."""

    def __call__(self, model: Backbone) -> Tensor:
        """Return one loss per client, (K,)."""

    def gradient(self, model: Backbone) -> GCNGradient | None:
        """Return what computes loss and gradients of a network, ``None`` for autograd."""


@dataclass(frozen=True)
class GroupFit:
    """Result of the local training of K clients.

    ``records`` returns ``to_record()`` of all uploads, packed at once; ``seconds`` are
    parts of the time of all clients together that are reported separately. ``model`` is
    ``None`` in an exchange that trains no model. ``terms`` of each client and ``logits``
    (K, n, C), of one client (N, C), are those of :class:`Fit`. ``states`` are those of the
    models that clients keep, if these are not just the rows of the state of ``model``.
    """

    model: Backbone | None
    uploads: Sequence[Payload]
    losses: Sequence[float]
    records: Callable[[], list[RecordDict]] | None = None
    terms: Sequence[Mapping[str, float]] = ()
    logits: Tensor | None = None
    states: Sequence[Mapping[str, Tensor]] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def of(self, place: int = 0) -> Fit:
        """Return the result of one client; model and logits are those of all."""
        terms = self.terms[place] if self.terms else {}
        parts = self.model, self.uploads[place], self.losses[place], self.seconds, terms
        return Fit(*parts, self.logits)


class Group:
    """The clients that one call of a client half trains: by itself one, K = 1.

    Its network and training loop are those of the client: receptive fields, links and
    batches of graphs exist only here. Weights and representations have no leading
    dimension. Without ``server_round`` it neither trains nor draws. ``rows`` are all
    training items, ``inputs`` the training graphs. ``memo`` holds results that are
    computed once for these graphs; ``real`` are the rows (K, n) that are no padding, of
    one client ``None``.
    """

    def __init__(
        self,
        client: Client,
        server_round: int | None = None,
        items: TrainingSet | None = None,
    ) -> None:
        self._items = items = items or client.data.training
        self.clients: Sequence[Client] = [client]
        self.server_round = server_round
        self.inputs: GraphInput = items.inputs
        self.rows = Rows.of_one(items.index, items.labels)
        self.config, self.device = client.config, client.device
        self.num_classes = client.data.num_classes
        self.memo: dict[tuple[Any, ...], Any] = client.data.memo
        self.real: Tensor | None = None

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def is_stacked(self) -> bool:
        """Whether weights and representations have a leading dimension K."""
        return self.real is not None

    @cached_property
    def all_rows(self) -> Rows:
        """All nodes, or graphs, of the training graphs, without labels (-1)."""
        inputs = self.inputs
        count = inputs.num_nodes if inputs.batch is None else inputs.num_graphs
        index = torch.arange(count, device=self.device)
        return Rows.of_one(index, torch.full_like(index, -1))

    def build_model(
        self, states: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor]
    ) -> Backbone:
        """Build the backbone with copies of one state, or of one per client."""
        return self.load(self.clients[0].build_model(), states)

    def load(
        self,
        network: Module,
        states: Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor],
    ) -> Module:
        """Give a network, which is changed, the weights of all clients."""
        load_state(network, states if isinstance(states, Mapping) else states[0])
        return network

    def build_own(self, *, own_weights: bool = False) -> Backbone:
        """Build the models trained last, the initial ones before the first training.

        The arguments are those of :meth:`Client.own_model`.
        """
        own = self.stored()
        if not all(own):
            initial = {} if own_weights else self.initial_state()
            own = [
                state
                or initial
                or client.build_model(initialise=True, own_weights=True).state_dict()
                for state, client in zip(own, self.clients, strict=True)
            ]
        return self.build_model(own)

    def receive(
        self, downloads: Sequence[Weights], build: Callable[[Client], Backbone]
    ) -> Backbone:
        """Build the network with the received weights, and those that stay on clients."""
        received = [download.tensors for download in downloads]
        if kept := self.clients[0].local_names():
            first = self.initial_state()
            own = [state or first for state in self.stored()]
            received = [
                {**{name: state[name] for name in kept}, **tensors}
                for state, tensors in zip(own, received, strict=True)
            ]
        return self.load(build(self.clients[0]), received)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the initial weights, the same for all clients of a backbone."""
        return self.clients[0].build_model(initialise=True).state_dict()

    def stored(self, group: str = "model") -> list[dict[str, Tensor]]:
        """Return tensors of each client's state, by default of the model trained last."""
        return [part_of(client.state.tensors, f"{group}/") for client in self.clients]

    def keep(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Store each client's part of stacked tensors as a group of its state."""
        for client, own in zip(self.clients, self.split(tensors), strict=True):
            client.state.set_group(group, own)

    def generators(self, purpose: str) -> list[torch.Generator]:
        """Return one CPU generator per client."""
        assert self.server_round is not None
        return [client.generator(self.server_round, purpose) for client in self.clients]

    @contextmanager
    def drawing(self, purpose: str) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a source of uniform numbers for dropout, seeded by client and purpose.

        It takes representations of all nodes and returns numbers of their shape.
        """
        assert self.server_round is not None
        with seeded(self.clients[0].seed(self.server_round, purpose), self.device):
            yield torch.rand_like

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
        """Train a network of :meth:`build_model`, or a wrapper of it, in place.

        The arguments are those of :meth:`Client.train`; ``data_loss`` and ``penalty``
        return a number per client, (K,), and ``after_epoch`` gets no loss. The result is
        the mean loss of each client's last epoch; NaN without epochs.
        """
        assert self.server_round is not None
        loss = self.clients[0].train(
            model,
            self.server_round,
            epochs=epochs,
            data_loss=self.of_step(data_loss),
            penalty=penalty and (lambda: penalty().sum()),
            after_epoch=after_epoch and (lambda _: after_epoch()),
            purpose=purpose,
        )
        return [loss]

    def train_to_best(
        self, model: Backbone, loss_of: Callable[[Group], GraphLoss], *, lr: float,
        purpose: str, epochs: int | None = None,
    ) -> tuple[Backbone, list[float]]:  # fmt: skip
        """Train by whole-graph steps; keep each client's best validation check.

        ``epochs``, by default ``local-epochs``, ``check-every`` and ``patience`` apply to
        each client, as in :func:`train_and_check`. The optimizer starts anew. ``model`` of
        :meth:`build_model` may be changed; ``loss_of`` returns the loss of a group, and may
        be called again for some of the clients. The result has the last loss of each.
        """
        assert self.server_round is not None
        client, loss = self.clients[0], loss_of(self)
        epochs = self.config.local_epochs if epochs is None else epochs
        optimizer = make_optimizer(model, self.config, lr=lr)

        def train(steps: int) -> float:
            return take_steps(model, loss, optimizer, steps)[0]

        with seeded(client.seed(self.server_round, purpose), self.device):
            value = train_and_check(
                model,
                train,
                lambda: client.validate(model),
                epochs=epochs,
                check_every=self.config.check_every or epochs,
                patience=self.config.patience,
            )
        return model, [value]

    def open_optimizer(
        self, name: str, model: nn.Module, config: RunConfig
    ) -> GroupOptimizer:
        """Return the optimizer of some settings; states keep its moments by its name."""
        return OneOptimizer(self.clients[0], name, model, config)

    def batches(
        self,
        size: int,
        generators: Sequence[torch.Generator],
        *,
        only_whole: bool = False,
    ) -> Iterator[Rows]:
        """Draw the training items of one epoch's steps, at most ``size`` of a client.

        With ``only_whole`` a client's remainder after its last whole batch is skipped.
        """
        orders, first = [], 0
        counts = self.rows.count.tolist()
        for count, generator in zip(counts, generators, strict=True):
            own = min(size or count, count)
            used = count - count % own if only_whole else count
            order = torch.randperm(count, generator=generator)[:used]
            orders.append(torch.split(order + first, own))
            first += count
        for parts in zip(*orders, strict=True):
            yield self.rows.select(torch.cat(parts).to(self.device))

    def pad(self, parts: Sequence[Tensor]) -> Tensor:
        """Stack tensors of each client, a row per node, as representations are."""
        return parts[0]

    def validate(self, model: Backbone) -> list[float]:
        """Return each client's score, see :meth:`Client.validate`."""
        return [self.clients[0].validate(model)]

    def of_step(self, data_loss: RowsLoss | None) -> DataLoss | None:
        """Return a loss of one client as :meth:`Client.train` takes it."""
        if data_loss is None:
            return None

        def loss(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            is_whole = index is self.rows.index
            rows = self.rows if is_whole else Rows.of_one(index, labels)
            return data_loss(logits, rows).sum()

        return loss

    def task_loss(self, model: Backbone, rows: Rows) -> Tensor:
        """Return the differentiable loss of the task of each client: (K,)."""
        logits = self._items.logits(model, rows.index)
        loss = self.clients[0].task_loss()
        if loss is None:
            return F.cross_entropy(logits, rows.labels)[None]
        return loss(logits, rows.labels, rows.index)[None]

    def epoch(self, purpose: str) -> Group:
        """Return the clients with the items of one epoch, if each epoch draws others."""
        if self.is_stacked:
            return self
        items = self._items.epoch(self.generators(purpose)[0])
        return Group(self.clients[0], self.server_round, items)

    def exchanged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leave out the weights that stay on a client, see :meth:`Client.shared`."""
        return self.clients[0].shared(tensors)

    def split(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the part of each client of stacked tensors."""
        return [dict(tensors)]

    def join(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack tensors of each client on the device; the inverse of :meth:`split`."""
        return {name: tensor.to(self.device) for name, tensor in states[0].items()}

    def fill(self, value: int) -> Tensor:
        """Return an int64 tensor with a number for each row: (K, n), of one client (N,)."""
        shape = (len(self.all_rows.index),) if self.real is None else self.real.shape
        return torch.full(shape, value, device=self.device)

    def split_rows(self, values: Tensor) -> list[Tensor]:
        """Return the rows of each client of (K, n, ...) without padding: (N, ...)."""
        return [values]

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split_rows` for int64 numbers; padding gets −1."""
        return parts[0].to(self.device)

    def fit_of_weights(
        self, model: Backbone, tensors: Mapping[str, Tensor], losses: Sequence[float]
    ) -> GroupFit:
        """Return the result of a method that uploads these weights."""
        shared = self.exchanged(tensors)
        uploads = [Weights(state) for state in self.split(shared)]
        records = partial(Weights.stacked_records, len(self), shared)
        return GroupFit(model, uploads, losses, records)


class GroupClientApp(FglClientApp):
    """Base of the client halves that are written for a :class:`Group` of clients.

    A class that sets ``stacked`` also trains many clients as one stack. A contract test
    compares both for every method: they must compute the same, up to rounding.
    """

    group_action: ClassVar[str] = ""
    """Action whose messages :meth:`act_group` handles for many clients at once. Like
    ``stacked`` it counts only for the class that declares it; that class need not be
    ``stacked``."""
    group_is_once: ClassVar[bool] = False
    """Whether that exchange takes place before round 1 only."""

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        if self.group_action:
            last = once if self.group_is_once else None
            self.train(self.group_action)(
                lambda message, context: self.handle_fit(
                    message, context, self.act, last=last
                )
            )

    def stack_key(self, client: Client, download: Any) -> Hashable:
        """Return what else the clients of one stack must have in common."""
        return ()

    def why_alone(self, client: Client) -> str:
        """Return why a client cannot train in a stack, empty if it can."""
        return ""

    def acts_in_stacks(self, config: RunConfig) -> bool:
        """Return whether :meth:`act_group` serves a run with these settings."""
        return True

    def fit(self, client: Client, server_round: int, download: Any) -> Fit:
        """Train one client."""
        return self.fit_group(Group(client, server_round), [download]).of()

    def act(self, client: Client, server_round: int, download: Any) -> Fit:
        """Handle a message of ``group_action`` to one client."""
        return self.act_group(Group(client, server_round), [download]).of()

    @abstractmethod
    def fit_group(self, group: Group, downloads: Sequence[Any]) -> GroupFit:
        """Train the clients; a broadcast is one object for all of them."""

    def act_group(self, group: Group, downloads: Sequence[Any]) -> GroupFit:
        """Handle the messages of ``group_action``.

        By default they are what :meth:`fit_group` trains, instead of the rounds.
        """
        return self.fit_group(group, downloads)

    def refreshed_group(
        self, group: Group, downloads: Sequence[Any]
    ) -> tuple[Backbone, Tensor | None]:
        """Return the refreshed models of a stack, and their logits if they are known.

        By default trained copies. A class that overrides ``refreshed_model`` overrides
        this too, or its clients are evaluated one by one.
        """
        result = self.fit_group(group, downloads)
        return cast("Backbone", result.model), result.logits


def why_checked_alone(config: RunConfig) -> str:
    """Return why :meth:`Group.train` of a stack cannot stop clients by ``check-every``."""
    if config.check_every and config.batch_size:
        return "check-every stops clients between batches"
    if config.check_every and config.optimizer_state == "keep":
        return 'check-every stops clients whose moments are kept (optimizer-state = "keep")'
    return ""


class OneOptimizer:
    """The optimizer of one client, with the methods of :class:`StackedOptimizer`."""

    def __init__(
        self, client: Client, name: str, model: nn.Module, config: RunConfig
    ) -> None:
        self._client, self._name, self._model = client, name, model
        self._optimizer = make_optimizer(model, config)
        client.restore_moments(name, model, self._optimizer)

    def step(self) -> None:
        """Update the weights by their gradients."""
        self._optimizer.step()

    def moments(self) -> dict[str, list[Tensor]]:
        """Return the moments of each parameter that has made a step, to be changed."""
        return {
            name: [
                value
                for value in self._optimizer.state.get(weight, {}).values()
                if isinstance(value, Tensor) and value.shape == weight.shape
            ]
            for name, weight in self._model.named_parameters()
        }

    def save(self) -> None:
        """Store the moments in the state, if the settings keep them."""
        self._client.keep_moments(self._name, self._model, self._optimizer)


def take_steps(
    model: Backbone,
    loss: GraphLoss,
    optimizer: Steps,
    number: int,
    *,
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    """Take optimizer steps in training mode; return the last loss of each client.

    ``before`` is called before each step.
    """
    model.train()
    value, parameters = torch.zeros(1), list(model.parameters())
    written = loss.gradient(model)
    for _ in range(number):
        before()
        if written is not None:
            written.compute()
        else:
            for parameter in parameters:
                parameter.grad = None
            value = loss(model)
            value.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if written is not None and number:
        value = written.loss()
    found: list[float] = value.tolist()
    return found


def terms_of_clients(
    terms: Mapping[str, Tensor], num_clients: int
) -> list[dict[str, float]]:
    """Return each client's part of terms (K,), those of one client ()."""
    names, columns = list(terms), [term.view(-1).tolist() for term in terms.values()]
    rows = zip(*columns, strict=True) if names else [()] * num_clients
    return [dict(zip(names, row, strict=True)) for row in rows]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row."""
    return F.cross_entropy(logits, labels, reduction="none")
