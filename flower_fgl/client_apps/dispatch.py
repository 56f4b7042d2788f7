"""Hand each message to the client half of the run's method."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, MessageType

from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.describe import client_label
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.core.node_settings import floors_in_force
from flower_fgl.core.options import Scalar, listed
from flower_fgl.methods import METHODS
from flower_fgl.methods.method import require_half
from flower_fgl.protocols.base import DESCRIBE, INFO, check_size
from flower_fgl.protocols.describe import Rejection

if TYPE_CHECKING:
    from flower_fgl.client_apps.stacked.handling import Stacker

log = logging.getLogger(__name__)
FLOWER = logging.getLogger("flwr")
"""Flower's logger, whose records the SuperNode's log shows from level INFO on."""

__all__ = ["Dispatcher", "error_reply"]

TAKES_NO_PART = "This node takes no part in the run"
CLIENT_RAISED = 2
"""Flower's error code for a client that raised an exception."""
FEWEST_STACKED = 8
"""Clients below which ``stacked = "auto"`` handles them one by one, which gives the same
numbers as the other engines to the last bit; stacking so few saves little."""


class Dispatcher:
    """Hand messages to the client half that the run config's ``method`` names."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session or Session()
        self._apps: dict[str, FglClientApp] = {}
        self._logged: set[str] = set()
        self._stacker: Stacker | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message; log the traceback of errors other than FglError once."""
        is_describe = message.metadata.message_type == f"{MessageType.QUERY}.{DESCRIBE}"
        if is_describe:
            _log_floors(context.node_config)
        try:
            config = self._session.config(context)
            ledger = self._session.releases(context) if is_describe else None
            if ledger is not None:
                ledger.require()
        except RunError as error:  # the data owner refuses; its log has the reason too
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
        passed: set[tuple[float, ...]] = set()
        for place, (message, context) in enumerate(items):
            try:
                # most messages hold the same records, which are counted once
                most = self._largest_message(config, context)
                records = (most, *map(id, message.content.values()))
                if records not in passed:
                    check_size(message.content, most)
                    passed.add(records)
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


def _logged(reply: Message) -> Message:
    """Return a reply; if it rejects the run, log the reason here too."""
    if Rejection.is_in(reply.content):
        log.error("%s: %s", TAKES_NO_PART, reply.content.config_records[INFO]["unfit"])
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
    return Message(Error(CLIENT_RAISED, text), reply_to=message)
