"""What the contract must know about a method, and the base of its test classes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import refusal
from flower_fgl.methods import METHODS, Method

__all__ = ["NAME", "SMALL", "Contract", "MethodCase", "applies_to", "comparable"]
__all__ += ["timeless", "write_tiny"]

Test = TypeVar("Test", bound=Callable[..., None])

SMALL: Mapping[str, Any] = {
    "synthetic": {"nodes": 120, "classes": 3, "features": 8, "blocks": 6},
    "hidden_channels": 8,
    "rounds": 2,
}
"""Settings of a run that takes a moment."""

CACHE = pytest.StashKey[Path]()


@dataclass(frozen=True)
class MethodCase:
    """A method under test.

    Parameters
    ----------
    name : str
        Name of the method, a key of ``METHODS``.
    short : mapping of str to object
        Settings that make a run of it short, e.g. ``{"my-method": {"server_steps": 5}}``.
    weights : mapping of str to float
        Each setting that weighs a term of the clients' loss, and a value at which the term
        shows after two rounds. A test checks that the term has a gradient.
    needed : mapping of str to object
        Settings without which a short run would leave such a term out.
    download_action : str
        Action of the first message that carries arrays to a client, if that is not the
        message of a training round.
    """

    name: str
    short: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    needed: Mapping[str, Any] = field(default_factory=dict)
    download_action: str = ""

    @property
    def row(self) -> Method:
        """The method's row; ConfigError if there is none."""
        if self.name not in METHODS:
            reason = refusal("methods", self.name) or (
                "No installed package names it in the entry points flower_fgl.methods. "
                "Install yours: pip install -e ."
            )
            raise ConfigError(f'There is no method "{self.name}" to test. {reason}')
        return METHODS[self.name]

    def settings(self, **values: Any) -> dict[str, Any]:
        """Return keyword arguments of ``simulate`` for a short run; ``short`` wins."""
        return {"method": self.name, "clients": 3, **SMALL, **values, **self.short}

    def with_weight(self, name: str, value: float) -> dict[str, Any]:
        """Return the settings of a run in which a term of the loss shows."""
        settings = {"dropout": 0.0, **self.settings(), **self.needed}
        return {**settings, self.name: {**settings.get(self.name, {}), name: value}}


def applies_to(
    condition: Callable[[MethodCase], bool], reason: str
) -> Callable[[Test], Test]:
    """Let a test of the contract skip the methods that do not fulfil a condition."""

    def mark(test: Test) -> Test:
        test.applies = condition, reason  # type: ignore[attr-defined]
        return test

    return mark


class Contract:
    """Base of the test classes: calls each test with each ``case`` of ``cases``."""

    cases: ClassVar[Sequence[MethodCase]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Fill in ``case``, and ``weight`` (the name of a setting of ``weights``)."""
        if "case" not in metafunc.fixturenames:
            return
        if not self.cases:
            pytest.fail(
                f"{type(self).__name__} names no method: set "
                'cases = [MethodCase("my-method")] in the class.',
                pytrace=False,
            )
        try:
            for case in self.cases:
                _ = case.row
        except ConfigError as error:
            pytest.fail(str(error), pytrace=False)
        condition, reason = getattr(metafunc.function, "applies", (bool, ""))
        names = ["case"]
        fitting: list[tuple[Any, ...]] = [(c,) for c in self.cases if condition(c)]
        if "weight" in metafunc.fixturenames:
            names, reason = ["case", "weight"], "MethodCase has no weights"
            fitting = [(c, weight) for c in self.cases for weight in c.weights]
        parameters = [
            pytest.param(*values, id="-".join([values[0].name, *values[1:]]))
            for values in fitting
        ]
        if not parameters:
            skip = pytest.mark.skip(reason=reason)
            missing = [None] * len(names)
            parameters = [pytest.param(*missing, id=self.cases[0].name, marks=skip)]
        metafunc.parametrize(names, parameters)

    @pytest.fixture(autouse=True)
    def private_cache(
        self,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Path:
        """Keep what the tests compute away from the user's cache folder."""
        stash = request.session.stash
        if CACHE not in stash:
            stash[CACHE] = tmp_path_factory.mktemp("flower-fgl-cache")
        monkeypatch.setenv("FLOWER_FGL_CACHE", str(stash[CACHE]))
        return stash[CACHE]

    @pytest.fixture
    def short(self, case: MethodCase, tmp_path: Path) -> dict[str, Any]:
        """Arguments of ``simulate`` for a run of the method that takes a moment."""
        return case.settings(output_dir=str(tmp_path / "runs"))


def comparable(run: Any) -> str:
    """Return all numbers of a run of ``simulate`` except times, as text."""
    keep = [{k: v for k, v in row.items() if k != "seconds"} for row in run.rounds]
    clients = [{k: v for k, v in row.items() if k != "seconds"} for row in run.clients]
    return json.dumps([keep, clients], sort_keys=True)


def timeless(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's summary without times and environment."""
    skipped = ("seconds", "started", "environment")
    return {key: value for key, value in summary.items() if key not in skipped}


NAME = "TINY"
"""The dataset is ``tu:TINY``."""


def write_tiny(
    folder: Path, *, num_graphs: int = 30, has_labels: bool = True, hub: int = -1
) -> None:
    """Write rings (class 1) and stars (class 2) of 4 to 6 nodes to a data folder.

    Every other graph is a ring, and the last has no edge. Without labels of nodes the
    dataset has no features. The graph of index ``hub`` gets 20 more nodes.
    """
    raw = folder / "TU" / NAME / "raw"
    raw.mkdir(parents=True)
    pairs: list[tuple[int, int]] = []
    owner: list[int] = []
    kinds: list[int] = []
    for graph in range(num_graphs):
        is_ring = graph % 2 == 0
        size = 4 + graph % 3 + (20 if graph == hub else 0)
        first = len(owner) + 1
        owner += [graph + 1] * size
        kinds += [0] + [1] * (size - 1)
        if graph == num_graphs - 1:
            continue
        for node in range(1, size + is_ring):
            a = first + (node - 1 if is_ring else 0)
            b = first + node % size
            pairs += [(a, b), (b, a)]
    lines = {
        "A": [f"{a}, {b}" for a, b in pairs],
        "graph_indicator": map(str, owner),
        "graph_labels": [str(1 + graph % 2) for graph in range(num_graphs)],
    }
    if has_labels:
        lines["node_labels"] = map(str, kinds)
    for part, rows in lines.items():
        (raw / f"{NAME}_{part}.txt").write_text("\n".join(rows) + "\n")
