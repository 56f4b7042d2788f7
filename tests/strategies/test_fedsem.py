from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.errors import RunError
from flower_fgl.methods import parse_config
from flower_fgl.nn.state import state_to_vector, vector_to_state
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.simulation.local import run_config_of
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedsem import FedSEM, mean_of_members, nearest_centers
from tests.support.clients import federation_of


def strategy_of(clients: int = 4, *, num_train: int = 2, **settings: Any) -> FedSEM:
    """Make a prepared strategy with clients of equal size."""
    values = run_config_of(
        method="fedsem",
        dataset="synthetic",
        clients=clients,
        seed=0,
        settings={"hidden_channels": 4, "fedsem": settings},
    )
    strategy = FedSEM(parse_config(values))
    strategy.federation = federation_of([num_train] * clients)
    strategy.prepare()
    return strategy


def uploads(strategy: FedSEM, values: dict[int, float]) -> dict[int, Upload]:
    """Make uploads of models whose entries all have one value."""
    return {
        pid: Upload(
            Weights({n: torch.full(s, value) for n, s in strategy.shapes.items()}), 2.0
        )
        for pid, value in values.items()
    }


def level(weights: Weights) -> float:
    """Return the common value of all entries of a model."""
    vector = state_to_vector(weights.tensors)
    assert float(vector.max() - vector.min()) < 1e-6
    return float(vector[0])


def test_a_model_round_trips_through_a_vector() -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(7.0)}
    vector = state_to_vector(tensors)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7]
    back = vector_to_state(vector, {"b": (2, 3), "a": ()})
    assert list(back) == ["b", "a"]
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_both_steps_by_hand() -> None:
    models = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    centers = torch.tensor([[0.0, 1.0], [4.0, 1.0], [9.0, 9.0]])
    # squared distances 1, 17 | 17, 1 | 1, 9 | 5, 5: the first centre in a tie
    members = nearest_centers(models, centers)
    assert members.tolist() == [0, 1, 0, 0]
    out = mean_of_members(models, torch.tensor([1.0, 5.0, 1.0, 2.0]), members, centers)
    # (1·(0, 0) + 1·(1, 1) + 2·(2, 0)) / 4; the third centre has no member
    assert out.tolist() == [[1.25, 0.25], [4.0, 0.0], [9.0, 9.0]]


def test_clients_get_the_mean_of_similar_clients() -> None:
    strategy = strategy_of(centers=2)
    first = strategy.download(1, 0)
    assert all(strategy.download(1, pid) is first for pid in range(4))
    strategy.aggregate(1, uploads(strategy, {0: 0.0, 1: 0.1, 2: 5.0, 3: 5.2}))
    strategy.aggregate(2, uploads(strategy, {0: 0.0, 1: 0.2, 2: 5.0, 3: 5.4}))
    assert [strategy.members[pid] for pid in range(4)] in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert level(strategy.download(3, 0)) == pytest.approx(0.1)
    assert level(strategy.download(3, 3)) == pytest.approx(5.2)
    assert strategy.download(3, 0) is strategy.download(3, 1)


def test_centres_start_as_the_first_models_of_clients() -> None:
    strategy = strategy_of(centers=3)
    strategy.aggregate(1, uploads(strategy, {1: 1.0}))
    assert [level(center) for center in strategy.centers] == [1.0]
    assert level(strategy.download(2, 0)) == 1.0  # the mean of the centres so far
    strategy.aggregate(2, uploads(strategy, {1: 2.0}))  # no first model in this round
    assert [level(center) for center in strategy.centers] == [2.0]
    strategy.aggregate(3, uploads(strategy, {0: 7.0, 1: 2.0, 2: 9.0, 3: 8.0}))
    assert len(strategy.centers) == 3
    strategy.aggregate(4, uploads(strategy, {0: 7.0}))
    assert len(strategy.centers) == 3


def test_a_client_without_upload_gets_the_weighted_mean_of_the_centres() -> None:
    strategy = strategy_of(centers=2)
    strategy.aggregate(1, uploads(strategy, {0: 0.0, 1: 0.0, 2: 6.0}))
    strategy.aggregate(2, uploads(strategy, {0: 0.0, 1: 0.0, 2: 6.0}))
    levels = [level(strategy.centers[strategy.members[pid]]) for pid in range(3)]
    assert level(strategy.download(3, 3)) == pytest.approx(sum(levels) / 3)


def test_one_centre_equals_fedavg(small: dict[str, Any]) -> None:
    ours = simulate("fedsem", **small, fedsem={"centers": 1})
    theirs = simulate("fedavg", **small)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["bytes"]["down"] == other["bytes"]["down"]


def test_more_centres_than_clients_are_rejected() -> None:
    with pytest.raises(RunError, match="centers = 5, but only 4 clients train"):
        strategy_of(centers=5)


def test_the_server_state_is_restored() -> None:
    strategy = strategy_of(centers=2)
    twin = strategy_of(centers=2)
    twin.load_server_state(strategy.server_state())  # before the first round
    assert twin.centers == []
    strategy.aggregate(1, uploads(strategy, {0: 0.0, 2: 5.0}))
    twin.load_server_state(strategy.server_state())
    assert twin.members == strategy.members
    for pid in range(4):
        assert level(twin.download(2, pid)) == level(strategy.download(2, pid))


def test_a_state_of_another_model_is_rejected() -> None:
    strategy = strategy_of(centers=2)
    strategy.aggregate(1, uploads(strategy, {0: 0.0, 2: 5.0}))
    state = strategy.server_state()
    short = {name: tensor[..., :-1] for name, tensor in state.tensors.items()}
    with pytest.raises(ValueError, match="weights of shapes"):
        strategy_of(centers=2).load_server_state(type(state)(short, state.values))
