"""FedKD's client half."""

from __future__ import annotations

import pytest

from flower_fgl.client_apps.fedkd import FedKDClientApp
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.core.errors import FglError
from flower_fgl.protocols.fedkd import FactoredWeights
from tests.support.random_clients import random_client


def test_a_student_that_diverges_is_reported_before_it_is_factored() -> None:
    client = random_client(
        "fedkd", settings={"optimizer": "sgd", "lr": 1e38, "local-epochs": 2}
    )
    app = FedKDClientApp()
    start = FactoredWeights(state_of(app.student(client)))
    with pytest.raises(FglError, match=r"training left .* Try a smaller lr"):
        app.fit(client, 1, start)
