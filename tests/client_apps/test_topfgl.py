"""TopFGL's client half: FedAvg's network, and edges that no label decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.topfgl import AugmentedNet, TopologyLearner
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.client_apps.topfgl import LEARNER, TopFGLClientApp
from flower_fgl.core.errors import FglError
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.test_fedpg import C, N, make_client


def initial(client: Client) -> Weights:
    torch.manual_seed(0)
    learner = TopologyLearner(C, client.config.hidden_channels, 0.5)
    parts = {LEARNER + name: t for name, t in state_of(learner).items()}
    return Weights({**state_of(client.build_model(initialise=True)), **parts})


def pairs_added(client: Client, rounds: int) -> list[Tensor]:
    """Train from the same download in every round; return the pairs after each."""
    short = replace(client.config, rounds=rounds)
    client = replace(client, config=short)
    app, found = TopFGLClientApp(), []
    for server_round in range(1, rounds + 1):
        app.fit(client, server_round, initial(client))
        found.append(app.added(client))
    return found


@pytest.mark.parametrize("label_sparsity", [0.0, 0.9], ids=["many", "few labels"])
def test_without_averages_and_edges_the_network_trains_as_in_fedavg(
    label_sparsity: float, small: dict[str, Any]
) -> None:
    settings = {
        **small,
        "rounds": 3,
        "local_epochs": 2,
        "weight_decay": 1e-8,
        "label_sparsity": label_sparsity,
    }
    own = {"warmup": 1.0, "augmentations": 0}
    ours = simulate("topfgl", **settings, topfgl=own)
    theirs = simulate("fedavg", **settings, stacked="false")
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["loss"] == other["loss"]


def test_edges_are_added_at_their_rounds_and_enter_the_network() -> None:
    client = make_client("topfgl", neighbors=3)
    counts = [pairs.shape[1] for pairs in pairs_added(client, 8)]
    # ⌊8 / 4⌋ = 2: rounds 2, 4 and 6, and not the last one
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[2] == counts[1]
    assert counts[3] != counts[2]
    assert counts[4] == counts[3]
    assert counts[6] == counts[5]
    assert counts[7] == counts[6]
    model = TopFGLClientApp().personal_model(client, initial(client))
    assert isinstance(model, AugmentedNet)
    before = client.data.training.inputs.edge_index.shape[1]
    assert model.augmented.edge_index.shape[1] == before + 2 * counts[7]
    most = before / 4
    # 30 % of too many pairs are dropped, so that only one addition can be above
    assert all(now <= most + N * 3 for now in counts)


@pytest.mark.parametrize("rule", ["any", "pseudo"])
def test_labels_of_other_nodes_change_no_edge(rule: str) -> None:
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(0, C, (N,), generator=draw)
    other = y.clone()
    other[1::2] = (y[1::2] + 1) % C  # even nodes train
    found = []
    for labels in (y, other):
        client = make_client("topfgl", y=labels, same_class=rule)
        found.append(pairs_added(client, 4))
    assert any(pairs.shape[1] for pairs in found[0])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_diverged_learner_ends_the_round_and_leaves_no_moments() -> None:
    client, bad = make_client("topfgl"), {}
    for name, tensor in initial(client).tensors.items():
        is_learner = name.startswith(LEARNER)
        bad[name] = torch.full_like(tensor, torch.nan) if is_learner else tensor
    with pytest.raises(FglError, match="training left"):
        TopFGLClientApp().fit(client, 1, Weights(bad))
    assert not client.state.group("learner-optimizer")


def test_the_learner_trains_and_keeps_its_moments() -> None:
    client = make_client("topfgl")
    start = initial(client)
    result = TopFGLClientApp().fit(client, 1, start)
    moved = [
        name
        for name, tensor in result.upload.tensors.items()  # type: ignore[attr-defined]
        if not torch.equal(tensor, start.tensors[name])
    ]
    assert any(name.startswith(LEARNER) for name in moved)
    assert client.state.group("learner-optimizer")
