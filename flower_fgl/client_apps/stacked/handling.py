"""Handle the messages of many clients by stacked training and evaluation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from torch import Tensor

from flower_fgl.client_apps.base import FglClientApp, once
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.session import DataCache, Opened
from flower_fgl.client_apps.runtime.state import part_of
from flower_fgl.client_apps.runtime.training import refuse_non_finite
from flower_fgl.client_apps.stacked.cohort import Cohort, StackedData
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.client_apps.stacked.grouping import (
    Backbones,
    cut,
    is_worthwhile,
    num_stacks,
    why_not_run,
)
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.core.flower_internals import reply_with
from flower_fgl.core.metrics import Scores
from flower_fgl.nn import Backbone
from flower_fgl.nn.stacked import split_state
from flower_fgl.protocols.base import METRICS, find_record, read_tensors, round_settings

log = logging.getLogger(__name__)

__all__ = ["Stacker"]

CACHE_BYTES = 1 << 30
"""Memory of stacked graphs that are kept for the next exchange."""
Item = tuple[Message, Context]
Answer = Message | Exception


@dataclass(eq=False)
class Placed(Opened):
    """A client whose message can be handled in a stack, and its place in the exchange.

    Clients of one stack have the same ``key``.
    """

    place: int = 0
    seconds: float = 0.0
    key: tuple[Any, ...] = ()


def reader_of(app: FglClientApp) -> Callable[[Client, RecordDict], Any]:
    """Return a reader of downloads that reads one of several clients once."""
    names, known = app.down.records, dict[tuple[int, ...], tuple[Any, Any]]()

    def read(client: Client, content: RecordDict) -> Any:
        records = [find_record(content, name, ArrayRecord) for name in names]
        if None in records:
            return app.read_download(client, content)
        key, spec = tuple(map(id, records)), app.download_spec(client)
        if key not in known or known[key][0] != spec:
            known[key] = spec, app.read_download(client, content)
        return known[key][1]

    return read


class Stacker:
    """Trains and evaluates clients of one process together; keeps their stacked graphs."""

    def __init__(self) -> None:
        self._backbones = Backbones()
        self._kept = DataCache[StackedData](CACHE_BYTES, lambda one: one.num_bytes)

    def handle(
        self, app: FglClientApp, items: Sequence[Item], *, is_forced: bool
    ) -> dict[int, Answer]:
        """Return replies, or clients' errors, by place of messages that can be stacked.

        The items are messages of one exchange to different clients; the others must be
        handled one by one. If ``is_forced``, clients are stacked also where that is not
        faster, and training messages that cannot be stacked are refused.
        """
        kinds = {message.metadata.message_type for message, _ in items}
        action = str(vars(type(app)).get("group_action", ""))
        if action and kinds == {f"{MessageType.TRAIN}.{action}"}:
            assert isinstance(app, GroupClientApp)
            if not app.acts_in_stacks(app.session.config(items[0][1])):
                return {}
            return self._train(app, items, is_forced=is_forced, is_action=True)
        has_rounds = not action or (
            isinstance(app, GroupClientApp)
            and type(app).act_group is not GroupClientApp.act_group
        )
        if kinds == {MessageType.TRAIN} and has_rounds:
            return self._train(app, items, is_forced=is_forced)
        if kinds == {MessageType.EVALUATE}:
            return self._evaluate(app, items, is_forced=is_forced)
        return {}

    def _train(
        self,
        app: FglClientApp,
        items: Sequence[Item],
        *,
        is_forced: bool,
        is_action: bool = False,
    ) -> dict[int, Answer]:
        """Train the clients that can be stacked."""
        config = app.session.config(items[0][1])
        if not (is_stackable(app) or is_action):
            reason = f"{config.method} has no stacked form"
        else:
            reason = why_not_run(config, items[0][1].node_config)
        if reason:
            return _refused(dict.fromkeys(range(len(items)), reason), is_forced)
        assert isinstance(app, GroupClientApp)
        download_of = reader_of(app)

        def read(client: Client, content: RecordDict) -> tuple[Any, Hashable] | str:
            if not is_action and (reason := app.why_alone(client)):
                return reason
            download = download_of(client, content)
            return download, () if is_action else app.stack_key(client, download)

        last = once if is_action and app.group_is_once else None
        train = app.act_group if is_action else app.fit_group
        opened, refused = self._open(app, dict(enumerate(items)), read, last)

        def handle(cohort: list[Placed], is_whole: bool) -> dict[int, Answer]:
            return self._train_cohort(app, cohort, train, is_whole=is_whole)

        answers = self._answer(opened, handle, is_forced=is_forced)
        return answers | _refused(refused, is_forced)

    def _answer(
        self,
        opened: Sequence[Placed],
        handle: Callable[[list[Placed], bool], dict[int, Answer]],
        *,
        is_forced: bool,
    ) -> dict[int, Answer]:
        """Handle the messages of each cohort, without those of one whose stack fails."""
        answers: dict[int, Answer] = {}
        for cohort, is_whole in self._cohorts(opened, is_forced=is_forced):
            try:
                answers |= handle(cohort, is_whole)
            except Exception as error:
                if is_forced:
                    raise
                log.warning(
                    "%d clients are handled one by one, because stacking failed: %s",
                    len(cohort),
                    error,
                    exc_info=True,
                )
        return answers

    def _open(
        self,
        app: FglClientApp,
        items: Mapping[int, Item],
        read: Callable[[Client, RecordDict], tuple[Any, Hashable] | str],
        last: Callable[[Client], int] | None = None,
    ) -> tuple[list[Placed], dict[int, str]]:
        """Open clients; return those to stack, and reasons against others.

        ``read`` returns a client's download and a further part of its key, or a reason.
        """
        opened, refused = [], {}
        for place, (message, context) in items.items():
            clock = time.perf_counter()
            try:
                one = app.open_once(message, context, last=last)
                client = one.client
                key = self._backbones.key(client)
                found = key if isinstance(key, str) else read(client, message.content)
            except Exception as error:  # handled one by one, it fails in the usual way
                log.debug("Client of message %d is not stacked: %s", place, error)
                continue
            if isinstance(found, str):
                refused[place] = found
                continue
            spent = time.perf_counter() - clock
            one.download = found[0]
            key = (*key, found[1])
            opened.append(Placed(**vars(one), place=place, seconds=spent, key=key))
        return opened, refused

    def _cohorts(
        self, opened: Sequence[Placed], *, is_forced: bool
    ) -> list[tuple[list[Placed], bool]]:
        """Divide opened clients into cohorts, and tell whether each will come again."""
        if not opened:
            return []
        first, config = opened[0].client, opened[0].client.config
        size = 4 * sum(map(math.prod, first.state_shapes().values()))
        # on a GPU all clients are in one stack
        is_cpu = first.device.type == "cpu"
        stacks = num_stacks(first.num_partitions) if is_cpu else 1
        pairs = [
            ((one.key, one.client.partition_id % stacks), one.client) for one in opened
        ]
        is_whole = config.participation == 1 and not config.participants
        return [
            ([opened[place] for place in places], is_whole)
            for places in cut(pairs, bytes_per_client=size)
            if is_forced or is_worthwhile([opened[place].client for place in places])
        ]

    def _data(self, clients: Sequence[Client]) -> StackedData:
        """Return the stacked graphs of some clients, cached."""
        key = tuple(id(client.data) for client in clients)
        return self._kept.get(key, lambda: StackedData(clients))

    def _train_cohort(
        self,
        app: GroupClientApp,
        opened: Sequence[Placed],
        train: Callable[[Group, Sequence[Any]], GroupFit],
        *,
        is_whole: bool,
    ) -> dict[int, Answer]:
        """Train one cohort, and pack the reply of each client."""
        clock = time.perf_counter()
        clients = [one.client for one in opened]
        server_round, data = opened[0].server_round, self._data(clients)
        cohort = Cohort(clients, data, server_round, is_whole=is_whole)
        result = train(cohort, [one.download for one in opened])
        spent = time.perf_counter() - clock - sum(result.seconds.values())
        parts = {"train": max(0.0, spent), **result.seconds}
        seconds = {name: value / len(opened) for name, value in parts.items()}
        found: Sequence[dict[str, Scores] | None] = [None] * len(opened)
        tensors: Mapping[str, Tensor] = {}
        if result.model is not None:
            tensors = result.model.state_dict()
        if tensors and round_settings(opened[0].message.content)["evaluate"]:
            clock = time.perf_counter()
            found = cohort.evaluate(cast(Backbone, result.model), result.logits)
            seconds["evaluate"] = (time.perf_counter() - clock) / len(opened)
        states = result.states or split_state(tensors, len(opened))
        contents: Sequence[RecordDict | None] = [None] * len(opened)
        if result.records is not None and not app.changes_uploads(cohort.config):
            contents = result.records()
        answers = _diverged(opened, tensors)
        for number, one in enumerate(opened):
            if one.place in answers:
                continue
            try:
                if states[number]:
                    state = one.client.state
                    state.set_group("model", states[number], is_copied=not is_whole)
                scores = found[number]
                answers[one.place] = app.pack_fit(
                    one,
                    result.of(number),
                    {} if scores is None else {"local": scores},
                    {"load": one.seconds, **seconds},
                    contents[number],
                )
            except Exception as error:
                answers[one.place] = error
        return answers

    def _evaluate(
        self, app: FglClientApp, items: Sequence[Item], *, is_forced: bool
    ) -> dict[int, Answer]:
        """Evaluate global models, clients' own models, and refreshed copies of them."""
        config = app.session.config(items[0][1])
        if not is_stackable(app) or why_not_run(config, items[0][1].node_config):
            return {}
        assert isinstance(app, GroupClientApp)
        shared: dict[int, Mapping[str, Tensor]] = {}
        download_of = reader_of(app)
        kind = type(app)
        refreshes = kind.refreshed_model is FglClientApp.refreshed_model
        refreshes |= kind.refreshed_group is not GroupClientApp.refreshed_group

        def read(client: Client, content: RecordDict) -> tuple[Any, Hashable] | str:
            settings = round_settings(content)
            modes = tuple(map(str, settings["modes"]))  # type: ignore[arg-type]
            download, same, key = None, 0, None
            if settings["refresh"] and "local" in modes:
                if reason := app.why_alone(client):
                    return reason
                download = download_of(client, content)
                key = (app.stack_key(client, download),)
            elif "local" in modes and not _holds_backbone(client):
                return "its model is not a backbone alone"
            if "global" in modes:
                same = id(content["global"])
                if same not in shared:
                    shapes = client.state_shapes()
                    shared[same] = read_tensors(content, "global", shapes)
            return (download, shared.get(same)), (same, modes, key)

        settings = [round_settings(message.content) for message, _ in items]
        fitting = {
            place: item
            for place, item in enumerate(items)
            if not settings[place].get("mixed")
            and (refreshes or not settings[place]["refresh"])
            and "calibration" not in settings[place]
        }
        opened, _ = self._open(app, fitting, read)

        def handle(cohort: list[Placed], is_whole: bool) -> dict[int, Answer]:
            return self._evaluate_cohort(app, cohort)

        return self._answer(opened, handle, is_forced=is_forced)

    def _evaluate_cohort(
        self, app: GroupClientApp, opened: Sequence[Placed]
    ) -> dict[int, Answer]:
        """Evaluate one cohort, and pack the reply of each client."""
        clock = time.perf_counter()
        clients = [one.client for one in opened]
        data = self._data(clients)
        cohort = Cohort(clients, data, 0)
        settings = round_settings(opened[0].message.content)
        scores: list[dict[str, dict[str, Scores]]] = [{} for _ in opened]
        answers: dict[int, Answer] = {}
        for mode in settings["modes"]:  # type: ignore[union-attr]
            if mode != "global" and settings["refresh"]:
                config = app.refresh_config(clients[0].config)
                copies = [replace(client, config=config) for client in clients]
                trained = Cohort(copies, data, opened[0].server_round + 1)
                downloads = [one.download[0] for one in opened]
                model, logits = app.refreshed_group(trained, downloads)
                answers |= _diverged(opened, model.state_dict())
                values = trained.evaluate(model, logits)
            else:
                states = opened[0].download[1] if mode == "global" else cohort.stored()
                values = cohort.evaluate(cohort.build_model(states))
            for mine, found in zip(scores, values, strict=True):
                mine[str(mode)] = found
        seconds = {"evaluate": (time.perf_counter() - clock) / len(opened)}
        for one, mine in zip(opened, scores, strict=True):
            if one.place in answers:
                continue
            try:
                app.keep(one, is_state_new=False)
                metrics = app.session.pack_metrics(one.context, mine, seconds)
                content = RecordDict({METRICS: metrics})
                answers[one.place] = reply_with(one.message, content)
            except Exception as error:
                answers[one.place] = error
        return answers


def _diverged(
    opened: Sequence[Placed], tensors: Mapping[str, Tensor]
) -> dict[int, Answer]:
    """Return the error of each client whose weights are not finite."""
    answers: dict[int, Answer] = {}
    for number, is_good in enumerate(finite_clients(tensors) if tensors else ()):
        if not is_good:
            try:
                refuse_non_finite(split_state(tensors, len(opened))[number])
            except FglError as error:
                answers[opened[number].place] = error
    return answers


def is_stackable(app: FglClientApp) -> bool:
    """Return whether the class of a client half itself declares ``stacked``."""
    return bool(vars(type(app)).get("stacked"))


def _holds_backbone(client: Client) -> bool:
    """Return whether the stored model is the run's backbone: a step may add to it."""
    kept = part_of(client.state.tensors, "model/")
    return {n: tuple(t.shape) for n, t in kept.items()} == client.state_shapes()


def _refused(reasons: Mapping[int, str], is_forced: bool) -> dict[int, Answer]:
    """Return an error for each client that cannot be stacked, if stacking is forced."""
    if not is_forced:
        return {}
    return {
        place: RunError(
            f'stacked = "true", but the client cannot be stacked: {reason}. '
            'Use stacked = "auto".'
        )
        for place, reason in reasons.items()
    }


def finite_clients(tensors: Mapping[str, Tensor]) -> list[bool]:
    """Return for each client whether all its weights (K, ...) are finite."""
    # a finite sum has finite terms only; the sum of finite terms may overflow
    numbers = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    sums = [tensor.sum(tuple(range(1, tensor.dim()))) for tensor in numbers]
    if torch.stack(sums).isfinite().all():
        return [True] * len(sums[0])
    rows = [tensor.isfinite().flatten(1).all(1) for tensor in numbers]
    found: list[bool] = torch.stack(rows).all(0).tolist()
    return found
