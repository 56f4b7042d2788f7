"""FedLIT's server half: matched types, downloads in each client's order, its payload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.fedlit import CENTROIDS, CHANNEL, in_order
from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.weights import TypedWeights
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedlit import FedLIT
from tests.support.clients import federation_of

P = 2
AXES = torch.eye(3, 2 * P)


def strategy_of(clients: int = 2, **settings: Any) -> FedLIT:
    own = {f"fedlit.{name}": value for name, value in {"types": 3, **settings}.items()}
    strategy = FedLIT(parse_config({"method": "fedlit", "hidden-channels": P, **own}))
    strategy.federation = federation_of([4] * clients)
    strategy.prepare()
    return strategy


def drawn(strategy: FedLIT, seed: int, centroids: Tensor) -> dict[str, Tensor]:
    """Return random weights with these centroids."""
    draw = torch.Generator().manual_seed(seed)
    shapes = strategy.shapes.items()
    return {n: torch.randn(s, generator=draw) for n, s in shapes} | {
        CENTROIDS: centroids
    }


def upload(tensors: dict[str, Tensor], *sizes: int, examples: float = 4.0) -> Upload:
    rows = [[s, int(s > 0)] for s in sizes or (2, 2, 2)]
    count = len(tensors[CENTROIDS])
    payload = TypedWeights(tensors, torch.tensor(rows[:count], dtype=torch.int32))
    return Upload(payload, examples)


def test_a_permuted_client_changes_no_average() -> None:
    one, other = strategy_of(), strategy_of()
    a, b = (drawn(one, seed, AXES + 0.01 * seed) for seed in (1, 2))
    order = [2, 0, 1]  # not its own inverse
    one.aggregate(1, {0: upload(a), 1: upload(b)})
    other.aggregate(1, {0: upload(a), 1: upload(in_order(b, order))})
    assert other.groups == {0: [0, 1, 2], 1: order}
    for name, tensor in one.weights.tensors.items():
        torch.testing.assert_close(other.weights.tensors[name], tensor)
        if name.startswith(CHANNEL):
            torch.testing.assert_close(tensor, (a[name] + b[name]) / 2)
    # each client gets the types in its own order, not in that of the last one
    sent = [other.download(2, pid).tensors for pid in (0, 1)]
    for name, tensor in in_order(sent[0], order).items():
        assert torch.equal(sent[1][name], tensor)
    assert torch.equal(sent[0][CENTROIDS], other.weights.tensors[CENTROIDS])
    assert not torch.equal(sent[1][CENTROIDS], sent[0][CENTROIDS])


def test_clusters_at_other_axes_are_matched_to_their_centres() -> None:
    strategy = strategy_of()
    own = AXES[[1, 2, 0]] + 0.01
    uploads = {0: upload(drawn(strategy, 1, AXES)), 1: upload(drawn(strategy, 2, own))}
    strategy.aggregate(1, uploads)
    assert strategy.groups[1] == [1, 2, 0]
    centres = strategy.download(2, 0).tensors[CENTROIDS]
    torch.testing.assert_close(centres, AXES + 0.005)


def test_one_type_is_fedavg_of_a_linear_map_and_a_gcn() -> None:
    strategy = strategy_of(types=1)
    states = [drawn(strategy, seed, torch.ones(1, 2 * P)) for seed in (1, 2)]
    found = {0: upload(states[0], 3), 1: upload(states[1], 9)}
    strategy.aggregate(1, found)
    for name, tensor in weighted_mean(states, [1.0, 1.0]).items():
        torch.testing.assert_close(strategy.weights.tensors[name], tensor)


def test_shared_layers_weigh_clients_and_types_do_not() -> None:
    strategy = strategy_of()
    a, b = (drawn(strategy, seed, AXES) for seed in (1, 2))
    found = {0: upload(a, examples=1.0), 1: upload(b, 2, 0, 2, examples=3.0)}
    strategy.aggregate(1, found)
    mean = strategy.weights.tensors
    for name, tensor in mean.items():
        if name.startswith(f"{CHANNEL}1."):
            torch.testing.assert_close(tensor, a[name])  # the other has no such edge
        elif name.startswith(CHANNEL):
            torch.testing.assert_close(tensor, (a[name] + b[name]) / 2)
        elif name != CENTROIDS:
            torch.testing.assert_close(tensor, a[name] / 4 + 3 * b[name] / 4)
    assert strategy.loop.log.numbers["types"] == 2.5
    # nobody has type 1 in the next round: it stays as it was
    alone = {1: upload(drawn(strategy, 3, AXES), 2, 0, 2)}
    strategy.aggregate(2, alone)
    for name, tensor in strategy.weights.tensors.items():
        is_kept = name.startswith(f"{CHANNEL}1.")
        assert torch.equal(tensor, mean[name]) == is_kept or name == CENTROIDS
    assert torch.equal(strategy.weights.tensors[CENTROIDS][1], mean[CENTROIDS][1])


def test_an_absent_client_keeps_its_order_and_does_not_count() -> None:
    strategy = strategy_of(3)
    own = AXES[[1, 2, 0]]
    first = {0: upload(drawn(strategy, 1, AXES)), 1: upload(drawn(strategy, 2, own))}
    strategy.aggregate(1, first)
    assert strategy.download(2, 2) is strategy.weights  # it never uploaded
    strategy.aggregate(2, {0: upload(drawn(strategy, 3, 2 * AXES + 0.1))})
    assert strategy.groups == {0: [0, 1, 2], 1: [1, 2, 0]}
    sent = strategy.download(3, 1).tensors[CENTROIDS]
    torch.testing.assert_close(sent, 2 * AXES[[1, 2, 0]] + 0.1)


def test_the_first_centres_are_those_of_a_client_with_edges() -> None:
    strategy = strategy_of()
    nothing = drawn(strategy, 1, torch.zeros(3, 2 * P))
    strategy.aggregate(1, {0: upload(nothing, 0, 0, 0)})
    assert not strategy.weights.tensors[CENTROIDS].any()
    both = {0: upload(nothing, 0, 0, 0), 1: upload(drawn(strategy, 2, AXES.flip(0)))}
    strategy.aggregate(2, both)
    assert torch.equal(strategy.weights.tensors[CENTROIDS], AXES.flip(0))
    assert all(t.isfinite().all() for t in strategy.weights.tensors.values())


def test_a_checkpoint_holds_the_orders() -> None:
    strategy = strategy_of()
    own = AXES[[1, 2, 0]]
    found = {0: upload(drawn(strategy, 1, AXES)), 1: upload(drawn(strategy, 2, own))}
    strategy.aggregate(1, found)
    restored = strategy_of()
    restored.load_server_state(strategy.server_state())
    for pid in (0, 1):
        for name, tensor in strategy.download(2, pid).tensors.items():
            assert torch.equal(restored.download(2, pid).tensors[name], tensor)


def test_the_upload_has_the_stated_size_and_odd_sizes_are_refused() -> None:
    strategy = strategy_of()
    tensors = drawn(strategy, 1, AXES)
    payload = upload(tensors).payload
    shapes, most = strategy.upload_spec(0)
    count = sum(t.numel() for n, t in tensors.items() if n != CENTROIDS)
    assert payload.num_bytes == 4 * (count + 2 * P * 3) + 8 * 3
    back = TypedWeights.from_record(payload.to_record(), (shapes, most))
    assert torch.equal(back.sizes, payload.sizes)
    for rows in (
        [[most, 1], [1, 1], [0, 0]],
        [[0, 1]] * 3,
        [[-1, 0]] * 3,
        [[3, 2]] * 3,
    ):
        odd = payload.to_record()
        sizes = torch.tensor(rows, dtype=torch.int32)
        odd["sizes"] = write_tensors({"sizes": sizes})
        with pytest.raises(PayloadError, match=r"must count at most the .* edges"):
            TypedWeights.from_record(odd, (shapes, most))
    odd["sizes"] = write_tensors({"sizes": torch.zeros(3, 2)})
    with pytest.raises(PayloadError, match=r"must be torch\.int32"):
        TypedWeights.from_record(odd, (shapes, most))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"target_kind": "numbers"},
            "fedlit learns classes, and cannot predict numbers",
        ),
        ({"target_kind": "labels"}, "fedlit predicts one class of each item"),
        ({"secure_aggregation": True}, "fedlit needs more than the sum of its uploads"),
        ({"aggregation": "median"}, "fedlit does more with its uploads than averaging"),
        ({"server_optimizer": "adam"}, "fedlit does more with its uploads"),
        ({"setting": "graph"}, "fedlit classifies nodes only"),
        ({"setting": "link"}, "fedlit cannot predict links"),
        ({"setting": "edge"}, "fedlit cannot classify edges"),
        ({"batch_size": 8}, "fedlit trains on all training nodes of a client at once"),
        ({"edge_direction": "forward"}, "does not pass messages along edges with"),
        ({"model": "gcn,gin"}, "fedlit cannot average different backbones"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("fedlit", clients=3, output_dir=str(tmp_path), **values)
