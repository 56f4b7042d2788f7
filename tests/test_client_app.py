"""The app that Flower loads: what its copies share in one process."""

from __future__ import annotations

import copy

import pytest

from flower_fgl import client_app
from flower_fgl.client_apps import dispatch
from flower_fgl.client_apps.runtime.session import Session


def test_copies_of_the_app_share_a_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted:
        def __init__(self, session: object = None) -> None:
            made.append(session)

        def __call__(self, message: object, context: object) -> object:
            return message, context

    monkeypatch.setattr(dispatch, "Dispatcher", Counted)
    client_app._dispatcher.cache_clear()
    try:
        for _ in range(3):  # as Flower's simulation does for each message
            app = copy.deepcopy(client_app.app)
            assert app._handle("message", "context") == ("message", "context")
        assert made == [None]
        own = client_app.DispatchingClientApp(session := Session())
        own._handle("message", "context")  # type: ignore[arg-type]
        assert made == [None, session]
    finally:
        client_app._dispatcher.cache_clear()
