"""FedSST's equations, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.algorithms.fedsst import (
    epochs_for,
    first_layer,
    fuse,
    fusion_share,
    probe_graph,
    relative_signals,
    shares,
    structure_signal,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods.fedsst import FedSSTSettings
from flower_fgl.nn import GIN

SETTINGS = FedSSTSettings()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_signal_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    # d = 1.6, 2.4, 1.8; dᵀLd = .672, dᵀd = 11.56
    assert structure_signal(rows).item() == pytest.approx(0.672 / 11.56, abs=1e-5)
    assert structure_signal(5 * rows).item() == pytest.approx(0.0581, abs=1e-4)
    assert structure_signal(torch.ones(4, 3)).item() == pytest.approx(0, abs=1e-6)
    assert structure_signal(torch.zeros(4, 3)).item() == 0


def test_the_weights_by_hand() -> None:
    # scores 1.0439, 2.3935, 1.6761
    found = shares(torch.tensor([2.0, 3.0, 4.0]), SETTINGS)
    assert found.tolist() == pytest.approx([0.2042, 0.4681, 0.3278], abs=1e-4)
    epochs = [epochs_for(share, 1, SETTINGS) for share in found.tolist()]
    assert epochs == [5, 10, 8]


def test_equal_signals_and_a_single_client_weigh_equally() -> None:
    assert shares(torch.full((4,), 0.3), SETTINGS).tolist() == [0.25] * 4
    assert shares(torch.tensor([0.3]), SETTINGS).tolist() == [1.0]
    assert relative_signals(torch.tensor([1.0, 3.0, 2.0])).tolist() == pytest.approx(
        [0, 1, 0.5]
    )


def test_the_threshold_removes_clients_but_never_all() -> None:
    some = FedSSTSettings(threshold=1.5)
    found = shares(torch.tensor([2.0, 3.0, 4.0]), some)
    assert found.tolist() == pytest.approx([0, 0.5881, 0.4119], abs=1e-4)
    none = FedSSTSettings(threshold=9.0)
    assert shares(torch.tensor([2.0, 3.0]), none).tolist() == [0.5, 0.5]


def test_fusion_by_hand() -> None:
    assert fusion_share(0.5, SETTINGS) == pytest.approx(0.5)
    assert fusion_share(0.0, SETTINGS) == pytest.approx(0.1)
    mixed = fuse(torch.tensor([1.0]), torch.tensor([2.0]), 0.1)
    assert mixed.item() == pytest.approx(1.9)


def test_the_probe_has_the_asked_degree_and_homophily() -> None:
    probes = [probe_graph(4, 1.0, generator(seed)) for seed in range(200)]
    same = total = 0
    for probe in probes:
        source, target = probe.edge_index
        same += int(((source < 10) == (target < 10)).sum())
        total += len(source)
    assert total / (200 * 20) == pytest.approx(3.0, abs=0.15)
    assert same / total == pytest.approx(0.75, abs=0.03)


def test_the_class_shows_in_the_probes_features() -> None:
    # without noise in the mean: half the distance of the classes is √(μ/n)·u
    x = probe_graph(10_000, 50.0, generator()).x
    apart = (x[:10].mean(dim=0) - x[10:].mean(dim=0)) / 2
    # ‖u‖² = p, and the noise of a mean of ten is small
    assert float(apart.square().mean()) == pytest.approx(50 / 20, rel=0.05)


def test_the_probe_enters_behind_the_input_layer() -> None:
    torch.manual_seed(0)
    network = GIN(
        in_channels=7, hidden_channels=4, num_outputs=2, num_layers=2, dropout=0.0
    )
    probe = probe_graph(4, 1.0, generator())
    adjacency = torch.zeros(20, 20)
    adjacency[probe.edge_index[0], probe.edge_index[1]] = 1
    first, _, second = network.encoder[0].nn  # type: ignore[index]
    expected = second((probe.x + adjacency @ probe.x).relu()).relu()
    torch.testing.assert_close(first_layer(network, probe), expected)
    torch.nn.init.zeros_(first.weight)
    torch.testing.assert_close(first_layer(network, probe), expected)


def test_weights_follow_the_signals_of_the_round_before(small: dict[str, Any]) -> None:
    run = simulate("fedsst", **{**small, "rounds": 2})
    first, second = (
        [row for row in run.clients if row["round"] == number] for number in (1, 2)
    )
    # 1/3 each: round(1 + 20/3) = 8 epochs
    assert [row["terms"]["epochs"] for row in first] == [8, 8, 8]
    assert len({row["terms"]["epochs"] for row in second}) > 1
    found = run.rounds[0]["numbers"]
    assert found["smallest_weight"] < 1 / 3 < found["largest_weight"]


def test_another_backbone_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='model = "gin" only'):
        simulate("fedsst", **{**small, "model": "gcn"})


@pytest.mark.parametrize("name", ["adapts_epochs", "fuses"])
def test_both_parts_can_be_switched_off(name: str, small: dict[str, Any]) -> None:
    run = simulate("fedsst", **{**small, "fedsst": {name: False}})
    terms = next(row["terms"] for row in run.clients if row["round"] == 1)
    assert (terms["epochs"] == 1) == (name == "adapts_epochs")
    assert (terms["fusion"] == 0) == (name == "fuses")


def test_a_copy_that_is_evaluated_trains_for_its_own_number_of_epochs(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    train = Client.train

    def spy(self: Client, *arguments: Any, epochs: int, **settings: Any) -> float:
        trained.append(epochs)
        return train(self, *arguments, epochs=epochs, **settings)

    monkeypatch.setattr(Client, "train", spy)
    settings = {"model": "gin", "eval_policy": "refresh-all", "final_local_epochs": 2}
    simulate("fedsst", **{**small, **settings, "local_epochs": 3, "rounds": 1})
    # three clients by their weight, then a copy of each
    assert trained[3:] == [2, 2, 2]
    assert min(trained[:3]) > 3
