"""No malformed graph file ends a reader with a traceback, and none is accepted wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.malformed_graphs import BENIGN, MUST_REFUSE, MUTATIONS, mutants, read


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_no_mutant_gives_a_traceback_or_is_accepted_wrongly(
    seed: int, tmp_path: Path
) -> None:
    # each mutation occurs once
    accepted, faults = set(), []
    for mutant in mutants(tmp_path, seed=seed, number=len(MUTATIONS)):
        outcome = read(mutant)
        faults += [f"{mutant.mutation}: {text}" for text in outcome.tracebacks]
        if outcome.wrong:
            faults.append(f"{mutant.mutation}: {outcome.wrong}")
        if outcome.is_accepted:
            accepted.add(mutant.mutation)
    assert faults == []
    # the check itself is not blind: it accepts what is good, and only that
    assert set(BENIGN) <= accepted
    assert not accepted & MUST_REFUSE


def test_mutants_depend_on_the_seed_only(tmp_path: Path) -> None:
    def contents(seed: int, folder: str) -> list[tuple[str, bytes]]:
        (tmp_path / folder).mkdir()
        return [
            (m.mutation, m.path.read_bytes() if m.level in ("zip", "npy") else b"")
            for m in mutants(tmp_path / folder, seed=seed, number=40)
        ]

    first = contents(0, "a")
    assert contents(0, "b") == first
    assert contents(1, "c") != first
