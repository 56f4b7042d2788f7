from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.rounds.round_log import RoundLog

C, H, P = 3, 3, 8


def server(method: str = "fedpg", **settings: Any) -> Any:
    config = parse_config(
        {
            "method": method,
            "hidden-channels": P,
            **{f"{method}.{k.replace('_', '-')}": v for k, v in settings.items()},
        }
    )
    strategy = METHODS[method].load_strategy()(config)
    strategy.loop.log = RoundLog(1)
    strategy.federation = SimpleNamespace(num_classes=C)  # type: ignore[assignment]
    strategy.prepare()
    return strategy


def upload(seed: int, *, hops: int = H, without: int | None = None) -> Upload:
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 9, (C, hops), generator=draw)
    if without is not None:
        counts[without] = 0
    values = torch.randn(C, hops, P, generator=draw) * (counts > 0)[..., None]
    return Upload(LocalPrototypes(values, counts), 1.0)


def universal_of(strategy: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = strategy.trainer.generator()
    return made


@pytest.mark.parametrize("settings", [{"alpha": 1.0}, {"personalized": False}])
def test_without_blending_all_clients_get_the_universal_prototypes(
    settings: dict[str, Any],
) -> None:
    strategy = server(**settings)
    strategy.aggregate(1, {0: upload(0), 1: upload(1, without=2)})
    universal = universal_of(strategy)
    torch.testing.assert_close(strategy.download(2, 0).values, universal)
    got = strategy.download(2, 1)
    torch.testing.assert_close(got.values[:2], universal[:2])
    assert got.present.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert not got.values[2].any()


def test_before_its_first_upload_a_client_gets_no_prototypes() -> None:
    strategy = server()
    assert strategy.download(1, 0).num_bytes == 0
    strategy.aggregate(1, {1: upload(1)})
    assert strategy.download(2, 0).num_bytes == 0
    assert strategy.download(2, 1).num_bytes == 4 * C * H * P


def test_a_client_that_was_not_sampled_gets_the_newest_prototypes() -> None:
    strategy = server(threshold=-1.0)
    absent = upload(0)
    strategy.aggregate(1, {0: absent, 1: upload(1)})
    old = strategy.download(2, 0).values
    fresh = upload(2)
    strategy.aggregate(2, {1: fresh})
    new = strategy.download(3, 0).values
    a, b = absent.payload, fresh.payload
    weight = (a.counts / (a.counts + b.counts))[..., None]
    mixture = weight * a.values + (1 - weight) * b.values
    torch.testing.assert_close(new, 0.5 * universal_of(strategy) + 0.5 * mixture)
    assert not torch.equal(new, old)


def test_the_last_upload_of_an_unsampled_client_does_not_affect_other_clients() -> None:
    strategies = [server(threshold=-1.0), server(threshold=-1.0)]
    for seed, strategy in zip((0, 7), strategies, strict=True):
        strategy.aggregate(1, {0: upload(seed), 1: upload(1)})
        strategy.trainer = server().trainer  # the same generator in both
        strategy.aggregate(2, {1: upload(2)})
    first, second = (strategy.download(3, 1).values for strategy in strategies)
    assert torch.equal(first, second)


@pytest.mark.parametrize("contrast", ["cos-margin", "literal", "tgp"])
def test_training_lowers_the_loss_from_round_to_round(contrast: str) -> None:
    strategy = server(contrast=contrast, rf_context=False)
    uploads = {0: upload(0), 1: upload(0)}
    strategy.aggregate(1, uploads)
    first = strategy.trainer.losses
    strategy.aggregate(2, uploads)
    assert len(first) == 10
    assert first[-1] < first[0]
    # table and optimizer moments are kept between rounds
    assert strategy.trainer.losses[-1] < first[-1]


def test_each_ablation_changes_what_is_sent() -> None:
    sent = []
    for settings in (
        {},
        {"rf_context": False},
        {"ada_margin": False},
        {"personalized": False},
        {"contrast": "literal"},
        {"contrast": "tgp"},
    ):
        strategy = server(**settings)
        # makes the classes similar, so that the margin is not 0
        a, b = upload(0), upload(1)
        for one in (a, b):
            one.payload.values.add_(1.0)
        strategy.aggregate(1, {0: a, 1: b})
        sent.append(strategy.download(2, 0).values)
    for i, first in enumerate(sent):
        assert all(not torch.equal(first, other) for other in sent[i + 1 :])


def test_a_context_share_of_0_equals_no_context() -> None:
    sent = []
    for settings in ({"rf_context": False}, {"context_share": 0.0}):
        strategy = server(**settings)
        strategy.aggregate(1, {0: upload(0), 1: upload(1)})
        sent.append(strategy.download(2, 0).values)
    assert torch.equal(*sent)


@pytest.mark.parametrize("method", ["fedproto", "fedtgp"])
def test_a_class_without_upload_keeps_its_prototype(method: str) -> None:
    strategy = server(method)
    strategy.aggregate(1, {0: upload(0, hops=1), 1: upload(1, hops=1, without=2)})
    before = strategy.download(2, 0)
    assert before.present.all()
    strategy.aggregate(2, {1: upload(5, hops=1, without=2)})
    after = strategy.download(3, 0)
    assert torch.equal(after.values[2], before.values[2])
    assert not torch.equal(after.values[:2], before.values[:2])
    assert after.present.all()


@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
def test_a_class_without_any_upload_is_never_sent(method: str) -> None:
    strategy = server(method)
    hops = H if method == "fedpg" else 1
    strategy.aggregate(1, {0: upload(0, hops=hops, without=1)})
    got = strategy.download(2, 0)
    assert got.present.any(dim=1).tolist() == [True, False, True]
    assert bool(got.values.isfinite().all())


def test_each_round_logs_the_share_of_fused_pairs(small: dict[str, Any]) -> None:
    shares = {}
    for threshold in (-1.0, 0.8, 1.0):
        run = simulate("fedpg", **small, fedpg={"threshold": threshold})
        shares[threshold] = [row["numbers"]["fused-pairs"] for row in run.rounds]
    assert shares[-1.0] == [1.0, 1.0]
    assert all(0 <= share <= 1 for share in shares[0.8])
    assert sum(shares[1.0]) < 0.5
    run = simulate("fedpg", **small, fedpg={"personalized": False})
    assert all("numbers" not in row for row in run.rounds)


class Listener:
    """Record the training messages and replies of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replies: list[tuple[int, Message]] = []
        self.sent: list[tuple[int, Message]] = []
        original = Dispatcher.__call__

        def call(app: Any, message: Message, context: Context) -> Message:
            reply = original(app, message, context)
            pid = int(context.node_config["partition-id"])  # type: ignore[arg-type]
            if message.metadata.message_type.startswith("train"):
                self.sent.append((pid, message))
                self.replies.append((pid, reply))
                self.spoil(pid, len(self.replies), reply)
            return reply

        monkeypatch.setattr(Dispatcher, "__call__", call)

    def spoil(self, pid: int, number: int, reply: Message) -> None:
        """Leave the reply as it is."""


POOL = "gcn,gin,graphsage,sgc,gcnii"


@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
def test_five_backbones_send_prototypes_of_one_width_and_no_weights(
    method: str, monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    listener = Listener(monkeypatch)
    run = simulate(method, **{**small, "clients": 5}, model=POOL)
    assert len({row["model"] for row in run.clients if row["round"] == 0}) == 5
    assert len(listener.replies) == 10
    hops = 3 if method == "fedpg" else 1
    for _, message in listener.replies:
        assert set(message.content) == {"prototypes", "metrics"}
        record = message.content.array_records["prototypes"]
        assert set(record) == {"values", "present", "counts"}
        rows, width = record["values"].shape
        assert width == 8
        assert rows <= 3 * hops
    for _, message in listener.sent:
        assert set(message.content) == {"prototypes", "config"}


@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
def test_bytes_are_the_stated_formula_plus_the_overhead_of_the_record(
    method: str, monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    listener = Listener(monkeypatch)
    run = simulate(method, **small)
    for row in run.rounds:
        start = 3 * (row["round"] - 1)
        formula = {
            "up": [
                4 * reply.content["prototypes"]["counts"].shape[0] * (8 + 1)
                for _, reply in listener.replies[start : start + 3]
            ],
            "down": [
                4 * message.content["prototypes"]["values"].shape[0] * 8
                for _, message in listener.sent[start : start + 3]
            ],
        }
        for way, arrays in (("up", 3), ("down", 2)):
            overhead = row["bytes"][way]["prototypes"] - sum(formula[way])
            assert 0 < overhead <= 3 * arrays * 200
    assert json.dumps(run.rounds[0]["bytes"]["down"]["prototypes"])


def test_the_bytes_of_the_specification_on_cora() -> None:
    """C = 7, L = 2, p = 64: at most 4·21·65 bytes up and 4·21·64 down, 3 times L = 0."""
    for hops, up, down in ((3, 5460, 5376), (1, 1820, 1792)):
        counts = torch.ones(7, hops, dtype=torch.int64)
        values = torch.ones(7, hops, 64)
        assert LocalPrototypes(values, counts).num_bytes == up
        assert Prototypes(values, counts.bool()).num_bytes == down


def nan_values(reply: Message) -> None:
    record = reply.content.array_records["prototypes"]
    bad = record["values"].numpy().copy()
    bad[0, 0] = np.nan
    record["values"] = Array(bad)


def huge_values(reply: Message) -> None:
    record = reply.content.array_records["prototypes"]
    record["values"] = Array(np.full_like(record["values"].numpy(), 3e38))


def wide_values(reply: Message) -> None:
    record = reply.content.array_records["prototypes"]
    record["values"] = Array(np.ones((len(record["values"].numpy()), 9), np.float32))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [(nan_values, "non-finite"), (wide_values, "shape"), (huge_values, "3e+38")],
)
def test_a_malformed_upload_is_dropped_and_reported(
    method: str,
    how: Any,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    small: dict[str, Any],
) -> None:
    class Spoiler(Listener):
        def spoil(self, pid: int, number: int, reply: Message) -> None:
            if pid == 1 and 3 < number <= 6:  # the second round of three clients
                how(reply)

    Spoiler(monkeypatch)
    run = simulate(method, **{**small, "rounds": 3})
    assert run.status == "completed"
    assert [row["replies"] for row in run.rounds] == [3, 2, 3]
    (failure,) = run.rounds[1]["failures"]
    assert failure["partition_id"] == 1
    assert reason in failure["reason"]


@pytest.mark.parametrize("method", ["fedpg", "fedproto", "fedtgp"])
def test_with_partial_participation_all_clients_are_evaluated(
    method: str, small: dict[str, Any]
) -> None:
    run = simulate(method, **{**small, "clients": 5, "participation": 0.4, "rounds": 4})
    nodes = [row["metrics"]["local"]["test"]["num_nodes"] for row in run.rounds]
    assert len(set(nodes)) == 1
    assert all(not row["failures"] for row in run.rounds)


@pytest.mark.slow
def test_noise_on_a_tenth_of_the_dimensions_costs_at_most_a_point(
    real_data: Any, tmp_path: Any
) -> None:
    settings = {"clients": 10, "output_dir": str(tmp_path), "rounds": 30}
    losses = []
    for seed in range(3):
        clean, noisy = (
            simulate("fedpg", "cora", **settings, seed=seed, fedpg={"noise_dims": dims})
            for dims in (0.0, 0.1)
        )
        accuracy = clean.best["test"]["accuracy"]
        assert accuracy > 0.72
        losses.append(accuracy - noisy.best["test"]["accuracy"])
    assert np.mean(losses) <= 0.01


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_on_cora_fedpg_beats_other_prototype_methods_and_local_training(
    real_data: Any, tmp_path: Any
) -> None:
    """Reproduced part of the paper's Tables V and X, see docs/results/fedpg.md.

    Validation nodes selected the weight. Not reproduced are the paper's margin of ten
    points, and that every part of the method helps.
    """
    settings = {
        "clients": 10,
        "model": "gamlp",
        "rounds": 100,
        "local_epochs": 3,
        "data_dir": str(real_data),
        "output_dir": str(tmp_path),
    }
    chosen = {"fedpg": {"fedpg": {"proto_reduction": "sum", "mu": 0.01}}}
    means = {}
    for method in ("fedpg", "fedproto", "fedtgp", "local"):
        runs = [
            simulate(method, "cora", **settings, seed=seed, **chosen.get(method, {}))
            for seed in range(3)
        ]
        means[method] = np.mean([run.best["test"]["accuracy"] for run in runs])
    # measured over five seeds: 79.3, 78.7, 78.6 and 78.0
    assert means["fedpg"] > max(means["fedproto"], means["fedtgp"]) > means["local"]
