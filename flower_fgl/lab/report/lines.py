"""Lines of the report's figures: which runs share one, its name, colour, dash and marker.

The methods of a page get their colours, and from the ninth on their dashes, in the order in
which they first appear. Lines of one method differ by their marker; where all lines belong
to one method, they have colours instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flower_fgl.lab import plots
from flower_fgl.lab.report.seeds import average_groups
from flower_fgl.runs.run import RunFolder

__all__ = ["Line", "has_one_objective", "lines_of", "looks_of"]


@dataclass(frozen=True)
class Line:
    """Runs that the figures show as one line: one run, or the mean over seeds.

    If there are several datasets, ``panel`` is the line's, and ``name`` its name beside
    lines of the same dataset.
    """

    label: str
    runs: Sequence[RunFolder]
    look: Mapping[str, Any] = field(default_factory=dict)
    panel: str = ""
    name: str = ""

    @property
    def method(self) -> str:
        """Method of the runs."""
        return str(self.runs[0].summary["method"])


def lines_of(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Line]:
    """Return the lines of several runs; those that differ only in seeds share one."""
    data = {run.summary["dataset"] for run in runs}
    sizes = {(run.summary["dataset"], run.summary["clients"]) for run in runs}
    found = []
    for label, group in average_groups(runs):
        about = group[0].summary
        label += f" on {about['dataset']}" if len(data) > 1 else ""
        if len(sizes) > len(data):
            label += f" · {about['clients']} clients"
        found.append((label, group))
    averaged = {id(run) for _, members in found for run in members}
    found += [
        (label, [run])
        for label, run in zip(labels, runs, strict=True)
        if id(run) not in averaged
    ]
    repeated = Counter(label for label, _ in found)
    lines = []
    for label, members in found:
        label += f" ({members[0].path.name})" if repeated[label] > 1 else ""
        panel = str(members[0].summary["dataset"]) if len(data) > 1 else ""
        name = re.sub(rf" (on|·) {re.escape(panel)}(?= · | \(|$)", "", label, count=1)
        lines.append(Line(label, members, panel=panel, name=name if panel else label))
    methods = {line.name: line.method for line in lines}
    order = dict.fromkeys(str(run.summary["method"]) for run in runs)
    looks = dict(
        zip(methods, looks_of(list(methods.values()), list(order)), strict=True)
    )
    return [replace(line, look=looks[line.name]) for line in lines]


def looks_of(methods: Sequence[str], order: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return colour, dash and marker of each line by its method, see this module."""
    if len(set(methods)) == 1 and len(methods) > 1:
        return [plots.look_of(number) for number in range(len(methods))]
    numbers = {name: n for n, name in enumerate(dict.fromkeys([*order, *methods]))}
    seen: Counter[str] = Counter()
    looks = []
    for method in methods:
        looks.append(plots.variant_look(numbers[method], seen[method]))
        seen[method] += 1
    return looks


def has_one_objective(runs: Sequence[RunFolder]) -> bool:
    """Return whether losses can be compared: same method, its settings, data and task."""
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
