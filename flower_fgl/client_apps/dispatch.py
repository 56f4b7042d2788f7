"""Hand each message to the client half of the run's method."""

from __future__ import annotations

import logging

from flwr.app import Context, Message

from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.methods import METHODS
from flower_fgl.protocols.base import check_size

log = logging.getLogger(__name__)

__all__ = ["Dispatcher", "largest_message"]


class Dispatcher:
    """Hand messages to the client half that the run config's ``method`` names.

    Parameters
    ----------
    session : Session, optional
        Per-process cache shared by all messages.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session or Session()
        self._apps: dict[str, FglClientApp] = {}
        self._logged: set[str] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle one message.

        Raises
        ------
        FglError
            If the settings are wrong or the message cannot be handled. For any other
            error the traceback is logged once.
        """
        config = self._session.config(context)
        check_size(message.content, largest_message(config, context))
        method = config.method
        if method not in self._apps:
            self._apps[method] = METHODS[method].load_client_app()(self._session)
        try:
            return self._apps[method](message, context)
        except FglError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in self._logged:
                self._logged.add(text)
                log.exception("The client half of %s raised:", method)
            raise RunError(text) from error


def largest_message(config: RunConfig, context: Context) -> float:
    """Return ``max-message-mb``: the smaller of the run's and the data owner's.

    Raises
    ------
    RunError
        If the data owner's value is not a positive number.
    """
    own = context.node_config.get("max-message-mb", config.max_message_mb)
    if isinstance(own, bool | str) or not isinstance(own, int | float) or not own > 0:
        raise RunError(
            f"The node config's max-message-mb must be a positive number, got {own!r}. "
            "Start the SuperNode with --node-config 'max-message-mb=100 …'."
        )
    return min(float(own), config.max_message_mb)
