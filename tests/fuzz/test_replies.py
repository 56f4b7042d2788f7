"""Seeded mutations of real replies of all methods and exchanges."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from tests.fuzz.mutations import mutants
from tests.fuzz.replay import Recording, variants

MUTANTS = 3
"""Mutants of each exchange of each run; ``benchmarks/fuzz.py`` runs more."""


@pytest.fixture
def silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.thorough
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("label", ["fedavg", "fedper"])
def test_replies_that_are_read_together_are_dropped_alone(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_fgl.strategies.hooks.MANY", 1)
    recording = Recording(label)
    draw = random.Random(f"together {label}")
    keys = sorted(key for key in recording.replies if key.kind == "train")
    verdicts = set()
    for _ in range(40):
        key = draw.choice(keys)
        name, number, reason = next(mutants(draw, recording.replies[key]))
        outcome = recording.judge(key, name, number, reason)
        verdicts.add(outcome.verdict)
        assert outcome.verdict in ("dropped", "accepted"), f"{key}, {name}: {outcome}"
    assert verdicts == {"dropped", "accepted"}


@pytest.mark.thorough
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("label", sorted(variants()))
def test_a_mutated_reply_is_dropped_or_benign(label: str) -> None:
    recording = Recording(label)
    draw = random.Random(f"ci {label}")
    kinds = sorted({key.kind for key in recording.replies})
    assert "query.describe" in kinds
    verdicts = set()
    for kind in kinds:
        keys = sorted(key for key in recording.replies if key.kind == kind)
        for _ in range(MUTANTS):
            key = draw.choice(keys)
            name, number, reason = next(mutants(draw, recording.replies[key]))
            outcome = recording.judge(key, name, number, reason)
            verdicts.add(outcome.verdict)
            assert outcome.verdict in ("dropped", "accepted", "refused"), (
                f"{key}, {name}: {outcome}"
            )
    assert "dropped" in verdicts


@pytest.mark.thorough
def test_every_exchange_is_recorded() -> None:
    labels = ("fedavg, evaluate", "fedavg, finetune", "fedavg, secure", "fedsage+")
    kinds = {key.kind for label in labels for key in Recording(label).replies}
    assert kinds == {
        "evaluate",
        "query.describe",
        "query.generate",
        "query.judge",
        "query.resume",
        "query.secure_shares",
        "query.secure_check",
        "query.secure_unmask",
        "train",
        "train.finetune",
    }
    assert "train.pretrain" in {key.kind for key in Recording("fedlog").replies}
    assert "train.personalise" in {key.kind for key in Recording("opfgl").replies}
