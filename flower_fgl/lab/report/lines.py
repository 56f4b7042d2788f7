"""Lines of the report's figures: which runs share one, its name, colour, dash and marker.

A method has the same colour and dash in every figure and on every page: those of its place
among all methods, the oldest publication first, so that a later method changes no other.
Lines of one method differ by their marker. Where all lines belong to one method, they have
colours instead.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flower_fgl.lab import plots
from flower_fgl.lab.report.seeds import average_groups
from flower_fgl.methods import METHODS
from flower_fgl.runs.run import Run

__all__ = ["Line", "has_one_objective", "lines_of", "looks_of", "method_number"]

YEAR = re.compile(r"\b(?:19|20)\d\d\b")


@dataclass(frozen=True)
class Line:
    """Runs that the figures show as one line, their mean.

    Parameters
    ----------
    label : str
        Name in the legend.
    runs : sequence of Run
        One run, or runs that differ only in their seeds.
    look : mapping of str to object
        Colour, dash and marker.
    """

    label: str
    runs: Sequence[Run]
    look: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Method of the runs."""
        return str(self.runs[0].summary["method"])


def lines_of(runs: Sequence[Run], labels: Sequence[str]) -> list[Line]:
    """Return the lines of several runs; those that differ only in seeds share one.

    Parameters
    ----------
    runs : sequence of Run
        Runs, finished or not.
    labels : sequence of str
        Name of each run, for those with a line of their own.
    """
    groups = [group for group in average_groups(runs) if len(group.runs) > 1]
    data = {run.summary["dataset"] for run in runs}
    sizes = {(run.summary["dataset"], run.summary["clients"]) for run in runs}
    found = []
    for group in groups:
        about = group.runs[0].summary
        label = group.label + (f" on {about['dataset']}" if len(data) > 1 else "")
        if len(sizes) > len(data):
            label += f" · {about['clients']} clients"
        found.append((label, group.runs))
    averaged = {id(run) for _, members in found for run in members}
    found += [
        (label, [run])
        for label, run in zip(labels, runs, strict=True)
        if id(run) not in averaged
    ]
    repeated = Counter(label for label, _ in found)
    names = [
        f"{label} ({members[0].path.name})" if repeated[label] > 1 else label
        for label, members in found
    ]
    lines = [Line(n, members) for n, (_, members) in zip(names, found, strict=True)]
    looks = looks_of([line.method for line in lines])
    return [Line(i.label, i.runs, look) for i, look in zip(lines, looks, strict=True)]


def looks_of(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour, dash and marker of each line.

    Parameters
    ----------
    methods : sequence of str
        Method of each line.
    """
    if len(set(methods)) == 1 and len(methods) > 1:
        return [plots.look_of(number) for number in range(len(methods))]
    seen: Counter[str] = Counter()
    looks = []
    for method in methods:
        looks.append(plots.variant_look(method_number(method), seen[method]))
        seen[method] += 1
    return looks


def method_number(method: str) -> int:
    """Return the number that gives a method its colour and dash.

    Parameters
    ----------
    method : str
        Name of a method; one that is not installed gets a number by its name.
    """
    if method not in METHODS:
        return zlib.crc32(method.encode())
    years = {name: YEAR.findall(row.paper)[-1:] for name, row in METHODS.items()}
    return sorted(METHODS, key=lambda name: (years[name], name)).index(method)


def has_one_objective(runs: Sequence[Run]) -> bool:
    """Return whether the training losses of all runs can be compared.

    They can if the runs train the same method, with the same settings of that method, on
    the same dataset and kind of task.
    """
    objectives = [
        (
            run.summary["method"],
            run.summary["dataset"],
            run.config.get("setting"),
            run.config.get(str(run.summary["method"])),
        )
        for run in runs
    ]
    return all(objective == objectives[0] for objective in objectives)
