"""Clients that do not reply are asked less and less often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_fgl import Run
from flower_fgl.strategies.rounds.loop_state import (
    MAX_PAUSE,
    Silence,
    note_replies,
    without_paused,
)
from tests.strategies.rounds.faulty_nodes import faulty, places_of
from tests.strategies.rounds.test_rejoining import Nodes, run_with
from tests.support.short_runs import comparable


def nothing(grid: Nodes, number: int) -> None:
    return


def test_the_pauses_double_up_to_a_limit() -> None:
    silent: dict[int, Silence] = {}
    number, asked = 1, []
    for _ in range(9):
        asked.append(number)
        note_replies(silent, number, [3], [3])
        number = silent[3].next_round
    # pauses of 1, 2, 4, 8, 16, 32, 32, 32 rounds
    assert asked == [1, 3, 6, 11, 20, 37, 70, 103, 136]
    assert MAX_PAUSE == 32
    assert silent[3].is_paused(136 + 32)
    assert not silent[3].is_paused(136 + 33)


def test_two_exchanges_of_a_round_count_once_and_a_reply_ends_the_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    silent: dict[int, Silence] = {}
    note_replies(silent, 4, [0, 1], [1])
    note_replies(silent, 4, [1], [1])
    assert silent == {1: Silence(1, 4)}
    note_replies(silent, 6, [0, 1], [1])
    assert silent == {1: Silence(2, 6)}
    note_replies(silent, 7, [0], [])  # was not asked: nothing changes
    assert silent == {1: Silence(2, 6)}
    note_replies(silent, 9, [0, 1], [])
    assert silent == {}
    assert "Client 1 sent no reply in round 4. It is asked again in round 6." in (
        caplog.text
    )
    assert "in 2 rounds in a row. It is asked again in round 9." in caplog.text
    assert "Client 1 replies again." in caplog.text
    assert "Client 0" not in caplog.text


def test_paused_clients_fill_up_a_round_that_would_be_too_small() -> None:
    # asked again in rounds 3 (client 0), 6 (client 2) and 5 (client 3)
    silent = {0: Silence(1, 1), 2: Silence(3, 1), 3: Silence(2, 2)}
    assert [silent[p].next_round for p in (0, 2, 3)] == [3, 6, 5]
    assert without_paused(range(5), silent, 2, 1) == [1, 4]
    assert without_paused(range(5), silent, 2, 3) == [0, 1, 4]
    assert without_paused(range(5), silent, 2, 4) == [0, 1, 3, 4]
    assert without_paused(range(5), silent, 2, 9) == [0, 1, 2, 3, 4]
    assert without_paused(range(5), silent, 5, 1) == [0, 1, 3, 4]
    assert without_paused([0], silent, 2, 1) == [0]


def run(folder: Path, grid_type: type[Nodes], **settings: Any) -> Run:
    settings = {"method": "fedavg", "rounds": 12, **settings}
    return run_with(folder, nothing, grid_type=grid_type, **settings)


def mute(pid: int, *, until: int = 1000) -> type[Nodes]:
    """Return a grid on which one client never replies before a round."""

    def plan(node: int, kind: str, number: int) -> str:
        is_silent = node == pid and number < until and not kind.startswith("query")
        return "silent" if is_silent else ""

    return faulty(plan)


def test_a_silent_client_is_asked_less_and_less_often(tmp_path: Path) -> None:
    grid: Any = mute(1)
    done = run(tmp_path / "run", grid)
    assert [n for p, k, n in grid.asked if (p, k) == (1, "train")] == [1, 3, 6, 11]
    # nor is it asked for its scores, in these rounds or in between
    assert not [n for p, k, n in grid.asked if (p, k) == (1, "evaluate")]
    assert [row["replies"] for row in done.rounds] == [2] * 12
    assert sum(done.summary["failures"].values()) == 4


def test_one_reply_ends_the_pauses(tmp_path: Path) -> None:
    grid: Any = mute(1, until=5)
    done = run(tmp_path / "run", grid)
    rounds = [n for p, k, n in grid.asked if (p, k) == (1, "train")]
    assert rounds == [1, 3, *range(6, 13)]
    assert [row["replies"] for row in done.rounds] == [2] * 5 + [3] * 7


@pytest.mark.parametrize("method", ["fedavg", "clustered-sampling", "fedproto"])
def test_others_are_sampled_in_place_of_a_silent_client(
    method: str, tmp_path: Path
) -> None:
    grid: Any = mute(1)
    done = run(tmp_path / "run", grid, method=method, participants=2, rounds=8)
    asked = [n for p, k, n in grid.asked if (p, k) == (1, "train")]
    for row in done.rounds:
        if row["round"] not in asked and method != "clustered-sampling":
            assert row["replies"] == 2  # clustered sampling may draw one twice
    assert len(asked) < 5


def test_a_round_keeps_min_replies_although_a_client_is_silent(tmp_path: Path) -> None:
    grid: Any = mute(1, until=2)
    done = run(tmp_path / "run", grid, min_replies=3, rounds=3)
    assert [row["status"] for row in done.rounds] == ["failed", "ok", "ok"]
    assert [n for p, k, n in grid.asked if (p, k) == (1, "train")] == [1, 2, 3]


def test_a_restarted_client_is_asked_at_once(tmp_path: Path) -> None:
    grid: Any = mute(1, until=2)

    def after(nodes: Nodes, number: int) -> None:
        if number == 1:
            (node,) = (
                n
                for n, c in nodes.contexts.items()
                if c.node_config["partition-id"] == 1
            )
            nodes.kill(node)
            nodes.start(**{"partition-id": 1, "num-partitions": 3})

    done = run_with(tmp_path / "run", after, grid_type=grid, method="fedavg", rounds=3)
    assert [row["replies"] for row in done.rounds] == [2, 3, 3]


def test_pauses_survive_a_resumed_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": "fedavg",
        "rounds": 12,
        "checkpoint_every": 1,
        "engine": "deployment",
    }

    def stop(nodes: Nodes, number: int) -> None:
        if number == 8:  # its checkpoint is of round 7, within a pause
            raise KeyboardInterrupt

    places = {name: places_of(tmp_path, name) for name in "ab"}
    whole = run_with(
        tmp_path / "whole",
        nothing,
        places["a"],
        grid_type=mute(1),
        **settings,
    )
    with pytest.raises(KeyboardInterrupt):
        run_with(
            tmp_path / "run",
            stop,
            places["b"],
            grid_type=mute(1),
            **settings,
        )
    grid: Any = mute(1)
    done = run_with(
        tmp_path / "run",
        nothing,
        places["b"],
        grid_type=grid,
        resume=True,
        **settings,
    )
    assert comparable(done) == comparable(whole)
    assert [n for p, k, n in grid.asked if (p, k) == (1, "train")] == [11]
