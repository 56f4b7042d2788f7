"""Spellings of classes, markers of unknown ones, and owners that do not agree."""

from __future__ import annotations

import pytest

from flower_fgl.core.agreement import (
    classes_apart,
    marks_unknown,
    odd_spellings,
    plain_spelling,
)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("fraud", " Fraud ", True),
        ("credit card", "Credit  Card", True),
        ("Straße", "STRASSE", True),
        ("caf\u00e9", "cafe\u0301", True),
        ("0", "0.0", True),
        ("00", "0.", True),
        ("-1", "-1.0", True),
        ("1", "10", False),
        ("1.1", "1.10", False),  # codes, not numbers
        ("1", "True", False),
        ("1e0", "1", False),
        ("a-b", "ab", False),
    ],
)
def test_names_that_people_and_programs_spell_differently(
    one: str, other: str, is_same: bool
) -> None:
    assert (plain_spelling(one) == plain_spelling(other)) is is_same


def test_markers_are_found_in_any_case() -> None:
    marks = ["unknown", "Unknown", "-1", "-1.0", "nan", "NaN", "None", "NA", "n/a"]
    marks += ["N/A", "NULL", "?", "<NA>", "n.a.", "NaT", "missing", "-99", "-9.0"]
    assert all(map(marks_unknown, [*marks, " unknown "]))
    assert not any(
        map(marks_unknown, ["0", "1", "", "unknown sender", "Nana", "other", "-", "-2"])
    )


def test_the_owners_that_differ_from_most_are_found() -> None:
    lists = {"a": ("0", "1"), "b": ("1", "0"), "c": ("0", "1.0"), "d": ("2",)}
    assert list(odd_spellings(lists)) == ["c"]
    assert 'it spells a class "1.0", and a spells it "1"' in odd_spellings(lists)["c"]
    assert odd_spellings({"a": ("0", "1"), "b": ("0", "2")}) == {}
    assert 'it spells a target "1.0"' in odd_spellings(lists, noun="target")["c"]


def test_without_a_most_frequent_spelling_all_owners_of_the_class_are_found() -> None:
    lists = {"a": ("0", "1"), "b": ("0.0", "1.0"), "c": ("False", "True")}
    assert set(odd_spellings(lists)) == {"a", "b", "c"}
    lists = {"a": ("fraud",), "b": ("Fraud",), "c": ("fine",), "d": ("fine",)}
    assert set(odd_spellings(lists)) == {"a", "b"}


def test_a_very_long_number_is_no_fault() -> None:
    assert plain_spelling("9" * 5000) == "9" * 5000
    assert plain_spelling("0" * 299 + "7") == "7"


def test_an_owner_that_imitates_all_others_removes_only_itself() -> None:
    lists = {f"o{k}": ("shared", f"own {k}") for k in range(5)}
    lists["liar"] = tuple(f"Own {k}" for k in range(5))
    assert list(odd_spellings(lists)) == ["liar"]
    assert set(odd_spellings(lists, is_trusted=True)) == set(lists)


def test_an_owner_without_a_common_class_is_found() -> None:
    lists = {"a": ("x", "y"), "b": ("y", "z"), "c": ("u", "v")}
    reason, (warning,) = classes_apart(lists)
    assert not reason
    assert warning.startswith(
        "Data owner c has no class in common with another owner (u, v)"
    )
    reason, warnings = classes_apart({"a": ("x",), "b": ("y",)})
    assert reason.startswith(
        "No two data owners have a class in common (a: x; b: y), so"
    )
    assert len(warnings) == 2
    assert classes_apart({"a": ("x",)}) == ("", [])


def test_classes_counted_from_0_and_from_1_are_named() -> None:
    lists = {"a": ("no", "yes"), "b": ("0", "1"), "c": ("2.0", "1"), "d": ("1", "0")}
    _, (_, found) = classes_apart(lists)  # the first one is on owner a
    assert found.startswith("Data owner b has the classes 0 to 1, and c has 1 to 2.")
    more: list[tuple[str, ...]] = [("1", "2", "3"), ("2", "3"), ("1",), ("1", "x"), ()]
    for other in more:
        apart = classes_apart({"b": ("0", "1"), "c": other, "d": ("0", *other)})
        assert not any("counts the same" in text for text in apart[1])
