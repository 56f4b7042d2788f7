"""Owners that cannot be used: one clear error from the command line and from Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.core.errors import FglError

SETTINGS = {"node": "transductive", "link": "link", "edge": "edge", "graph": "graph"}
RING = [(f"n{i}", f"n{(i + step) % 40}") for i in range(40) for step in (1, 3)]
UNKNOWN = [*RING[:2], ("n1", "zz"), *RING[2:]]


def write_owner(
    folder: Path,
    *,
    label: Callable[[int], str] | None = lambda i: "ab"[i % 2],
    edges: list[tuple[str, str]] = RING,
    edge_label: Callable[[int], str] | None = lambda k: "pq"[k % 2],
    time: Callable[[int], int] | None = None,
) -> None:
    """Write an owner's tables; a column whose function is ``None`` is left out."""
    folder.mkdir(parents=True)
    header = "id,x0,x1" + (",label" if label else "")
    lines = [
        f"n{i},{i % 3},{i * 7 % 5}" + (f",{label(i)}" if label else "")
        for i in range(40)
    ]
    (folder / "nodes.csv").write_text("\n".join([header, *lines]) + "\n")
    columns = [("label", edge_label), ("time", time)]
    given = [(name, value) for name, value in columns if value is not None]
    header = ",".join(["source", "target", *(name for name, _ in given)])
    lines = [
        ",".join([*edge, *(str(value(k)) for _, value in given)])
        for k, edge in enumerate(edges)
    ]
    (folder / "edges.csv").write_text("\n".join([header, *lines]) + "\n")


CASES = [
    ("node", {"label": lambda i: ""}, "no node has a label. List the classes in"),
    ("node", {"label": None}, "the columns must be id, label and features"),
    ("node", {"edges": UNKNOWN}, 'line 4: target "zz" is not an id in nodes.csv'),
    ("link", {"edges": UNKNOWN}, 'line 4: target "zz" is not an id in nodes.csv'),
    ("edge", {"edges": UNKNOWN}, 'line 4: target "zz" is not an id in nodes.csv'),
    ("edge", {"edge_label": lambda k: ""}, "no edge has a label. List the classes in"),
    ("edge", {"edge_label": None}, "the edges of this graph have no classes. Add a"),
    ("edge", {"time": lambda k: 100 - k}, "line 3: time 99 goes backwards"),
    ("node", {"label": lambda i: ["1", "2", "NA"][i % 3]}, 'have the class "NA"'),
    ("edge", {"edge_label": lambda k: ["p", "q", "?"][k % 3]}, 'have the class "?"'),
    ("node", {"label": lambda i: f"holder {i}"}, "40 labelled nodes have 40 different"),
    ("edge", {"edge_label": lambda k: f"t{k}"}, "80 labelled edges have 80 different"),
    (
        "node",
        {"label": lambda i: "aB"[i % 2]},
        'it spells a class "B", and good spells',
    ),
    ("edge", {"edge_label": lambda k: "Pq"[k % 2]}, 'it spells a class "P", and good'),
    ("graph", {}, 'setting = "graph" needs a set of them'),
]


@pytest.mark.parametrize(("kind", "changes", "message"), CASES)
def test_an_owner_that_cannot_be_used_is_named(
    kind: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_owner(tmp_path / "owners" / "good")
    write_owner(tmp_path / "owners" / "bad", **changes)  # type: ignore[arg-type]
    settings = {"owners": str(tmp_path / "owners"), "setting": SETTINGS[kind]}
    with pytest.raises(FglError) as error:
        simulate("fedavg", output_dir=str(tmp_path / "runs"), **settings)
    assert message in str(error.value)
    assert "bad" in str(error.value)
    pairs = {**settings, "output-dir": str(tmp_path / "runs")}.items()
    words = [word for key, value in pairs for word in ("--set", f"{key}={value}")]
    done = CliRunner().invoke(app, ["run", "--engine", "local", *words])
    # the program prints such an error as one line, see tests/engines/test_run.py
    assert isinstance(done.exception, FglError)
    assert str(done.exception) == str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["link", "edge"])
def test_owners_with_three_edges_do_not_start_a_run(kind: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_owner(tmp_path / "owners" / name, edges=RING[:6:2])
    with pytest.raises(FglError, match="at least 10"):
        simulate(
            "fedavg", owners=str(tmp_path / "owners"), setting=kind,
            output_dir=str(tmp_path / "runs"),
        )  # fmt: skip
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["link", "edge"])
def test_an_owner_with_three_edges_takes_no_part(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_owner(tmp_path / "owners" / "good")
    write_owner(tmp_path / "owners" / "few", edges=RING[:6:2])
    run = simulate(
        "fedavg", owners=str(tmp_path / "owners"), setting=kind, rounds=1,
        hidden_channels=4, output_dir=str(tmp_path / "runs"),
    )  # fmt: skip
    assert list(run.per_owner()) == ["good"]
    what = "labelled training" if kind == "edge" else "training"
    assert f"Owner few: There are no {what} edges." in caplog.text


@pytest.mark.parametrize("kind", ["node", "link", "edge"])
def test_two_owners_of_one_name_are_refused_in_every_setting(
    kind: str, tmp_path: Path
) -> None:
    for place in ("x", "y"):
        write_owner(tmp_path / place / "bank")
    owners = f"{tmp_path / 'x' / 'bank'},{tmp_path / 'y' / 'bank'}"
    with pytest.raises(FglError, match='Two owners have the name "bank"'):
        simulate("fedavg", owners=owners, setting=SETTINGS[kind])


@pytest.mark.parametrize("setting", ["inductive", "edge"])
def test_partition_describes_as_many_clients_as_there_are_owners(
    setting: str, tmp_path: Path
) -> None:
    owners = tmp_path / "owners"
    for name in ("a", "b", "c"):
        write_owner(owners / name, time=lambda k: k)
    values = [f"owners={owners}", f"setting={setting}"]
    argv = ["partition", *(f"--set={value}" for value in values)]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    kept, of = re.search(
        r"3 clients.* ([\d,]+) of ([\d,]+) edges kept", result.output
    ).groups()
    assert 0 < int(kept) < int(of) == 240
