"""The message handling of every client half, and the hooks that methods override."""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import owner_name
from flower_fgl.client_apps.runtime.describe import check_node, describe, to_reply
from flower_fgl.client_apps.runtime.model_store import save_best_model
from flower_fgl.client_apps.runtime.protection import privatize
from flower_fgl.client_apps.runtime.secure_aggregation import answer, join, pack_masked
from flower_fgl.client_apps.runtime.session import Opened, Session
from flower_fgl.client_apps.runtime.state import ClientState, ContextStates, StateStore
from flower_fgl.client_apps.runtime.training import load_state, refuse_non_finite
from flower_fgl.core.calibration import Calibration
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import FglError, PayloadError
from flower_fgl.core.extensions import Kind, owner_of
from flower_fgl.core.flower_internals import reply_with
from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.node_settings import floors_in_force
from flower_fgl.datasets.store import log_notes, open_store
from flower_fgl.datasets.suspect import suspect_data
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.protocols.base import (
    DESCRIBE,
    METRICS,
    RESUME,
    STATELESS,
    Payload,
    read_tensors,
    round_settings,
)
from flower_fgl.protocols.describe import AGREEMENT, Rejection
from flower_fgl.protocols.exchanges import (
    CALIBRATE,
    TARGETS,
    CalibrationSums,
    FinalModel,
)
from flower_fgl.protocols.secure_aggregation.messages import CHECK, KEYS, SHARES, UNMASK

__all__ = ["FglClientApp", "Fit", "once"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """Result of local training: the client's personalized model, and its upload.

    ``evaluate = "local"`` scores ``model``; it is ``None`` in an exchange that trains none.
    ``seconds`` are parts of the training time that are reported separately, ``terms`` are
    terms of the loss and other numbers, for the log. ``logits`` (N, C) are predictions of
    ``model``, without dropout, for all nodes (or graphs) of the graph that it was trained
    on: the scores then need no further pass.
    """

    model: Backbone | None
    upload: Payload
    loss: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    logits: Tensor | None = None


class FglClientApp(ClientApp, ABC):
    """Base of all client halves.

    A method sets ``down`` and ``up`` and overrides :meth:`fit`, and where needed
    :meth:`download_spec` and :meth:`personal_model`. ``session`` is the cache of the
    process, shared by all messages.
    """

    down: ClassVar[type[Payload]]
    up: ClassVar[type[Payload]]
    depends_on_download: ClassVar[bool] = True
    """Whether the upload depends on the download; if not, secure aggregation opens sums
    over one set of clients only."""
    stacked: ClassVar[bool] = False
    """Whether clients may also be trained as one stack, see
    :class:`~flower_fgl.client_apps.stacked.group.GroupClientApp`. It counts only for the
    class that declares it: a subclass may train differently."""

    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self.session = session or Session()
        self._open: dict[int, Opened] = {}
        self.query(DESCRIBE)(self._describe)
        self.query(RESUME)(self.session.rewind)
        self.answer_once(TARGETS, self._targets, last=once, is_state_new=False)
        self.answer_once(CALIBRATE, self._calibrate, masked=FinalModel.records)
        self.train()(
            lambda message, context: self.handle_fit(message, context, self.fit)
        )
        self.evaluate()(self._evaluate)
        for kind in (KEYS, SHARES, CHECK, UNMASK):
            self.query(kind)(partial(answer, self.session))

    @abstractmethod
    def fit(self, client: Client, server_round: int, download: Any) -> Fit:
        """Train, and return the model and the upload."""

    def download_spec(self, client: Client) -> Any:
        """Return the specification that :meth:`Payload.from_record` checks against."""
        return None

    def build(self, client: Client) -> Backbone:
        """Build the network to train, by default the backbone; weights are overwritten."""
        return client.build_model()

    def first_model(self, client: Client, download: Any) -> Backbone | None:
        """Return the model of a client that has not trained yet, by default ``None``."""
        return None

    def personal_model(self, client: Client, download: Any) -> Backbone | None:
        """Return the client's current model.

        By default it is the one trained last, before the first training
        :meth:`first_model`. ``None`` if the client has no model yet.
        """
        saved = client.state.group("model")
        if not saved:
            return self.first_model(client, download)
        model = self.build(client)
        load_state(model, saved)
        return model

    def refreshed_model(
        self, client: Client, server_round: int, download: Any
    ) -> Backbone | None:
        """Train a copy of the model for ``final-local-epochs``, to evaluate it.

        Used with ``eval-policy = "refresh"`` for clients that were not sampled, with
        ``"refresh-all"`` for all. By default the result of :meth:`fit` with that number
        of ``local-epochs``. ``client`` is a copy: changes of its ``state`` are discarded.
        ``server_round`` is the next round, whose seeds and ``download`` the training uses.
        ``None`` if the client has no model.
        """
        short = self.refresh_config(client.config)
        return self.fit(replace(client, config=short), server_round, download).model

    def refresh_config(self, config: RunConfig) -> RunConfig:
        """Return the settings with which a copy is trained to evaluate it.

        By default ``local-epochs`` is ``final-local-epochs``, see :meth:`refreshed_model`.
        """
        return replace(config, local_epochs=config.final_local_epochs)

    def received_model(self, client: Client, download: Any) -> Backbone | None:
        """Return the model of a download before it is trained, to evaluate it.

        Used with ``evaluate = "mixed"``. By default the :meth:`personal_model` of a client
        that has never trained. Override it if predictions also need the client's state.
        """
        untrained = replace(client, state=ClientState())
        return self.personal_model(untrained, download)

    def empty_model(self, client: Client) -> Backbone:
        """Build the network of the aggregated model; its weights are overwritten.

        Used with ``evaluate = "global"`` and ``"both"``. By default that of :meth:`build`.
        """
        return self.build(client)

    def embed_kinds(
        self, client: Client, weights: Mapping[str, Tensor]
    ) -> Mapping[str, tuple[Tensor, Tensor]] | None:
        """Embed training, test and synthetic nodes for a figure; ``None`` without these.

        ``client`` is as it was when ``weights``, the state of the server half, were
        aggregated. The result has embeddings (n, p) and classes (n,) by kind.
        """
        return None

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Gather a client's graph, settings and memory, see :meth:`Session.open`."""
        return self.session.open(message, context)

    def _describe(self, message: Message, context: Context) -> Message:
        """Answer the describe query; a data owner may reject the run instead."""
        name = owner_name(context.node_config)
        try:
            client, store = self.open(message, context)
            check_node(context.node_config, client.config)
            record = self.session.split_record(client.data, context)
            if record is not None and floors_in_force(context.node_config):
                record.keep()  # the numbers of many splits reveal what floors hide
        except FglError as error:
            if "graph" not in context.node_config:
                raise
            return Message(Rejection(name, str(error)).to_record(), reply_to=message)
        if AGREEMENT not in message.content:  # a numbered owner is described again
            self._log_notes(client, context)
            if isinstance(store, ContextStates) and "graph" in context.node_config:
                log.warning(
                    "This node has no state-dir in its node config: if its SuperNode is "
                    "restarted, it loses its state (own model, optimizer, what its method "
                    "keeps)."
                )
        description = describe(
            client.data,
            client.config,
            place=(client.partition_id, client.num_partitions),
            model=client.model_name if client.num_partitions else "",
            name=name or client.data.graph.name,
            about=str(context.node_config.get("about", "")),
            # a data owner sends its key once it has a number
            public_key=join(client, store, context)
            if client.config.secure_aggregation and client.num_partitions
            else b"",
        )
        return Message(to_reply(description), reply_to=message)

    def _log_notes(self, client: Client, context: Context) -> None:
        """Log notes on suspect data, which stay on this machine.

        The local engine logs them before the run, and so does ``flower-fgl run``. Of
        several partitions of one dataset the first one logs those of all.
        """
        if "graph" in context.node_config:
            notes = suspect_data(client.data.graph)
            log_notes({owner_name(context.node_config): notes})
        elif self.session.memory is None and client.partition_id == 0:
            open_store(client.config, client.num_partitions).log_notes()

    def _targets(self, opened: Opened) -> Payload:
        """Return the statistics of the training numbers, before their scale is known."""
        from flower_fgl.client_apps.runtime.target_scaling import target_statistics

        return target_statistics(opened.client.data, opened.client.config)

    def _calibrate(self, opened: Opened) -> Payload:
        """Return sums over the validation items, by which the final model is calibrated."""
        from flower_fgl.client_apps.runtime.calibration import shared_sums

        client = opened.client
        if client.config.calibration != "shared":
            raise PayloadError("the run does not calibrate the aggregated model")
        model = self.empty_model(client)
        received = FinalModel.from_record(opened.message.content, state_shapes(model))
        load_state(model, received.weights)
        sums = shared_sums(
            client.validation_items(model),
            client.config,
            client.data.scale,
            client.conformal_draws,
            client.data.graph.target.width,
        )
        if self.session.node(opened.context).hides_numbers:
            sums = {name: torch.zeros_like(tensor) for name, tensor in sums.items()}
        return CalibrationSums(sums)

    def answer_once(
        self,
        action: str,
        handle: Callable[[Opened], Payload],
        *,
        last: Callable[[Client], int] | None = None,
        is_state_new: bool = True,
        masked: Collection[str] | None = None,
        depends_on_download: bool = True,
    ) -> None:
        """Answer a query by the payload of ``handle``, once for each round of its exchange.

        With secure aggregation it is masked, if ``masked`` names the records of the query,
        see :func:`pack_masked`. ``last`` and ``is_state_new`` are those of
        :meth:`open_once` and :meth:`keep`.
        """

        def reply(message: Message, context: Context) -> Message:
            opened = self.open_once(message, context, last=last)
            payload = handle(opened)
            content = payload.to_record()
            if masked is not None and opened.client.config.secure_aggregation:
                content = pack_masked(
                    self.session,
                    opened,
                    payload,
                    records=masked,
                    depends_on_download=depends_on_download,
                )
            self.keep(opened, is_state_new=is_state_new)
            return Message(content, reply_to=message)

        self.query(action)(reply)

    def open_once(
        self,
        message: Message,
        context: Context,
        *,
        last: Callable[[Client], int] | None = None,
    ) -> Opened:
        """Open a client for a message whose reply carries uploads or scores.

        Each round of each exchange is answered once, however often the server sends it.
        The method stores that with :meth:`keep`, before it returns the reply. If it raises
        an error instead, the dispatcher calls :meth:`keep_failed`.

        ``last`` returns the largest number of a round; by default ``rounds``, and one more
        for a named action or an evaluation, which may follow the last round. PayloadError
        if the client has answered this or a later number, or it is too large; RunError if
        the node's ``max-releases`` are used, or the split is not that of its first run.
        """
        client, store = self.open(message, context)
        number = int(round_settings(message.content)["server-round"])  # type: ignore[arg-type]
        # Flower hands "train" and "train.default" to the same function
        exchange = message.metadata.message_type.removesuffix(".default")
        is_train = exchange == MessageType.TRAIN
        most = last(client) if last else client.config.rounds + (not is_train)
        # scores of the calibrated model follow those of the last round
        most += not is_train and client.config.calibration == "shared"
        client.state.claim(exchange, number, most, first=int(is_train))
        record = self.session.split_record(client.data, context)
        if record is not None:
            record.keep()
        ledger = self.session.releases(context)
        if ledger is not None:
            ledger.require()
        opened = Opened(message, context, client, store, number)
        self._open[id(context)] = opened
        return opened

    def keep(self, opened: Opened, *, is_state_new: bool = True) -> None:
        """Count the reply and store the client's state, before the reply is sent.

        Unless ``is_state_new``, only the answered round is stored.
        """
        context, client, store = opened.context, opened.client, opened.store
        self._open.pop(id(context), None)  # counted once, even if storing fails
        ledger = self.session.releases(context)
        if ledger is not None:
            ledger.add()
        save = store.save if is_state_new else store.note
        save(context, client.partition_id, client.state)

    def keep_failed(self, context: Context) -> None:
        """Count an answer that is an error, and store that the round is answered.

        Whether training fails depends on the data: a server that may ask again and again
        learns one bit of them each time.
        """
        if opened := self._open.get(id(context)):
            self.keep(opened, is_state_new=False)

    def handle_fit(
        self,
        message: Message,
        context: Context,
        fit: Any,
        *,
        last: Callable[[Client], int] | None = None,
    ) -> Message:
        """Unpack, run ``fit``, evaluate the model, store the state, pack the reply."""
        clock = time.perf_counter()
        opened = self.open_once(message, context, last=last)
        client, server_round = opened.client, opened.server_round
        seconds = {"load": time.perf_counter() - clock}
        settings = round_settings(message.content)
        try:
            opened.download = self.read_download(client, message.content)
        except PayloadError:  # known before any data are used: no answer
            self._open.pop(id(context), None)
            raise
        clock = time.perf_counter()
        result = fit(client, server_round, opened.download)
        parts = sum(result.seconds.values())
        seconds["train"] = max(0.0, time.perf_counter() - clock - parts)
        seconds |= result.seconds
        scores: dict[str, dict[str, AnyScores]] = {}
        model = result.model
        if model is not None and settings["evaluate"]:
            clock = time.perf_counter()
            scores["local"] = client.evaluate(model, result.logits)
            seconds["evaluate"] = time.perf_counter() - clock
        if model is not None:
            trained = dict(model.state_dict())
            refuse_non_finite(trained)
            node = context.node_config
            keeps = client.config.keep_client_models
            if keeps or "graph" in node or "model-dir" in node:
                own = scores.get("local", {})
                save_best_model(client, context, model, own, server_round)
            client.state.set_group("model", trained)
        return self.pack_fit(opened, result, scores, seconds)

    def pack_fit(
        self,
        opened: Opened,
        result: Fit,
        scores: Mapping[str, Mapping[str, AnyScores]],
        seconds: dict[str, float],
        content: RecordDict | None = None,
    ) -> Message:
        """Protect the upload, store the state, pack the reply of :meth:`handle_fit`.

        ``content`` is the packed upload, where that is known and may be sent as it is.
        """
        client, context = opened.client, opened.context
        is_late = "graph" in context.node_config and opened.server_round > 1
        is_new = is_late and "round" not in client.state.values
        client.state.values["round"] = opened.server_round
        upload, config = result.upload, client.config
        if self.changes_uploads(config):
            content = None
            if config.upload_clip or config.min_class_count > 1:
                upload = privatize(client, upload, opened.download)
            if config.secure_aggregation:
                content = pack_masked(
                    self.session,
                    opened,
                    upload,
                    records=self.down.records,
                    depends_on_download=self.depends_on_download,
                )
        if content is None:
            content = upload.to_record()
        self.keep(opened)
        metrics = self.session.pack_metrics(
            context, scores, seconds, loss=result.loss, terms=result.terms
        )
        if is_new:  # the server knows whether the client has trained before
            metrics[STATELESS] = 1
        content[METRICS] = metrics
        return reply_with(opened.message, content)

    @staticmethod
    def changes_uploads(config: RunConfig) -> bool:
        """Return whether uploads are clipped, thinned out or masked before they leave."""
        return bool(
            config.upload_clip
            or config.min_class_count > 1
            or config.secure_aggregation
        )

    def read_download(self, client: Client, content: RecordDict) -> Any:
        """Unpack and check the download."""
        spec = self.download_spec(client)
        try:
            return self.down.from_record(content, spec)
        except PayloadError as error:
            text = f"the download is malformed: {error}{_other_package(client)}"
            raise PayloadError(text) from error

    def _evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate the client's own model, the aggregated one, or both."""
        opened = self.open_once(message, context)
        client, number = opened.client, opened.server_round
        clock = time.perf_counter()
        settings = round_settings(message.content)
        calibration = _read_calibration(settings.get("calibration"))
        scores = {}
        for mode in settings["modes"]:  # type: ignore[union-attr]
            if mode == "global":
                model = self.empty_model(client)
                shapes = state_shapes(model)
                load_state(model, read_tensors(message.content, "global", shapes))
            else:
                # a client that evaluates its stored model receives no download
                is_sent = set(self.down.records) <= set(message.content)
                download = (
                    self.read_download(client, message.content) if is_sent else None
                )
                if settings.get("mixed"):
                    own = self.received_model(client, download)
                elif settings["refresh"]:
                    own = self.refreshed_model(client, number + 1, download)
                    if own is not None:
                        refuse_non_finite(own.state_dict())
                else:
                    own = self.personal_model(client, download)
                if own is None:
                    raise PayloadError("the client has no model to score yet")
                model = own
            scores[str(mode)] = client.evaluate(model, calibration=calibration)
        self.keep(opened, is_state_new=False)
        seconds = {"evaluate": time.perf_counter() - clock}
        metrics = self.session.pack_metrics(context, scores, seconds)
        return reply_with(message, RecordDict({METRICS: metrics}))


def _read_calibration(text: object) -> Calibration | None:
    """Read the calibration with which a message demands scores, if it has any."""
    if text is None:
        return None
    try:
        return Calibration.from_dict(json.loads(str(text)))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the calibration is malformed: {error}") from error


def once(client: Client) -> int:
    """Return the last number of an exchange that takes place before round 1 only."""
    return 0


def _other_package(client: Client) -> str:
    """Return a hint if the method or the backbone comes from another package."""
    rows: dict[Kind, str] = {
        "methods": client.config.method,
        "backbones": client.model_name.partition(":")[0],
    }
    found = [(name, owner_of(kind, name)) for kind, name in rows.items()]
    owners = " and ".join(
        f"{name} comes from {owner}" for name, owner in found if owner
    )
    return owners and f" {owners}: the server and all clients need one version of it."
