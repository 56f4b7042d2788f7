"""docs/security.md matches the table of methods and the privacy accountant."""

from __future__ import annotations

import re
from pathlib import Path

from flower_fgl import METHODS
from flower_fgl.protocols.differential_privacy import epsilon

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
LINES = {
    cells[0].strip("` "): [cell.strip() for cell in cells[1:]]
    for cells in (line.strip("|").split("|") for line in TEXT.splitlines())
    if re.fullmatch(r" `[a-z0-9+-]+` ", cells[0]) and len(cells) == 5
}


def test_every_method_has_a_line_that_says_what_it_reveals() -> None:
    assert set(METHODS) <= set(LINES), "add a line to docs/security.md"
    for name, cells in LINES.items():
        assert all(cells), name


def test_lines_say_which_methods_sum_in_secret() -> None:
    for name, method in METHODS.items():
        expected = "yes" if method.additive else "no" if method.payload != "0" else "-"
        assert LINES[name][3] == expected, name


def test_the_guide_of_secure_aggregation_lists_all_methods_that_sum() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "secure-aggregation.md").read_text(
        "utf-8"
    )
    listed = guide.partition("only sums:")[2].partition("For any")[0]
    expected = [name for name, method in METHODS.items() if method.additive]
    assert re.findall(r"`([a-z0-9+-]+)`", listed) == sorted(expected)


def test_the_printed_epsilons_are_those_of_the_accountant() -> None:
    found = re.findall(
        r"^\| (\d+) \| ([\d.e+]+) \| ([\d.e+]+) \| ([\d.e+]+) \|$", TEXT, re.M
    )
    assert len(found) == 5
    for noise, *told in found:
        values = [epsilon(float(noise), number, 1e-5) for number in (1, 20, 100)]
        assert told == [f"{value:.3g}" for value in values]
