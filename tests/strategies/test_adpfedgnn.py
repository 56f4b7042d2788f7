from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.client_apps.adpfedgnn import ADPFedGNNClientApp
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.targets import Target
from flower_fgl.methods import parse_config
from flower_fgl.nn.state import state_to_vector
from flower_fgl.protocols.adpfedgnn import MaskedWeights, SharedWeights
from flower_fgl.strategies.adpfedgnn import ADPFedGNN
from flower_fgl.strategies.base import Upload


def server(**settings: Any) -> ADPFedGNN:
    """Make a strategy with two clients of 100 and 300 training nodes."""
    values = {f"adpfedgnn.{k.replace('_', '-')}": v for k, v in settings.items()}
    config = parse_config({"method": "adpfedgnn", "hidden-channels": 8, **values})
    strategy = ADPFedGNN(config)
    clients = {
        pid: SimpleNamespace(model="graphsage", num_train=number, num_nodes=500)
        for pid, number in enumerate((100, 300))
    }
    strategy.federation = SimpleNamespace(  # type: ignore[assignment]
        clients=clients, num_features=5, target=Target.classes("abc")
    )
    strategy.prepare()
    return strategy


def upload_of(
    shared: SharedWeights, value: float, part: slice, weight: float
) -> Upload:
    mask = torch.zeros(len(state_to_vector(shared.weights)), dtype=torch.bool)
    mask[part] = True
    networks = {name: torch.full_like(t, value) for name, t in shared.networks.items()}
    return Upload(MaskedWeights(value * mask, mask, networks, weight), weight)


@pytest.mark.parametrize(
    ("masked_agg", "expected"),
    [
        ("per-position", [2.0, 2.0, 3.5, 3.5, 4.0, 4.0]),
        ("literal", [0.5, 0.5, 3.5, 3.5, 3.0, 3.0]),
    ],
)
def test_the_server_averages_weights_under_their_masks(
    masked_agg: str, expected: list[float]
) -> None:
    strategy = server(masked_agg=masked_agg)
    shared = strategy.download(1, 0)
    before = state_to_vector(shared.weights)
    uploads = {
        0: upload_of(shared, 2.0, slice(0, 4), 100.0),
        1: upload_of(shared, 4.0, slice(2, 6), 300.0),
    }
    strategy.aggregate(1, uploads)
    after = strategy.download(2, 0)
    flat = state_to_vector(after.weights)
    assert flat[:6].tolist() == expected
    rest = before[6:] if masked_agg == "per-position" else torch.zeros(len(flat) - 6)
    assert torch.equal(flat[6:], rest)
    assert all(bool((t == 3.5).all()) for t in after.networks.values())


def test_an_upload_must_have_the_weight_in_the_clients_description() -> None:
    assert [server().upload_spec(pid).weight for pid in (0, 1)] == [100.0, 300.0]


def test_the_server_state_is_restored() -> None:
    strategy = server()
    first, before = strategy.server_state(), strategy.download(1, 0)
    strategy.aggregate(1, {0: upload_of(before, 2.0, slice(0, 4), 1.0)})
    assert not torch.equal(
        state_to_vector(strategy.download(2, 0).weights),
        state_to_vector(before.weights),
    )
    strategy.load_server_state(first)
    after = strategy.download(2, 0)
    for name in ("weights", "networks"):
        held, expected = getattr(after, name), getattr(before, name)
        assert list(held) == list(expected)
        assert torch.equal(state_to_vector(held), state_to_vector(expected))
    with pytest.raises(ValueError, match="a state of"):
        strategy.load_server_state(type(first)())


def test_an_upload_with_a_mask_of_wrong_length_is_dropped_and_reported(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ADPFedGNNClientApp.fit

    def fit(self: Any, client: Any, server_round: int, download: Any) -> Any:
        result = original(self, client, server_round, download)
        if client.partition_id == 1:
            upload = result.upload
            shortened = MaskedWeights(
                upload.values[:-9],
                upload.mask[:-9] & False,
                upload.networks,
                upload.weight,
            )
            object.__setattr__(result, "upload", shortened)
        return result

    monkeypatch.setattr(ADPFedGNNClientApp, "fit", fit)
    run = simulate("adpfedgnn", **small)
    for row in run.rounds:
        (failure,) = row["failures"]
        assert failure["partition_id"] == 1
        assert "masked/bits" in failure["reason"]
        assert row["replies"] == 2


def test_other_backbones_are_rejected(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"gat.*graphsage"):
        simulate("adpfedgnn", **small, model="gcn")


def test_random_drop_without_an_agent_is_refused() -> None:
    values = {"adpfedgnn.selection": "random-drop", "adpfedgnn.rl": False}
    with pytest.raises(ConfigError, match="rl = false disables the agent"):
        parse_config({"method": "adpfedgnn", **values})


def test_every_client_is_evaluated_with_the_newest_global_model(
    small: dict[str, Any],
) -> None:
    run = simulate("adpfedgnn", **small, participation=0.3)
    whole = simulate("adpfedgnn", **small)
    for row, full in zip(run.rounds, whole.rounds, strict=True):
        assert row["replies"] == 1
        # weights are sent to one client for training, then to all three for evaluation
        sent, of_all = (r["bytes"]["down"]["weights"] for r in (row, full))
        assert sent * 6 == of_all * 4
        assert {
            c["partition_id"] for c in run.clients if c["round"] == row["round"]
        } == {
            0,
            1,
            2,
        }


def test_epochs_of_a_copy_that_is_never_trained_are_refused() -> None:
    # clients that were not sampled are scored with Eq. (15) alone
    with pytest.raises(ConfigError, match="final-local-epochs has no effect"):
        simulate("adpfedgnn", clients=2, final_local_epochs=3)
