"""The ClientApp that Flower loads; it passes each message to the method's client half.

In a deployment Flower starts one process per message, which needs neither torch nor a
graph if the data owner's worker handles it. So torch is imported late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from flower_fgl.client_apps.worker.client import ask_worker, idle_seconds
from flower_fgl.core.errors import FglError, hide_traceback
from flower_fgl.core.flower_internals import ErrorCode

if TYPE_CHECKING:
    from flower_fgl.client_apps.dispatch import Dispatcher
    from flower_fgl.client_apps.runtime.session import Session

__all__ = ["DispatchingClientApp", "app"]

FLOWER = logging.getLogger("flwr")
LOGGED: set[str] = set()
"""Errors that this process has logged. Flower's simulation copies the app per message."""


@cache
def _dispatcher() -> Dispatcher:
    """Return the dispatcher of this process: Flower's simulation copies each app."""
    # imported late, since it loads torch
    from flower_fgl.client_apps.dispatch import Dispatcher

    return Dispatcher()


class DispatchingClientApp(ClientApp):
    """ClientApp that chooses the client half by the run config's ``method``.

    With a ``session``, a cache shared by all messages, this process handles every message
    and ignores ``worker-idle``.
    """

    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self._session = session
        self._dispatch: Callable[[Message, Context], Message] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message, in this process or in the data owner's worker.

        Raises an FglError, of which Flower makes an error reply, if the message cannot be
        handled.
        """
        FLOWER.addFilter(hide_traceback)  # Flower logs what this raises
        if self._session is None and "worker-idle" in context.node_config:
            idle = idle_seconds(context.node_config)
            if idle:
                return ask_worker(message, context, idle=idle, instead=self._handle)
        return self._handle(message, context)

    def _handle(self, message: Message, context: Context) -> Message:
        """Handle a message in this process."""
        if self._session is None:
            return _dispatcher()(message, context)
        if self._dispatch is None:
            from flower_fgl.client_apps.dispatch import Dispatcher

            self._dispatch = Dispatcher(self._session)
        return self._dispatch(message, context)


class _AnsweringClientApp(DispatchingClientApp):
    """ClientApp whose errors that a user can fix are error replies.

    Flower makes an error reply of an exception too, but its simulation logs several
    tracebacks for each, and its SuperNodes report an unhandled exception.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message; log an error once in this process."""
        try:
            return super().__call__(message, context)
        except FglError as error:
            text = str(error)
        if text not in LOGGED:
            LOGGED.add(text)
            FLOWER.error("%s", text)
        reason = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
        return Message(reason, reply_to=message)


app = _AnsweringClientApp()
