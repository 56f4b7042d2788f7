"""What a run under Flower writes to Flower's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from flower_fgl import client_app, server_app
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.config import pyproject_table
from flower_fgl.core.errors import ConfigError, FglError, hide_traceback
from flower_fgl.core.flower_internals import ErrorCode, parse_config_args
from flower_fgl.core.options import listed
from flower_fgl.lab.results import Run
from flower_fgl.methods import METHODS
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.flower_log import flower_log, log_results, log_rounds
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from tests.client_apps.runtime.test_owners import saved
from tests.support.owners import owner_graphs, run_owners

TINY = {
    "clients": 2,
    "rounds": 2,
    "local-epochs": 1,
    "hidden-channels": 8,
    "synthetic.nodes": 120,
    "synthetic.features": 8,
    "checkpoint-every": 0,
}


def flat_defaults() -> dict[str, Any]:
    """Return what Flower passes to the app if nobody sets anything."""
    return dict(flatten_config(pyproject_table(METHODS)))


class Lines(logging.Handler):
    """Formats records as Flower's console does, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(
            logging.Formatter("%(levelname)s: %(message)s").format(record)
        )


@pytest.fixture
def flower() -> Iterator[list[str]]:
    """Lines that reach Flower's logger."""
    logger, lines = logging.getLogger("flwr"), Lines()
    logger.addHandler(lines)
    yield lines.texts
    logger.removeHandler(lines)


def run_app(values: dict[str, Any]) -> None:
    """Run the ServerApp as a SuperLink does, on clients in this process."""
    session = Session()
    grid = LocalGrid(DispatchingClientApp(session), 2, values)
    context = Context(1, 1, {}, RecordDict(), values)
    with task_identity(1):
        server_app.app(grid, context)


def test_flowers_log_has_a_line_per_round_the_results_and_the_folder(
    flower: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_app({**TINY, "run-dir": str(folder)})
    run = Run.load(folder)
    rounds = [line for line in flower if "Round " in line]
    assert [line.partition(": loss")[0] for line in rounds] == [
        "INFO: Round 1 of 2",
        "INFO: Round 2 of 2",
    ]
    assert f"{100 * run.last['test']['accuracy']:.1f} %" in rounds[-1]
    assert f"INFO: Run folder: {folder}" in flower[: flower.index(rounds[0])]
    table = [f"INFO: {line}" for line in run.table().splitlines()]
    assert flower[-len(table) :] == table


def test_the_first_lines_name_the_settings_and_who_set_them(
    flower: list[str], tmp_path: Path
) -> None:
    app = {
        **flat_defaults(),
        **TINY,
        "method": "fedpano",
        "run-dir": str(tmp_path / "r"),
    }
    run_app(app)
    method = METHODS["fedpano"].defaults
    of_method = listed({k: v for k, v in method.items() if k not in TINY})
    given = listed({k: v for k, v in app.items() if flat_defaults()[k] != v})
    assert "lr" in method
    assert "lr = " not in given
    assert flower[:2] == [
        f"INFO: Settings from --run-config or the app's pyproject.toml: {given}.",
        f"INFO: Settings by the method fedpano: {of_method}.",
    ]


def test_a_dropped_run_config_shows_in_the_first_line(flower: list[str]) -> None:
    # what Flower makes of --run-config 'lr = 0.5'
    text = "Settings from --run-config or the app's pyproject.toml: "
    with flower_log():
        for pair in ("lr = 0.5", "lr=0.5"):
            given = parse_config_args([pair])
            server_app.read_run_config({**flat_defaults(), **given})
    assert [line for line in flower if text in line] == [
        f"INFO: {text}none differs from its default.",
        f"INFO: {text}lr = 0.5.",
    ]


def test_the_log_of_the_package_is_as_before_afterwards(flower: list[str]) -> None:
    own = logging.getLogger("flower_fgl")
    before = own.level, own.propagate, list(own.handlers)
    with flower_log():
        logging.getLogger("flower_fgl.somewhere").info("inside")
        logging.getLogger("flower_fgl.somewhere").debug("detail")
    logging.getLogger("flower_fgl.somewhere").info("outside")
    assert flower == ["INFO: inside"]
    assert (own.level, own.propagate, list(own.handlers)) == before


def test_wrong_settings_end_with_their_message_alone(flower: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run_app({**TINY, "method": "fedabc"})
    # what Flower does with an exception of a ServerApp
    log = logging.getLogger("flwr")
    log.error("%s raised an exception", "ServerApp", exc_info=caught.value)
    assert flower == [f"ERROR: {caught.value}"]
    assert 'Unknown method "fedabc"' in flower[0]
    log.error("%s raised an exception", "ServerApp", exc_info=RuntimeError("bug"))
    assert "ServerApp raised an exception" in flower[-1]
    assert "RuntimeError: bug" in flower[-1]


def test_a_supernodes_log_shows_what_an_owner_can_fix_by_its_message(
    flower: list[str], tmp_path: Path
) -> None:
    log = logging.getLogger("flwr")
    log.removeFilter(hide_traceback)  # as in a process that handles its first message
    node = {"graph": str(tmp_path / "absent.npz")}
    context = Context(1, 1, node, RecordDict(), {**TINY, "dataset": "owned"})
    with task_identity(1):
        message = Message(RecordDict(), 1, "train")
    with pytest.raises(FglError) as caught:
        DispatchingClientApp()(message, context)
    # what Flower does with an exception of a ClientApp
    log.error("%s raised an exception", "ClientApp", exc_info=caught.value)
    assert flower == [f"ERROR: {caught.value}"]
    log.error("%s raised an exception", "ClientApp", exc_info=RuntimeError("bug"))
    assert "ClientApp raised an exception\nRuntimeError: bug" in flower[-1]


def test_flower_gets_an_answer_for_an_error_that_an_owner_can_fix(
    flower: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's simulation would log several tracebacks of an exception."""
    context = Context(1, 1, {"graph": "/no.npz"}, RecordDict(), {**TINY})
    with task_identity(1):
        message = Message(RecordDict(), 1, "train")
    monkeypatch.setattr(client_app, "LOGGED", set())
    app = type(client_app.app)()
    replies = [each(message, context) for each in (app, type(app)())]  # as copies
    for reply in replies:
        assert reply.has_error()
        assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert "lacks the agreement" in str(reply.error.reason)
    assert flower == [f"ERROR: {replies[0].error.reason}"]  # once
    monkeypatch.setattr(app, "_handle", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        app(message, context)


def test_a_round_without_scores_and_a_phase_have_lines(flower: list[str]) -> None:
    with flower_log():
        show = log_rounds(3)
        show({"round": 1, "phase": "train", "status": "failed"})
        show({"round": 4, "phase": "finetune", "loss": 0.5, "seconds": {"total": 1.25}})
    assert flower == [
        "INFO: Round 1 of 3: failed",
        "INFO: Phase finetune: loss 0.500  (1.2 s)",
    ]


def test_the_end_of_a_run_names_the_owners_that_were_left_out(
    tmp_path: Path, flower: list[str]
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    nodes[1]["min-class-count"] = 3
    run = run_owners(nodes, tmp_path / "run", rounds=1)
    flower.clear()
    with flower_log():
        log_results(run.path)
    assert flower[-1].startswith("WARNING: birch did not take part: birch refuses the")
