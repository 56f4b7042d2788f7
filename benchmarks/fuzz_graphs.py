"""Read malformed graph files with every reader, and count what goes wrong.

    python benchmarks/fuzz_graphs.py --files 1000

Each file is checked (``flower-fgl check-graph``), loaded as a data owner's SuperNode loads
it, and loaded without labels as ``flower-fgl predict`` does. A *traceback* is any
exception other than the package's own one-line errors. A file is *accepted wrongly* if its
mutation may not be accepted at all, if the loaded graph violates an invariant, or if
check-graph and the SuperNode disagree. The exit status is 1 if either occurred.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the generator

from tests.fuzz.malformed_graphs import mutants, read


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutations that contain this text")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    slowest = (0.0, "")
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for mutant in mutants(Path(folder), seed=given.seed, number=given.files):
            if given.only not in mutant.mutation:
                continue
            out = read(mutant)
            row = rows.setdefault(mutant.level, Counter())
            row["files"] += 1
            row["accepted"] += out.is_accepted
            row["tracebacks"] += bool(out.tracebacks)
            row["wrong"] += bool(out.wrong)
            seconds[mutant.level] += out.seconds
            slowest = max(slowest, (out.seconds, mutant.mutation))
            faults += [
                f"{mutant.number} {mutant.mutation}: {t}" for t in out.tracebacks
            ]
            if out.wrong:
                faults.append(f"{mutant.number} {mutant.mutation}: WRONG {out.wrong}")
    for fault in faults:
        with contextlib.suppress(UnicodeError):
            print(fault)
    names = {"array": "arrays", "csv": "CSV tables", "npy": ".npy header",
             "path": "path", "zip": "zip archive"}  # fmt: skip
    print("\n| level | files | refused | accepted | wrong | tracebacks | seconds |")
    print("|---|---|---|---|---|---|---|")
    total: Counter[str] = sum(rows.values(), Counter())
    for level in [*sorted(rows), "all"]:
        row = total if level == "all" else rows[level]
        spent = sum(seconds.values()) if level == "all" else seconds[level]
        print(
            f"| {names.get(level, level)} | {row['files']} | "
            f"{row['files'] - row['accepted']} | {row['accepted']} | {row['wrong']} | "
            f"{row['tracebacks']} | {spent:.1f} |"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"\nSlowest file: {slowest[0]:.2f} s ({slowest[1]}). Peak memory: "
        f"{peak / 1024:.0f} MiB, {before / 1024:.0f} MiB of it before the first file."
    )
    return int(total["tracebacks"] + total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
