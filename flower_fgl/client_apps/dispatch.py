"""Hand each message to the client half of the run's method."""

import gc
import logging
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.data import client_label, node_place
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, FglError, PayloadError, RunError
from flower_fgl.core.flower_internals import ErrorCode, message_like
from flower_fgl.core.node_settings import floors_in_force
from flower_fgl.core.options import Scalar, listed
from flower_fgl.methods import METHODS
from flower_fgl.methods.method import require_half
from flower_fgl.protocols.base import DESCRIBE, INFO, check_size, config_record
from flower_fgl.protocols.describe import Rejection
from flower_fgl.protocols.parcels import HOSTS, PARCEL, Parcel, hosted_clients

if TYPE_CHECKING:
    from flower_fgl.client_apps.stacked.handling import Stacker

log = logging.getLogger(__name__)
FLOWER = logging.getLogger("flwr")
"""Flower's logger, whose records the SuperNode's log shows from level INFO on."""

__all__ = ["Dispatcher", "error_reply", "freeze_graphs"]

TAKES_NO_PART = "This node takes no part in the run"
MANY, PATIENT = 200, 10_000
"""Clients from which the search for cyclic garbage waits for so many new objects: one
exchange creates thousands, and nearly all of them are freed without a search."""
FEWEST_STACKED = 8
"""Clients below which ``stacked = "auto"`` handles them one by one, which gives the same
numbers as the other engines to the last bit; stacking so few saves little."""


class Dispatcher:
    """Hand messages to the client half that the run config's ``method`` names."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session or Session()
        self._apps: dict[str, FglClientApp] = {}
        self._logged: set[str] = set()
        self._frozen: set[tuple[int, int]] = set()
        self._stacker: Stacker | None = None

    def clear(self) -> None:
        """Forget a run, and what the methods' client halves keep of it.

        They refer to themselves by the handlers that Flower's ``ClientApp`` holds.
        """
        for app in self._apps.values():
            vars(app).clear()
        self._apps.clear()
        self._session.clear()

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message; log the traceback of errors other than FglError once.

        A node of several clients gets their messages in one, as a :class:`Parcel`.
        """
        if message.metadata.message_type == f"{MessageType.QUERY}.{HOSTS}":
            hosted = self._hosted(context)
            info = ConfigRecord({"clients": len(hosted)})
            return Message(RecordDict({INFO: info}), reply_to=message)
        if PARCEL in message.content:
            return self._handle_parcel(message, context)
        is_describe = message.metadata.message_type == f"{MessageType.QUERY}.{DESCRIBE}"
        if is_describe:
            _log_floors(context.node_config)
        try:
            config = self._session.config(context)
            ledger = self._session.releases(context) if is_describe else None
            if ledger is not None:
                ledger.require()
        except (ConfigError, RunError) as error:  # the log of the owner has it too
            if not is_describe:
                self._log_once(f"{TAKES_NO_PART}: {error}")
                raise
            name = client_label(context.node_config)
            refusal = Rejection(name, str(error)).to_record()
            return _logged(Message(refusal, reply_to=message))
        check_size(message.content, self._largest_message(config, context))
        app = self._app(config.method)
        try:
            reply = app(message, context)
            return _logged(reply) if is_describe else reply
        except Exception as error:
            app.keep_failed(context)
            if isinstance(error, FglError):
                raise
            raise self._wrapped(error, config.method, context) from error

    def _hosted(self, context: Context) -> range:
        """Return the partition-ids of the clients that a node hosts.

        Raises a RunError if its node config does not fit to ``clients-per-node``.
        """
        config = self._session.config(context)
        node, most = context.node_config, config.clients_per_node
        if "graph" in node:
            raise RunError(
                f"{client_label(node)} holds a graph of its own, and clients-per-node = "
                f"{most} lets a node host partitions of a dataset. Set clients-per-node "
                "to 1."
            )
        place, number = node_place(node)
        if number != config.num_nodes:
            raise RunError(
                f"clients = {config.clients} with clients-per-node = {most} need "
                f"{config.num_nodes} nodes, but there are {number} (num-supernodes of a "
                "simulation, num-partitions in the node config of a SuperNode). Start "
                f"{config.num_nodes}, or change clients-per-node."
            )
        return hosted_clients(place, number, config.clients)

    def _handle_parcel(self, message: Message, context: Context) -> Message:
        """Handle the messages of clients that this node hosts; return their replies."""
        parcel = Parcel.from_record(message.content)
        hosted = self._hosted(context)
        places = [place for place, *_ in parcel.letters]
        # one answered twice in an exchange would average its noise away
        if len(set(places)) < len(places) or not set(places) <= set(range(len(hosted))):
            raise PayloadError(
                "the parcel names a client twice, or one of another node"
            )
        num_clients = self._session.config(context).clients
        items = []
        for place, content in zip(places, parcel.contents(), strict=True):
            own = copy(context)
            numbers = {"partition-id": hosted[place], "num-partitions": num_clients}
            own.node_config = {**context.node_config, **numbers}
            items.append((message_like(message, content, delivered_at=""), own))
        with self._session.hosted_states(context):
            replies = self.handle_all(items)
        packed = Parcel.pack(zip(places, replies, strict=True))
        is_train = message.metadata.message_type == MessageType.TRAIN
        if is_train and (context.run_id, context.node_id) not in self._frozen:
            self._frozen.add((context.run_id, context.node_id))
            freeze_graphs(num_clients)
        return Message(packed.to_record(), reply_to=message)

    def handle_all(self, items: Sequence[tuple[Message, Context]]) -> list[Message]:
        """Handle the messages of one exchange to clients of this process, in their order.

        With the setting ``stacked`` clients train and are evaluated together where they
        can; the others are handled one after the other. An exception of a client becomes
        an error reply.
        """
        answers = self._stacked(items)
        replies = []
        for place, (message, context) in enumerate(items):
            try:
                answer = answers[place] if place in answers else self(message, context)
                if isinstance(answer, Exception):
                    method = self._session.config(context).method
                    self._app(method).keep_failed(context)
                    raise answer
                replies.append(answer)
            except Exception as error:
                replies.append(error_reply(message, error))
        return replies

    def _stacked(
        self, items: Sequence[tuple[Message, Context]]
    ) -> dict[int, Message | Exception]:
        """Answer the messages that are handled together, by place in ``items``."""
        config = self._session.config(items[0][1]) if items else None
        if config is None or config.stacked == "false":
            return {}
        is_forced = config.stacked == "true"
        if config.clients < FEWEST_STACKED and not is_forced:
            return {}
        answers: dict[int, Message | Exception] = {}
        fitting = []
        for place, (message, context) in enumerate(items):
            try:
                check_size(message.content, self._largest_message(config, context))
                fitting.append(place)
            except FglError as error:
                answers[place] = error
        if self._stacker is None:
            # not needed for one client per process
            from flower_fgl.client_apps.stacked.handling import Stacker

            self._stacker = Stacker()
        together = [items[place] for place in fitting]
        try:
            found = self._stacker.handle(
                self._app(config.method), together, is_forced=is_forced
            )
        except Exception as error:  # no reply may be lost: the server would wait for it
            if not is_forced:
                self._log_once(
                    f"Clients are handled one by one, stacking failed: {error!r}"
                )
                return answers
            found = dict.fromkeys(range(len(together)), error)
        for number, answer in found.items():
            if isinstance(answer, Exception) and not isinstance(answer, FglError):
                context = together[number][1]
                answer = self._wrapped(answer, config.method, context)
            answers[fitting[number]] = answer
        return answers

    def _largest_message(self, config: RunConfig, context: Context) -> float:
        """Return ``max-message-mb``: the smaller of the run's and the data owner's."""
        if "max-message-mb" not in context.node_config:
            return config.max_message_mb
        return min(self._session.node(context).max_message_mb, config.max_message_mb)

    def _app(self, method: str) -> FglClientApp:
        """Return the client half of a method."""
        if method not in self._apps:
            half = METHODS[method].load_client_app()
            require_half(method, half, FglClientApp)
            self._apps[method] = half(self._session)
        return self._apps[method]

    def _wrapped(self, error: Exception, method: str, context: Context) -> RunError:
        """Log an unexpected exception once, and return it as an error for the server.

        The text may contain numbers or paths of a data owner, so only its log has it.
        """
        kind = type(error).__name__
        text = f"{kind}: {error}"
        self._log_once(text, f"The client half of {method} raised:", error)
        if "graph" in context.node_config:
            return RunError(f"{kind}. The log of its SuperNode has the whole error.")
        return RunError(text)

    def _log_once(self, text: str, line: str = "", error: Any = None) -> None:
        """Log an error that every message repeats, as ``line`` with the traceback."""
        if text not in self._logged:
            self._logged.add(text)
            log.error(line or text, exc_info=error)


def freeze_graphs(num_clients: int) -> None:
    """Exclude graphs and operators from the search for cyclic garbage, once they are built.

    With those of 1,000 clients a search takes 0.4 s, and an exchange starts several.
    """
    gc.freeze()
    if num_clients >= MANY:
        gc.set_threshold(PATIENT, *gc.get_threshold()[1:])


def _logged(reply: Message) -> Message:
    """Return a reply; if it rejects the run, log the reason here too."""
    if Rejection.is_in(reply.content):
        log.error("%s: %s", TAKES_NO_PART, config_record(reply.content, INFO)["unfit"])
    return reply


def _log_floors(node: Mapping[str, Scalar]) -> None:
    """Write the node config of a SuperNode, and its floors, to the SuperNode's log."""
    is_supernode = Path(sys.argv[0]).name.startswith("flwr-clientapp")
    if not (is_supernode or node.keys() - {"partition-id", "num-partitions"}):
        return  # a client of a simulation
    try:
        floors = floors_in_force(node)
    except RunError:
        return  # the reason why the node takes no part is logged
    FLOWER.info(
        "Node config of %s: %s. Floors in force: %s.",
        client_label(node),
        listed(node),
        listed(floors) or "none",
    )


def error_reply(message: Message, error: Exception) -> Message:
    """Return the reply of a client that raised an exception."""
    text = str(error) if isinstance(error, FglError) else repr(error)
    reason = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
    return Message(reason, reply_to=message)
