"""Run every method's server on mutated replies of clients and count what happens.

    python benchmarks/fuzz.py --mutants 20000

One run per method, with three clients and the local engine, records the reply to every
message: describe, train, evaluate, the methods' own queries, secure aggregation, resume.
Then the server runs again on the recorded replies, one of which is mutated
(``tests/fuzz/mutations.py``). With secure aggregation the clients answer anew.

========================  =========================================================
column                    meaning
========================  =========================================================
dropped                   the reply was dropped and named, and the server's state is
                          the same as if the client had answered with an error
accepted                  the reply was read, and the mutation is in the list ``BENIGN``
refused                   a lie in a description that ends the run before round 1
crashes                   an exception ended the run
poisoned                  the state has a number that is not finite, or a dropped reply
                          changed it, or another client was dropped instead
unexplained               the reply was accepted without an entry in ``BENIGN``
========================  =========================================================

The exit status is 1 if there is a crash, a poisoned state or an unexplained mutant.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz.mutations import mutants
from tests.fuzz.replay import Recording, variants

VERDICTS = ("dropped", "accepted", "refused", "crash", "poisoned", "unexplained")
BAD = VERDICTS[3:]
TITLES = ("dropped", "accepted", "refused", "crashes", "poisoned", "unexplained")

Table = dict[str, Counter[str]]


def fuzz(label: str, number: int, seed: int) -> tuple[Table, Counter[str], list[str]]:
    """Judge mutants of one variant's replies, the same number for every exchange.

    Returns
    -------
    table : dict of str to Counter of str
        Mutants by exchange and verdict.
    reasons : Counter of str
        Accepted mutants by the reason for which they are benign.
    bad : list of str
        One line for each crash, poisoned state and unexplained mutant.
    """
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    recording = Recording(label)
    draw = random.Random(f"{seed} {label}")
    keys = defaultdict(list)
    for key in sorted(recording.replies):
        keys[key.kind].append(key)
    table: Table = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    bad = []
    streams = {
        key: mutants(draw, content) for key, content in recording.replies.items()
    }
    for turn in range(number):
        kind = sorted(keys)[turn % len(keys)]
        key = draw.choice(keys[kind])
        name, start, reason = next(streams[key])
        outcome = recording.judge(key, name, start, reason)
        table[kind][outcome.verdict] += 1
        if outcome.verdict == "accepted":
            reasons[outcome.detail] += 1
        if outcome.verdict in BAD:
            bad.append(f"{label}, {key}, {name}: {outcome.verdict}: {outcome.detail}")
    return dict(table), reasons, bad


def fuzz_job(job: tuple[str, int, int]) -> tuple[Table, Counter[str], list[str]]:
    """Unpack the arguments of :func:`fuzz`."""
    return fuzz(*job)


def rows_of(tables: dict[str, Table], names: dict[str, list[tuple[str, str]]]) -> None:
    """Print a Markdown table; ``names`` lists the cells that each row adds up."""
    print(f"| | mutants | {' | '.join(TITLES)} |")
    print(f"|---|{'---:|' * (len(TITLES) + 1)}")
    for title, cells in names.items():
        total: Counter[str] = Counter()
        for label, kind in cells:
            total += tables[label][kind]
        numbers = [sum(total.values()), *(total[v] for v in VERDICTS)]
        print(f"| {title} | {' | '.join(f'{n:,}' for n in numbers)} |")


def main() -> int:
    """Print the tables; the exit status is 1 if a mutant was handled wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=2000, help="number in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--methods", nargs="+", default=list(variants()))
    given = parser.parse_args()
    labels, clock = given.methods, time.perf_counter()
    share, rest = divmod(given.mutants, len(labels))
    jobs = [
        (label, share + (place < rest), given.seed)
        for place, label in enumerate(labels)
    ]
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        results = []
        for result in pool.imap(fuzz_job, jobs):
            print(f"{len(results) + 1} of {len(jobs)} runs", file=sys.stderr)
            results.append(result)
    tables = {label: result[0] for label, result in zip(labels, results, strict=True)}
    cells = [(label, kind) for label in labels for kind in tables[label]]
    by_kind: dict[str, list[tuple[str, str]]] = defaultdict(list)
    by_label: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for label, kind in cells:
        by_kind[kind].append((label, kind))
        by_label[label].append((label, kind))
    rows_of(tables, {**dict(sorted(by_kind.items())), "all exchanges": cells})
    print()
    rows_of(tables, dict(by_label))
    reasons = sum((result[1] for result in results), Counter[str]())
    print("\naccepted:", ", ".join(f"{n:,} {why}" for why, n in reasons.most_common()))
    bad = [line for result in results for line in result[2]]
    print(*bad, sep="\n")
    print(f"{given.mutants:,} mutants, {time.perf_counter() - clock:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
