"""Hand each message to the client half of the run's method."""

from __future__ import annotations

import logging

from flwr.app import Context, Message, MessageType

from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.describe import client_label
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.core.node_settings import parse_node_config
from flower_fgl.methods import METHODS
from flower_fgl.protocols.base import DESCRIBE, check_size
from flower_fgl.protocols.describe import Rejection

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
        is_describe = message.metadata.message_type == f"{MessageType.QUERY}.{DESCRIBE}"
        try:
            config = self._session.config(context)
            ledger = self._session.releases(context) if is_describe else None
            if ledger is not None:
                ledger.require()
        except (
            RunError
        ) as error:  # the data owner refuses; its log names the reason too
            self._log_once(f"This node takes no part in the run: {error}")
            if not is_describe:
                raise
            name = client_label(context.node_config)
            return Message(Rejection(name, str(error)).to_record(), reply_to=message)
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

    def _log_once(self, text: str) -> None:
        """Log an error that every message repeats."""
        if text not in self._logged:
            self._logged.add(text)
            log.error(text)


def largest_message(config: RunConfig, context: Context) -> float:
    """Return ``max-message-mb``: the smaller of the run's and the data owner's.

    Raises
    ------
    RunError
        If the node config is wrong.
    """
    if "max-message-mb" not in context.node_config:
        return config.max_message_mb
    own = parse_node_config(context.node_config).max_message_mb
    return min(own, config.max_message_mb)
