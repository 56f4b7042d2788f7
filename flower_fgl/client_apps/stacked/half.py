"""``StackedHalf``: the form of a client half that trains many clients at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flwr.app import RecordDict

from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.cohort import Cohort
from flower_fgl.nn import Backbone
from flower_fgl.protocols.base import Payload

__all__ = ["StackedFit", "StackedHalf", "load_stacked"]


@dataclass(frozen=True)
class StackedFit:
    """Result of the local training of K clients.

    Parameters
    ----------
    model : Backbone
        The personalized models, stacked.
    uploads : sequence of Payload
        Payload of each client for the server.
    losses : sequence of float
        Training loss of each client.
    records : callable, optional
        Returns ``to_record()`` of all uploads, packed at once.
    """

    model: Backbone
    uploads: Sequence[Payload]
    losses: Sequence[float]
    records: Callable[[], list[RecordDict]] | None = None


class StackedHalf(ABC):
    """Base of the stacked forms of client halves.

    A client half names its stacked form in ``stacked``. Both must compute the same, up to
    rounding: a contract test compares them for every method.

    Parameters
    ----------
    app : FglClientApp
        The client half.
    """

    def __init__(self, app: FglClientApp) -> None:
        self.app = app

    def key(self, client: Client) -> Hashable:
        """Return what else the clients of one cohort must have in common."""
        return ()

    @abstractmethod
    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train all clients of a cohort, see :meth:`FglClientApp.fit`.

        Parameters
        ----------
        cohort : Cohort
            K clients.
        downloads : sequence of Payload
            Download of each client; a broadcast is one object for all.
        """


def load_stacked(app: FglClientApp) -> StackedHalf | None:
    """Return the stacked form of a client half, ``None`` if it has none."""
    module, _, name = str(vars(type(app)).get("stacked", "")).partition(":")
    if not module:
        return None
    half: StackedHalf = getattr(import_module(module), name)(app)
    return half
