from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.fedsageplus import (
    FeatureGradient,
    GeneratorState,
    generator_shapes,
)
from flower_fgl.strategies.fedsageplus import FedSagePlus, turn_offsets
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.strategies.rounds.faulty_nodes import faulty
from tests.strategies.rounds.test_rejoining import run_with


def test_every_client_gets_gradients_from_every_other_in_turn() -> None:
    met = {
        (k, (k + o) % 5)
        for step in (1, 2, 3, 4)
        for k in range(5)
        for o in turn_offsets(step, 5, 1)
    }
    assert met == {(k, j) for k in range(5) for j in range(5) if k != j}


@pytest.mark.parametrize(
    ("clients", "peers", "expected"),
    [(1, 1, []), (1, 0, []), (4, 0, [1, 2, 3]), (3, 9, [1, 2]), (2, 1, [1])],
)
def test_the_number_of_judges_in_a_round(
    clients: int, peers: int, expected: list[int]
) -> None:
    assert sorted(turn_offsets(1, clients, peers)) == expected


def server(general: dict[str, Any] | None = None, **values: Any) -> FedSagePlus:
    settings = {f"fedsage+.{key}": value for key, value in values.items()}
    settings |= general or {}
    settings |= {"fedsage+.gen-channels": 2, "fedsage+.gen-wide-channels": 2}
    config = parse_config({"method": "fedsage+", "hidden-channels": 3, **settings})
    made = FedSagePlus(config)
    made.federation = SimpleNamespace(  # type: ignore[assignment]
        trainable=[0, 3, 7], num_features=2
    )
    made.loop.log = RoundLog(0)
    return made


def state_for(strategy: FedSagePlus, size: int = 1) -> GeneratorState:
    tensors = {n: torch.zeros(s) for n, s in strategy.generator_shapes.items()}
    counts = torch.ones(size, dtype=torch.uint8)
    return GeneratorState(tensors if size else {}, torch.zeros(size, 3), counts)


def test_gradients_are_averaged_over_the_judges_that_reply() -> None:
    strategy = server(peers=0)
    states = {pid: state_for(strategy) for pid in (0, 3)}
    asked: list[dict[int, GeneratorState]] = []

    def ask(
        step: int, action: str, payloads: dict[int, Any], **_: bool
    ) -> dict[int, RecordDict]:
        asked.append(payloads)
        return {
            judge: FeatureGradient(
                {n: torch.full(s, float(judge)) for n, s in shapes.items()}
            ).to_record()
            for judge in payloads
            if judge != 7 or len(asked) > 1
        }

    shapes = strategy.generator_shapes
    strategy.messenger.ask = ask  # type: ignore[method-assign,assignment]
    found = strategy.judge(1, states)
    # 3 judges 0 and 7 judges 3, then 7 judges 0 and 0 judges 3; 7 fails the first time
    assert [sorted(each) for each in asked] == [[3, 7], [0, 7]]
    assert asked[0][3] is states[0]
    assert asked[1][0] is states[3]
    assert all(bool((t == 5).all()) for t in found[0].tensors.values())
    assert all(bool((t == 0).all()) for t in found[3].tensors.values())


def test_a_client_without_generator_state_is_not_judged() -> None:
    strategy = server(peers=1)
    asked: list[list[int]] = []

    def ask(
        step: int, action: str, payloads: dict[int, Any], **_: bool
    ) -> dict[int, RecordDict]:
        asked.append(sorted(payloads))
        return {}

    strategy.messenger.ask = ask  # type: ignore[method-assign,assignment]
    states = {0: state_for(strategy, 0), 3: state_for(strategy)}
    assert strategy.judge(1, states) == {}
    assert asked == [[7]]


def test_a_malformed_gradient_is_dropped_and_reported() -> None:
    strategy = server(peers=1)
    odd = RecordDict({"gradient": write_tensors({"0.weight": torch.zeros(1)})})
    strategy.messenger.ask = lambda *_, **__: {3: odd}  # type: ignore[method-assign,assignment]
    assert strategy.judge(1, {0: state_for(strategy)}) == {}
    assert [f.partition_id for f in strategy.loop.log.failures] == [3]


def test_two_empty_gradients_name_the_client_whose_generator_gave_none() -> None:
    strategy = server(peers=2)
    strategy.messenger.ask = lambda _, __, asked, **___: dict.fromkeys(  # type: ignore[method-assign,assignment]
        asked, RecordDict()
    )
    assert strategy.judge(1, {0: state_for(strategy)}) == {}
    (failure,) = strategy.loop.log.failures
    assert failure.partition_id == 0
    assert (
        failure.reason
        == "its generator gives no finite gradient at client 3 and client 7"
    )


@pytest.mark.parametrize("peers", [1, 2])
def test_one_judge_cannot_have_another_client_left_out(
    peers: int, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = server(peers=peers)
    state = state_for(strategy)
    zero = {n: torch.zeros_like(t) for n, t in state.tensors.items()}
    honest = FeatureGradient(zero).to_record()
    strategy.messenger.ask = lambda _, __, asked, **___: {  # type: ignore[method-assign,assignment]
        judge: RecordDict() if judge == 3 else honest for judge in asked
    }
    found = strategy.judge(1, {0: state})
    assert set(found) == ({0} if peers == 2 else set())
    assert not strategy.loop.log.failures
    assert "Client 0 stays, although its generator gives no finite" in caplog.text


def test_with_noise_an_empty_gradient_names_the_client_that_sent_it() -> None:
    strategy = server({"upload-clip": 1.0, "upload-noise": 1.0}, peers=1)
    strategy.messenger.ask = lambda *_, **__: {3: RecordDict()}  # type: ignore[method-assign,assignment]
    assert strategy.judge(1, {0: state_for(strategy)}) == {}
    (failure,) = strategy.loop.log.failures
    assert (failure.partition_id, failure.reason) == (3, "it sent no gradient")


def test_a_gradient_beyond_the_clip_names_the_client_that_sent_it() -> None:
    strategy = server({"upload-clip": 1.0}, peers=1)
    state = state_for(strategy)
    large = FeatureGradient({n: torch.ones_like(t) for n, t in state.tensors.items()})
    strategy.messenger.ask = lambda *_, **__: {3: large.to_record()}  # type: ignore[method-assign,assignment]
    assert strategy.judge(1, {0: state}) == {}
    (failure,) = strategy.loop.log.failures
    assert failure.partition_id == 3
    assert "at most 1 fits upload-clip" in failure.reason


QUERIES = {"generate": 4, "judge": 3}
"""Messages to each of three clients in four rounds of generator training."""


def queries_to_client_1(
    folder: Path, plan: Callable[[int, str, int], str]
) -> tuple[dict[str, int], Any]:
    """Run with the faults of a plan; count the queries to client 1."""
    grid: Any = faulty(plan)
    small = {"gen-rounds": 4, "gen-channels": 4, "gen-wide-channels": 8}
    settings: Any = {f"fedsage+.{key}": value for key, value in small.items()}
    done = run_with(
        folder / "run",
        lambda *_: None,
        grid_type=grid,
        method="fedsage+",
        **{**settings, "rounds": 2},
    )
    kinds = [k.removeprefix("query.") for p, k, _ in grid.asked if p == 1]
    return {kind: kinds.count(kind) for kind in QUERIES}, done


@pytest.mark.parametrize(
    ("silent_in", "expected"),
    [
        ("generate", {"generate": 1, "judge": 0}),
        ("judge", {"generate": 1, "judge": 1}),
    ],
)
def test_generator_training_asks_a_silent_client_once(
    silent_in: str, expected: dict[str, int], tmp_path: Path
) -> None:
    def plan(pid: int, kind: str, number: int) -> str:
        return "silent" if (pid, kind) == (1, f"query.{silent_in}") else ""

    asked, done = queries_to_client_1(tmp_path, plan)
    assert asked == expected
    first = done.rounds[0]
    assert first["phase"] == "generate"
    assert [f["partition_id"] for f in first["failures"]] == [1]
    assert [row["replies"] for row in done.rounds[1:]] == [2, 3]


def test_generator_training_still_asks_a_client_that_answered_with_an_error(
    tmp_path: Path,
) -> None:
    def plan(pid: int, kind: str, number: int) -> str:
        return "raise" if (pid, kind, number) == (1, "query.generate", 1) else ""

    asked, _ = queries_to_client_1(tmp_path, plan)
    assert asked == QUERIES


def test_a_run_whose_generators_all_fail_reports_the_reasons() -> None:
    strategy = server()
    strategy.messenger.drop(3, "out of memory")
    strategy.messenger.ask = lambda *_, **__: {}  # type: ignore[method-assign,assignment]
    with pytest.raises(RunError, match=r"0 of 3 clients .* out of memory"):
        strategy.generate()


def test_a_generator_state_round_trips_with_the_stated_size() -> None:
    strategy = server()
    state = state_for(strategy, 4)
    shapes = strategy.generator_shapes
    size = 3 * 2 + 2 + 2 * 2 + 2 + 2 * 10 + 10  # p = 3, widths 2 and 2, five of d = 2
    assert state.num_bytes == 4 * (size + 4 * 3) + 4
    back = GeneratorState.from_record(state.to_record(), (shapes, 3, 5, 100))
    assert torch.equal(back.inputs, state.inputs)
    assert torch.equal(back.counts, state.counts)
    empty = GeneratorState.from_record(RecordDict(), (shapes, 3, 5, 100))
    assert empty.num_bytes == 0


@pytest.mark.parametrize(
    ("inputs", "counts"),
    [
        (torch.zeros(1, 3), torch.tensor([6], dtype=torch.uint8)),
        (torch.zeros(1, 3), torch.tensor([0], dtype=torch.uint8)),
        (torch.zeros(1, 4), torch.tensor([1], dtype=torch.uint8)),
        (torch.zeros(2, 3), torch.tensor([1], dtype=torch.uint8)),
        (torch.full((1, 3), torch.nan), torch.tensor([1], dtype=torch.uint8)),
        (torch.zeros(1, 3), torch.tensor([1])),
    ],
)
def test_invalid_generator_states_are_rejected(
    inputs: torch.Tensor, counts: torch.Tensor
) -> None:
    strategy = server()
    record = GeneratorState(state_for(strategy).tensors, inputs, counts).to_record()
    with pytest.raises(PayloadError, match="nodes"):
        GeneratorState.from_record(record, (strategy.generator_shapes, 3, 5, 100))


def test_the_shapes_follow_the_settings() -> None:
    strategy = server(**{"max-neighbours": 2})
    shapes = generator_shapes(
        strategy.config.method_config, in_channels=3, num_features=2
    )
    assert shapes["4.weight"] == (4, 2)
    assert shapes == strategy.generator_shapes
