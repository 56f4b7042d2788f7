"""The ClientApp that Flower loads: hands each message to the method's client half.

Flower starts a process for every message of a deployment. Where the owner's worker handles
the message, that process needs neither torch nor a graph: nothing here imports them before
a message is handled in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_fgl.client_apps.worker.client import ask_worker, idle_seconds

if TYPE_CHECKING:
    from flower_fgl.client_apps.runtime.session import Session

__all__ = ["DispatchingClientApp", "app"]


class DispatchingClientApp(ClientApp):
    """Choose the client half by the run config's ``method``.

    Parameters
    ----------
    workplace : Workplace, optional
        What this process keeps between messages, whatever the method. With one, every
        message is handled in this process, whatever ``worker-idle`` says.
    """

    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self._session = session
        self._dispatch: Callable[[Message, Context], Message] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message, or have the owner's worker handle it.

        Raises
        ------
        FglError
            If the settings are wrong or the message cannot be handled; Flower turns it
            into an error reply.
        """
        if self._session is None and "worker-idle" in context.node_config:
            idle = idle_seconds(context.node_config)
            if idle:
                return ask_worker(message, context, idle=idle, instead=self._handle)
        return self._handle(message, context)

    def _handle(self, message: Message, context: Context) -> Message:
        """Handle a message in this process."""
        if self._dispatch is None:
            # here and not above: it imports torch
            from flower_fgl.client_apps.dispatch import Dispatcher

            self._dispatch = Dispatcher(self._session)
        return self._dispatch(message, context)


app = DispatchingClientApp()
