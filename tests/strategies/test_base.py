from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl import METHODS, Run, simulate
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.methods import parse_config
from flower_fgl.runs.model_file import read_card
from flower_fgl.runs.summary import summarise
from flower_fgl.simulation.workers import WorkerGrid
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import is_checkpoint_due
from flower_fgl.strategies.rounds.messenger import send_receive


@given(
    st.lists(
        st.tuples(st.floats(-10, 10, width=32), st.floats(0.125, 8, width=32)),
        min_size=1,
        max_size=6,
    )
)
def test_the_weighted_mean_is_the_sum_over_the_weights(
    pairs: list[tuple[float, float]],
) -> None:
    states = [{"w": torch.full((2, 2), value)} for value, _ in pairs]
    mean = weighted_mean(states, [weight for _, weight in pairs])["w"]
    expected = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    torch.testing.assert_close(mean, torch.full((2, 2), expected), atol=1e-4, rtol=1e-4)


def test_the_weighted_mean_by_hand() -> None:
    # (1·1 + 3·5) / 4 = 4
    states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}]
    assert weighted_mean(states, [1, 3])["w"].item() == 4.0


def test_the_weighted_mean_needs_a_positive_weight() -> None:
    with pytest.raises(ValueError, match="positive"):
        weighted_mean([{"w": torch.zeros(1)}], [0.0])


class Faulty:
    """Make chosen clients misbehave in chosen rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: Any, how: Any) -> None:
        original = Dispatcher.__call__

        def call(app: Any, message: Message, context: Context) -> Message:
            reply = original(app, message, context)
            pid = int(context.node_config["partition-id"])  # type: ignore[arg-type]
            if message.metadata.message_type.startswith("train"):
                number = int(message.content["config"]["server-round"])  # type: ignore[index,arg-type,call-overload]
                if when(pid, number):
                    how(reply)
            return reply

        monkeypatch.setattr(Dispatcher, "__call__", call)


def raises(reply: Message) -> None:
    raise RuntimeError("out of order")


def sends_nan(reply: Message) -> None:
    name = next(iter(reply.content["weights"]))
    from flower_fgl.protocols.base import write_tensors

    shape = reply.content.array_records["weights"][name].shape
    bad = write_tensors({name: torch.full(shape, math.nan)})
    reply.content.array_records["weights"][name] = bad[name]


def sends_another_shape(reply: Message) -> None:
    from flower_fgl.protocols.base import write_tensors

    name = next(iter(reply.content["weights"]))
    reply.content.array_records["weights"][name] = write_tensors(
        {name: torch.zeros(1)}
    )[name]


def sends_no_metrics(reply: Message) -> None:
    del reply.content["metrics"]


def sends_impossible_scores(reply: Message) -> None:
    reply.content.metric_records["metrics"]["local/test/accuracy"] = 1e9


def sends_half_a_column(reply: Message) -> None:
    del reply.content.metric_records["metrics"]["local/test/num_nodes"]


def sends_an_infinite_loss(reply: Message) -> None:
    reply.content.metric_records["metrics"]["loss"] = math.inf


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (raises, "out of order"),
        (sends_nan, "non-finite"),
        (sends_another_shape, "shape"),
        (sends_no_metrics, "metrics"),
        (sends_impossible_scores, "local/test/accuracy"),
        (sends_half_a_column, "num_nodes"),
        (sends_an_infinite_loss, "loss"),
    ],
)
def test_a_client_that_fails_in_round_3_is_counted_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any], how: Any, reason: str
) -> None:
    Faulty(monkeypatch, lambda pid, number: pid == 1 and number == 3, how)
    run = simulate(**{**small, "rounds": 4})
    assert run.status == "completed"
    assert [row["replies"] for row in run.rounds] == [3, 3, 2, 3]
    (failure,) = run.rounds[2]["failures"]
    assert failure["partition_id"] == 1
    assert reason in failure["reason"]
    assert sum(run.summary["failures"].values()) == 1


def test_a_round_with_too_few_replies_fails_and_keeps_the_model(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    Faulty(monkeypatch, lambda pid, number: number == 2 and pid > 0, raises)
    run = simulate(**{**small, "rounds": 3, "min_replies": 2})
    assert [row["status"] for row in run.rounds] == ["ok", "failed", "ok"]
    assert run.status == "completed"


def test_when_all_clients_fail_the_run_ends_with_an_error_and_the_folder_says_why(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any], tmp_path: Any
) -> None:
    from flower_fgl.lab.results import Run

    Faulty(monkeypatch, lambda pid, number: True, raises)
    folder = tmp_path / "run"
    with pytest.raises(RunError, match="out of order"):
        simulate(**{**small, "rounds": 5, "run_dir": str(folder)})
    run = Run.load(folder)
    assert run.status == "failed"
    assert "out of order" in run.summary["error"]
    assert len(run.rounds) == 3  # three failed rounds in a row end it


def test_a_single_failed_round_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    Faulty(monkeypatch, lambda pid, number: True, raises)
    with pytest.raises(RunError, match="No round succeeded"):
        simulate(**{**small, "rounds": 1})


@pytest.mark.parametrize("ask", [{"participation": 0.25}, {"participants": 2}], ids=str)
def test_with_partial_participation_the_rest_is_scored_too(
    small: dict[str, Any], ask: dict[str, Any]
) -> None:
    run = simulate(**{**small, "clients": 5, **ask, "rounds": 3})
    for row in run.rounds:
        assert row["replies"] == 2  # ⌈0.25 · 5⌉
        scored = run.rounds[0]["metrics"]["local"]["test"]["num_nodes"]
        assert row["metrics"]["local"]["test"]["num_nodes"] == scored
    trained = {
        r["round"]: [c["partition_id"] for c in run.clients
                     if c["round"] == r["round"] and "loss" in c]
        for r in run.rounds
    }  # fmt: skip
    assert len({tuple(pids) for pids in trained.values()}) > 1


def local_scores(run: Any, server_round: int) -> dict[int, Any]:
    return {
        row["partition_id"]: row["metrics"]["local"]
        for row in run.clients
        if row["round"] == server_round
    }


def test_a_refreshed_client_scores_what_the_next_round_would_make_of_it(
    small: dict[str, Any],
) -> None:
    # two of three train in each round; epochs as in training, so equal scores
    settings = {
        **small,
        "participation": 0.5,
        "eval_policy": "refresh",
        "local_epochs": 2,
        "final_local_epochs": 2,
        "rounds": 4,
    }
    run = simulate("fedavg", **settings)
    trained = {
        (row["round"], row["partition_id"]) for row in run.clients if "loss" in row
    }
    caught_up = 0
    for number in (1, 2, 3):
        now, then = local_scores(run, number), local_scores(run, number + 1)
        for pid in range(3):
            if (number, pid) not in trained and (number + 1, pid) in trained:
                caught_up += 1
                assert now[pid] == then[pid]
    assert caught_up > 0


def test_with_refresh_all_the_sampled_clients_are_refreshed_too(
    small: dict[str, Any],
) -> None:
    settings = {
        **small,
        "participation": 0.5,
        "local_epochs": 2,
        "final_local_epochs": 2,
        "rounds": 4,
    }
    # the sampled clients of this run score what they trained in the round
    run = simulate("fedavg", **settings, eval_policy="refresh")
    fresh = simulate("fedavg", **settings, eval_policy="refresh-all")
    trained = {
        (row["round"], row["partition_id"]) for row in run.clients if "loss" in row
    }
    in_both_rounds = 0
    for number in (1, 2, 3):
        now, then = local_scores(fresh, number), local_scores(run, number + 1)
        assert set(now) == {0, 1, 2}
        for pid in range(3):
            if (number + 1, pid) in trained:
                assert now[pid] == then[pid]
                in_both_rounds += (number, pid) in trained
    assert in_both_rounds > 0
    assert [r["loss"] for r in fresh.rounds] == [r["loss"] for r in run.rounds]
    # every client gets the download of the next round, and the sampled two their own
    down = [run.rounds[-1]["bytes"]["down"]["weights"] for run in (run, fresh)]
    assert down[1] == down[0] / 3 * 5


def test_the_evaluation_policy_leaves_training_as_it_is(small: dict[str, Any]) -> None:
    settings = {**small, "clients": 5, "participation": 0.4, "rounds": 4}
    stale = simulate("fedavg", **settings, eval_policy="stale")
    fresh = simulate("fedavg", **settings, eval_policy="refresh")
    untrained = simulate(
        "fedavg", **settings, eval_policy="refresh", final_local_epochs=0
    )
    losses = [[row["loss"] for row in run.rounds] for run in (stale, fresh, untrained)]
    assert losses[0] == losses[1] == losses[2]
    scores = {str(run.rounds[-1]["metrics"]) for run in (stale, fresh, untrained)}
    assert len(scores) == 3
    down = [run.rounds[-1]["bytes"]["down"]["weights"] for run in (stale, fresh)]
    assert down[1] == down[0] / 2 * 5  # two train, the other three catch up


@pytest.mark.parametrize("policy", ["refresh", "refresh-all"])
def test_a_method_of_one_round_has_nothing_to_catch_up_with(
    small: dict[str, Any], policy: str
) -> None:
    with pytest.raises(ConfigError, match="samples all clients in its single round"):
        simulate("opfgl", **{**small, "rounds": 1}, eval_policy=policy)


@pytest.mark.parametrize("evaluate", ["global", "both"])
def test_the_aggregated_model_is_scored_on_every_client(
    small: dict[str, Any], evaluate: str
) -> None:
    run = simulate(**{**small, "evaluate": evaluate})
    modes = {"global": {"global"}, "both": {"local", "global"}}[evaluate]
    assert set(run.rounds[-1]["metrics"]) == modes
    assert run.summary["evaluate"] == evaluate
    assert ("global" in run.summary) == (evaluate == "both")


def test_scores_come_every_so_many_rounds_and_in_the_last(
    small: dict[str, Any],
) -> None:
    run = simulate(**{**small, "rounds": 5, "evaluate_every": 2})
    assert [("metrics" in row) for row in run.rounds] == [
        False, True, False, True, True,
    ]  # fmt: skip


def test_the_weights_of_the_average_follow_the_setting(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    seen: dict[str, list[float]] = {}
    for kind in ("train-nodes", "nodes", "equal"):
        run = simulate(**{**small, "rounds": 1, "weight_by": kind})
        rows = [c for c in run.clients if c["round"] == 1]
        seen[kind] = [c["num_examples"] for c in rows]
        about = [c for c in run.clients if c["round"] == 0]
        key = {"train-nodes": "num_train", "nodes": "num_nodes"}.get(kind)
        assert seen[kind] == [c[key] if key else 1 for c in about]


def test_bytes_of_the_weights_are_those_of_the_formula(small: dict[str, Any]) -> None:
    run = simulate(**small)
    parameters = 8 * 8 + 8 + 8 * 3 + 3  # GCN 8 → 8 → 3
    counted = run.rounds[0]["bytes"]["up"]["weights"] / 3
    assert 4 * parameters <= counted <= 4 * parameters + 4 * 250  # 4 arrays' headers
    assert run.rounds[0]["bytes"]["down"]["weights"] == counted * 3


def test_finetuning_is_reported_apart_and_never_chosen(small: dict[str, Any]) -> None:
    run = simulate(**{**small, "fedavg": {"finetune_epochs": 5}})
    assert run.rounds[-1]["phase"] == "finetune"
    assert run.summary["best"]["round"] <= 2
    assert run.summary["last"]["round"] == 2
    assert 0 <= run.summary["finetuned"]["test"]["accuracy"] <= 1


def test_a_model_without_validation_score_is_of_the_last_round(
    small: dict[str, Any],
) -> None:
    settings = {**small, "fedavg": {"finetune_epochs": 1}, "split": "60/40"}
    run = simulate(**settings)
    assert run.rounds[-1]["phase"] == "finetune"
    card = read_card(run.path)
    assert card is not None
    assert card.round == small["rounds"]


class GoneNodes:
    """A grid that cannot store some messages, as Flower's for nodes that left."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids

    def push_messages(self, messages: Any) -> list[str]:
        return self.ids

    def pull_messages(self, message_ids: Any) -> list[Message]:
        assert "" not in message_ids
        return []


class SlowNode(GoneNodes):
    """A node that replies, with an error, at the third pull."""

    pulls = 0

    def pull_messages(self, message_ids: Any) -> list[Any]:
        self.pulls += 1
        error = SimpleNamespace(code=0, reason="late, but here")
        reply = SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id="a"),
            has_error=lambda: True,
            error=error,
        )
        return [reply] if self.pulls == 3 else []


@pytest.mark.parametrize("waits", [True, False])
def test_a_grid_that_always_answers_is_waited_for(waits: bool) -> None:
    grid: Any = SlowNode(["a"])
    grid.always_answers = waits
    messages: Any = {0: None}
    (failure,) = send_receive(grid, messages, timeout=0.0).failures
    assert ("late, but here" if waits else "no reply within") in failure.reason
    assert WorkerGrid.always_answers


@pytest.mark.parametrize(("ids", "lost"), [(["a", "", ""], [1, 2]), ([], [0, 1, 2])])
def test_messages_that_were_not_stored_are_failures(
    ids: list[str], lost: list[int]
) -> None:
    grid: Any = GoneNodes(ids)
    messages: Any = dict.fromkeys(range(3))
    exchange = send_receive(grid, messages, timeout=0.0)
    assert [failure.partition_id for failure in exchange.failures] == [0, 1, 2]
    reasons = [failure.reason for failure in exchange.failures]
    assert [
        p for p, text in enumerate(reasons) if "could not be delivered" in text
    ] == lost


def test_finetuning_keeps_the_epoch_that_is_best_on_validation(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    found: list[tuple[float, float]] = []
    original = FedAvgClientApp.finetune

    def finetune(app: Any, client: Any, number: int, download: Any) -> Any:
        from flower_fgl.client_apps.runtime.training import load_state

        start = client.build_model()
        load_state(start, download.tensors)
        before = client.evaluate(start)["val"].accuracy
        fit = original(app, client, number, download)
        found.append((before, client.evaluate(fit.model)["val"].accuracy))
        return fit

    monkeypatch.setattr(FedAvgClientApp, "finetune", finetune)
    simulate(**{**small, "fedavg": {"finetune_epochs": 4}})
    assert len(found) == 3
    assert all(after >= before for before, after in found)


@pytest.mark.parametrize(
    ("shares", "kept"),
    [
        ([0.5, 0.6, 0.7, 0.6], 2),
        ([0.5, 0.4, 0.5, 0.3], 0),  # of equal epochs the earliest
        ([0.5, 0.7, math.nan, 0.6], 1),  # diverged
        ([math.nan] * 4, 3),  # no validation nodes: the last epoch
    ],
)
@pytest.mark.parametrize("score", ["accuracy", "rmse"])
def test_finetuning_keeps_the_same_epoch_by_an_error_as_by_a_share(
    shares: list[float], kept: int, score: str
) -> None:
    values = iter(shares if score == "accuracy" else [1 - share for share in shares])
    config = replace(
        parse_config({"method": "fedavg", "fedavg.finetune-epochs": 3}),
        main_score=score,
    )

    def evaluate(model: torch.nn.Module) -> dict[str, Any]:
        value = next(values)
        return {"val": SimpleNamespace(selected=lambda _: value)}

    client: Any = SimpleNamespace(config=config, evaluate=evaluate)
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def train(*, epochs: int, after_epoch: Any) -> float:
        for epoch in range(epochs):
            with torch.no_grad():
                model.weight.fill_(epoch + 1)
            after_epoch(0.1)
        return 0.1

    FedAvgClientApp().keep_best_epoch(client, model, train)
    assert model.weight.item() == kept


def test_finetuning_scores_all_clients_whatever_happens_to_some(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    Faulty(monkeypatch, lambda pid, number: pid == 1 and number == 3, raises)
    idle = {"clients": 12, "partition": "dirichlet", "dirichlet_alpha": 0.3}
    settings = {**small, **idle, "fedavg": {"finetune_epochs": 2}}
    run = simulate(**settings)
    assert sum(run.summary["failures"].values()) == 1
    tested = run.summary["best"]["test"]["num_nodes"]
    assert run.summary["finetuned"]["test"]["num_nodes"] == tested


def test_finetuned_models_are_scored_where_only_the_aggregated_one_was(
    small: dict[str, Any],
) -> None:
    run = simulate(**{**small, "evaluate": "global", "fedavg": {"finetune_epochs": 2}})
    assert run.summary["finetuned"]["test"]["num_nodes"] > 0


def test_a_failed_evaluation_is_made_up_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    Faulty(monkeypatch, lambda pid, number: number == 2, raises)
    run = simulate(**{**small, "rounds": 4, "evaluate_every": 2})
    scored = [
        row["round"] for row in run.rounds if row["status"] == "ok" and "metrics" in row
    ]
    assert scored == [3, 4]


def test_a_run_in_which_no_good_round_was_scored_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    Faulty(monkeypatch, lambda pid, number: number >= 3, raises)
    with pytest.raises(RunError, match="scored"):
        simulate(**{**small, "rounds": 4, "evaluate_every": 3})


def test_rounds_that_lost_scores_do_not_compete() -> None:
    def row(number: int, num_nodes: int, accuracy: float) -> dict[str, Any]:
        val = {"num_nodes": num_nodes, "accuracy": accuracy}
        columns = {"val": val, "test": val}
        return {
            "round": number,
            "phase": "train",
            "status": "ok",
            "metrics": {"local": columns},
        }

    rows = [row(1, 10, 0.5), row(2, 4, 0.9), row(3, 10, 0.4)]
    unknown = dict.fromkeys(
        ("method", "dataset", "clients", "seed", "engine", "partition_sha256")
    )
    summary = summarise(rows, **unknown, evaluate="local", status="completed")
    assert summary["best"]["round"] == 1
    assert summary["last"]["round"] == 3


def test_clients_that_trained_are_not_sent_a_model_to_score_their_own(
    small: dict[str, Any],
) -> None:
    run = simulate(**{**small, "participation": 0.34, "rounds": 4})
    one = run.rounds[0]["bytes"]["up"]["weights"] / 2  # ⌈0.34 · 3⌉ = 2 clients train
    sent = sum(row["bytes"]["down"]["weights"] for row in run.rounds) / one
    never = [c["partition_id"] for c in run.clients if "loss" in c]
    assert 8 < sent <= 8 + len(run.rounds)
    assert len(set(never)) == 3


def test_why_a_round_failed_says_how_many_were_asked(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    Faulty(monkeypatch, lambda pid, number: pid > 0, raises)
    with pytest.raises(RunError, match="1 usable replies of 3 sampled clients"):
        simulate(**{**small, "rounds": 3, "min_replies": 2})


def test_who_failed_is_logged_by_round_and_counted_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
    small: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    Faulty(monkeypatch, lambda pid, number: number == 2 and pid > 0, raises)
    run = simulate(**{**small, "rounds": 3, "min_replies": 2})
    said = [r.getMessage() for r in caplog.records if "Round" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("Round 2: clients 1, 2: ")
    assert "out of order" in said[0]
    assert "Failed: 1 of 3 rounds; 2 messages to clients (most often: " in run.table()
    assert "Failed" not in simulate(**{**small, "rounds": 1}).table()


def test_a_bug_in_a_client_half_is_shown_once_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
    small: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fit(*_: Any) -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(FedAvgClientApp, "fit", fit)
    with pytest.raises(RunError, match="KeyError: 'nothing'"):
        simulate(**{**small, "rounds": 3})
    shown = [r for r in caplog.records if r.exc_info]
    assert len(shown) == 1
    assert "The client half of fedavg raised" in shown[0].getMessage()


def test_a_server_half_that_cannot_be_loaded_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any], tmp_path: Path
) -> None:
    row = replace(METHODS["fedavg"], strategy="flower_fgl.strategies.nowhere:FedAvg")
    monkeypatch.setitem(METHODS.own, "fedavg", row)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        simulate(**{**small, "run_dir": str(tmp_path / "run")})
    run = Run.load(tmp_path / "run")
    assert run.status == "failed"
    assert "nowhere" in run.summary["error"]


def test_start_takes_no_model_from_outside(small: dict[str, Any]) -> None:
    from flwr.app import ArrayRecord

    from flower_fgl import METHODS

    strategy = METHODS["fedavg"].load_strategy()(parse_config({}))
    with pytest.raises(RunError, match="builds its own model"):
        strategy.start(None, ArrayRecord())  # type: ignore[arg-type]


def test_checkpoints_are_due_every_few_rounds_and_at_the_end_if_kept() -> None:
    def due(**values: Any) -> list[int]:
        config = parse_config({"rounds": 5, **values})
        return [number for number in range(1, 7) if is_checkpoint_due(config, number)]

    assert due(**{"checkpoint-every": 2}) == [2, 4, 6]
    assert due(**{"checkpoint-every": 0}) == []
    assert due(**{"checkpoint-every": 2, "keep-checkpoint": True}) == [2, 4, 5, 6]
