"""The ClientApp that Flower loads: hands each message to the method's client half."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_fgl.client_apps.base import FglClientApp, Workplace
from flower_fgl.methods import METHODS

__all__ = ["DispatchingClientApp", "app"]


class DispatchingClientApp(ClientApp):
    """Choose the client half by the run config's ``method``.

    Parameters
    ----------
    workplace : Workplace, optional
        What this process keeps between messages, whatever the method.
    """

    def __init__(self, workplace: Workplace | None = None) -> None:
        super().__init__()
        self._workplace = workplace or Workplace()
        self._apps: dict[str, FglClientApp] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message.

        Raises
        ------
        FglError
            If the settings are wrong or the message cannot be handled; Flower turns it
            into an error reply.
        """
        method = self._workplace.config(context).method
        if method not in self._apps:
            self._apps[method] = METHODS[method].load_client_app()(self._workplace)
        return self._apps[method](message, context)


app = DispatchingClientApp()
