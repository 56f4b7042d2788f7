"""GCFL+ on the server: clusters, their models and their series."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import DescribedWeights
from flower_fgl.simulation.local import run_config_of
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.partly_shared import GCFLPlus
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.clients import federation_of

SPLITTING = {"eps1": 1e9, "eps2": 0.0, "length": 2, "warmup": 0}


def strategy_of(clients: int = 4, **settings: Any) -> GCFLPlus:
    values = run_config_of(
        method="gcfl+",
        dataset="synthetic",
        clients=clients,
        seed=0,
        settings={"hidden_channels": 4, "gcfl+": {**SPLITTING, **settings}},
    )
    strategy = GCFLPlus(parse_config(values))
    strategy.federation = federation_of([2] * clients)
    strategy.prepare()
    strategy.loop.log = RoundLog(1)
    return strategy


def send(
    strategy: GCFLPlus, server_round: int, sent: dict[int, tuple[float, float, int]]
) -> None:
    """Aggregate uploads of (value of all weights, norm, train nodes) by client."""
    strategy.aggregate(
        server_round,
        {
            pid: Upload(
                DescribedWeights(
                    {
                        n: torch.full(s, float(value))
                        for n, s in strategy.shapes.items()
                    },
                    {"norm": torch.tensor([norm])},
                ),
                float(count),
            )
            for pid, (value, norm, count) in sent.items()
        },
    )


def levels(strategy: GCFLPlus) -> list[float]:
    """Return the common value of all weights that each client would receive."""
    found = []
    for pid in range(4):
        values = torch.cat(
            [t.flatten() for t in strategy.download(9, pid).tensors.values()]
        )
        assert float(values.max() - values.min()) < 1e-6
        found.append(round(float(values[0]), 6))
    return found


def test_clients_with_alike_series_stay_together() -> None:
    strategy = strategy_of()
    send(strategy, 1, {0: (1, 1, 1), 1: (1, 1.1, 1), 2: (3, 5, 1), 3: (7, 5.1, 3)})
    assert levels(strategy) == pytest.approx(
        [26 / 6] * 4
    )  # too short a series: one mean
    send(strategy, 2, {0: (1, 2, 1), 1: (2, 2.1, 3), 2: (3, 6, 1), 3: (7, 6.1, 3)})
    assert strategy.members == {0: 0, 1: 0, 2: 1, 3: 1}
    assert levels(strategy) == [1.75, 1.75, 6.0, 6.0]
    assert strategy.series == {0: [], 1: [], 2: [], 3: []}


def test_a_failed_aggregation_leaves_the_series_as_they_were() -> None:
    strategy = strategy_of()
    send(strategy, 1, dict.fromkeys(range(4), (1, 1, 1)))
    ruined = {pid: (torch.nan if pid == 3 else 1, 2, 1) for pid in range(4)}
    with pytest.raises(PayloadError, match="previous state is kept"):
        strategy._keep_finite(lambda: send(strategy, 2, ruined))
    assert strategy.series == {pid: [1] for pid in range(4)}


@pytest.mark.parametrize(
    "settings", [{"warmup": 2}, {"eps1": 0.0}, {"eps2": 1e9}, {"length": 3}]
)
def test_each_condition_can_prevent_the_split(settings: dict[str, Any]) -> None:
    strategy = strategy_of(**settings)
    for server_round in (1, 2):
        sent = {pid: (float(pid), float(pid), 1) for pid in range(4)}
        send(strategy, server_round, sent)
    assert set(strategy.members.values()) == {0}


def test_absent_clients_keep_their_cluster_and_new_ones_get_the_first() -> None:
    strategy = strategy_of()
    for server_round in (1, 2):
        send(strategy, server_round, {0: (1, 1, 1), 1: (1, 1, 1), 2: (3, 5, 1)})
    assert strategy.members == {0: 0, 1: 0, 2: 1}
    send(strategy, 3, {0: (2, 1, 1)})
    assert levels(strategy) == [2.0, 2.0, 3.0, 2.0]


def test_the_state_of_the_server_comes_back() -> None:
    strategy, other = strategy_of(), strategy_of()
    for server_round in (1, 2, 3):
        sent = {pid: (float(pid), float(pid), 1) for pid in range(4)}
        send(strategy, server_round, sent)
    other.load_server_state(strategy.server_state())
    assert levels(other) == levels(strategy)
    assert (other.members, other.series) == (strategy.members, strategy.series)


def test_a_model_without_hidden_layers_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no layer between its input layer"):
        simulate("gcfl+", **{**small, "model": "mlp", "num_layers": 2})
