"""``evaluate = "mixed"``: the score of a mixture before the client trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.client_apps.fedaux import FedAuxClientApp
from flower_fgl.client_apps.fedpub import MASK, FedPubClientApp
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.client_apps.topfgl import TopFGLClientApp
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.personal_mix import PersonalMix
from tests.client_apps.test_fedpg import make_client
from tests.support.short_runs import comparable


def test_equal_weights_score_as_fedavg_s_global_model(small: dict[str, Any]) -> None:
    settings = {**small, "rounds": 2, "participation": 0.6, "weight_by": "equal"}
    settings |= {"stacked": "false", "hidden_channels": 8}
    theirs = simulate("fedavg", **settings, evaluate="both")
    # in the warm-up all clients receive the mean
    own = {"warmup": 1.0, "augmentations": 0}
    general = {"local_epochs": 3, "weight_decay": 5e-4}
    ours = simulate("topfgl", **settings, **general, topfgl=own, evaluate="mixed")
    local = simulate("topfgl", **settings, **general, topfgl=own)
    for one, other, trained in zip(
        ours.rounds, theirs.rounds, local.rounds, strict=True
    ):
        assert one["metrics"]["local"] == other["metrics"]["global"]
        assert set(one["metrics"]) == {"local"}
        assert one["loss"] == trained["loss"]
        assert one["metrics"] != trained["metrics"]
    # every client is scored in every round, sampled or not
    rows = [row for row in ours.clients if row["round"]]
    assert all("metrics" in row for row in rows)
    assert len(rows) == 2 * len(ours.rounds[0]["metrics"]) * small["clients"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", sorted(name for name, row in METHODS.items() if row.sends_mixtures)
)
def test_scoring_mixtures_changes_no_training(
    method: str, small: dict[str, Any]
) -> None:
    mixed = simulate(method, **small, evaluate="mixed")
    plain = simulate(method, **small)
    assert [row["loss"] for row in mixed.rounds] == [
        row["loss"] for row in plain.rounds
    ]
    assert [row["numbers"] for row in mixed.rounds] == [
        row["numbers"] for row in plain.rounds
    ]
    assert comparable(mixed) != comparable(plain)


def test_a_mixture_is_scored_under_the_client_s_own_mask() -> None:
    client, app = make_client("fedaux", mask=True), FedAuxClientApp()
    start = state_of(app.build(client))
    masks = {name: torch.full_like(t, 0.5) for name, t in start.items()}
    client.state.set_group(MASK, masks)
    found = app.received_model(client, Weights(start))
    assert all(torch.equal(t, 0.5 * start[n]) for n, t in found.state_dict().items())
    other, theirs = make_client("fed-pub"), FedPubClientApp()
    begin = state_of(other.build_model(initialise=True))
    other.state.set_group(
        "mask", {n: torch.full_like(t, 0.5) for n, t in begin.items()}
    )
    seen = theirs.received_model(other, Weights(begin))
    assert all(torch.equal(t, 0.5 * begin[n]) for n, t in seen.state_dict().items())


def test_a_mixture_reads_the_edges_that_the_client_added() -> None:
    client, app = make_client("topfgl"), TopFGLClientApp()
    client.state.set_group("edges", {"added": torch.tensor([[0], [1]])})
    model = app.received_model(client, Weights(state_of(client.build_model())))
    before = client.data.training.inputs.edge_index.shape[1]
    assert model.augmented.edge_index.shape[1] == before + 2  # type: ignore[union-attr, operator]


def test_the_flag_is_set_for_personalized_averages() -> None:
    for name, row in METHODS.items():
        assert row.sends_mixtures == issubclass(row.load_strategy(), PersonalMix), name


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"method": "fedavg"}, "does not mix a model.*fed-pub, fedaux, fedgta"),
        ({"method": "local"}, "does not mix a model"),
        ({"method": "fedgta", "eval-policy": "refresh"}, 'Use eval-policy = "stale"'),
    ],
)
def test_mixtures_that_are_not_there_cannot_be_scored(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config({**values, "evaluate": "mixed"})
