from __future__ import annotations

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.prototypes import Prototypes
from flower_fgl.protocols.weights import ModelAndPrototypes
from flower_fgl.simulation.local import run_config_of
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fggp import FGGP, cluster_by_class
from tests.support.clients import federation_of

P = 4


def strategy_of(clients: int = 4) -> FGGP:
    values = run_config_of(
        method="fggp",
        dataset="synthetic",
        clients=clients,
        seed=0,
        settings={"hidden_channels": P},
    )
    strategy = FGGP(parse_config(values))
    strategy.federation = federation_of([2] * clients)
    strategy.prepare()
    return strategy


def upload(strategy: FGGP, level: float, rows: dict[int, list[float]]) -> Upload:
    values, present = torch.zeros(2, 1, P), torch.zeros(2, 1, dtype=torch.bool)
    for c, row in rows.items():
        values[c, 0], present[c, 0] = torch.tensor(row), True
    tensors = {n: torch.full(s, level) for n, s in strategy.shapes.items()}
    return Upload(ModelAndPrototypes(tensors, Prototypes(values, present)), 2.0)


def test_each_class_is_clustered_separately() -> None:
    # class 0: two pairs; class 1: one upload; class 2: none
    points = torch.zeros(4, 3, 2)
    points[:, 0] = torch.tensor([[1.0, 0.0], [3.0, 0.1], [-1.0, 0.0], [-3.0, 0.1]])
    points[2, 1] = torch.tensor([5.0, 6.0])
    present = torch.zeros(4, 3, dtype=torch.bool)
    present[:, 0] = True
    present[2, 1] = True
    values, found = cluster_by_class(points, present)
    assert found.sum(dim=1).tolist() == [2, 1, 0]
    torch.testing.assert_close(values[0, :2], torch.tensor([[2.0, 0.05], [-2.0, 0.05]]))
    assert values[1, 0].tolist() == [5, 6]
    assert not values[~found].any()


def test_the_download_has_the_mean_model_and_the_clusters() -> None:
    strategy = strategy_of()
    assert not strategy.download(1, 0).prototypes.present.any()
    ups = {
        0: upload(strategy, 1.0, {0: [1, 0, 0, 0], 1: [1, 1, 1, 1]}),
        1: upload(strategy, 3.0, {0: [2, 0.1, 0, 0]}),
    }
    strategy.aggregate(1, ups)
    sent = strategy.download(2, 3)
    assert sent is strategy.download(2, 0)
    assert all(bool((t == 2).all()) for t in sent.tensors.values())
    assert sent.prototypes.present.sum(dim=1).tolist() == [1, 1]
    torch.testing.assert_close(
        sent.prototypes.values[0, 0], torch.tensor([1.5, 0.05, 0.0, 0.0])
    )
    parameters = sum(t.numel() for t in sent.tensors.values())
    assert sent.num_bytes == 4 * (parameters + 2 * P)


def test_a_class_without_upload_keeps_its_clusters() -> None:
    strategy = strategy_of()
    both = {0: [1.0, 0, 0, 0], 1: [0.0, 1, 0, 0]}
    far = {0: [-1.0, 0, 0, 0], 1: [0.0, -1, 0, 0]}
    ups = [both, both, far, far]
    strategy.aggregate(1, {i: upload(strategy, 1.0, up) for i, up in enumerate(ups)})
    assert strategy.download(2, 0).prototypes.present.sum(dim=1).tolist() == [2, 2]
    strategy.aggregate(2, {3: upload(strategy, 1.0, {1: [0, 0, 7, 0]})})
    held = strategy.download(3, 0).prototypes
    assert held.present.sum(dim=1).tolist() == [2, 1]
    assert held.values[1].tolist() == [[0, 0, 7, 0], *[[0] * P] * 3]


def test_uploads_without_classes_give_no_prototypes() -> None:
    strategy = strategy_of()
    strategy.aggregate(1, {0: upload(strategy, 1.0, {})})
    assert not strategy.download(2, 0).prototypes.present.any()


def test_a_payload_with_other_prototype_shapes_is_rejected() -> None:
    strategy = strategy_of()
    content = upload(strategy, 1.0, {0: [1, 0, 0, 0]}).payload.to_record()
    with pytest.raises(PayloadError, match="values"):
        ModelAndPrototypes.from_record(content, (strategy.shapes, (2, 1, P + 1)))
    del content["prototypes"]
    with pytest.raises(PayloadError, match="prototypes"):
        ModelAndPrototypes.from_record(content, strategy.upload_spec(0))


def test_the_server_state_is_restored() -> None:
    strategy, twin = strategy_of(), strategy_of()
    strategy.aggregate(1, {0: upload(strategy, 1.0, {1: [1, 2, 3, 4]})})
    twin.load_server_state(strategy.server_state())
    one, other = strategy.download(2, 0), twin.download(2, 0)
    assert torch.equal(one.prototypes.values, other.prototypes.values)
    assert torch.equal(one.prototypes.present, other.prototypes.present)
    for name, tensor in one.tensors.items():
        assert torch.equal(other.tensors[name], tensor)


def test_fine_tuning_is_reported(small: dict[str, object]) -> None:
    run = simulate("fggp", **small, fggp={"finetune_epochs": 2})  # type: ignore[arg-type]
    assert run.status == "completed"
    assert run.summary["finetuned"]
