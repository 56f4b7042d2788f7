"""List the files and functions of this package that one round executes, in order.

    python benchmarks/round_path.py
    python benchmarks/round_path.py --methods fedavg --functions
    python benchmarks/round_path.py --methods fedavg --whole

Traces the third round of a run with three clients and the local engine, since earlier
rounds fill caches; with ``--whole`` the run from its start to its end, for which there is
no limit. A file is listed if one of its functions runs, in order of the first call. Files
of which only definitions are used (dataclasses, constants) are not listed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import flower_fgl
from flower_fgl import simulate

ROOT = Path(flower_fgl.__file__).parent
SETTINGS: dict[str, Any] = {
    "clients": 3,
    "rounds": 3,
    "local_epochs": 1,
    "synthetic": {"nodes": 120, "features": 8},
}
LIMITS = {"fedavg": 25, "fedpg": 32}
"""Maximum number of files for each method."""


def trace_round(
    method: str, folder: Path, *, whole: bool = False
) -> dict[str, list[str]]:
    """Run three rounds, and trace the third, or all with ``whole``.

    Parameters
    ----------
    method : str
        Method to run.
    folder : Path
        Parent of the run folder.

    Returns
    -------
    dict of str to list of str
        Function names by file, both in the order in which they were entered.
    """
    seen: dict[CodeType, None] = {}

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    def on_round(row: Any) -> None:
        if not whole:
            sys.setprofile(on_event if row["round"] == 2 else None)

    if whole:
        sys.setprofile(on_event)
    try:
        simulate(method, on_round=on_round, output_dir=str(folder), **SETTINGS)
    finally:
        sys.setprofile(None)
    found: dict[str, list[str]] = {}
    for code in seen:
        if not code.co_flags & CO_OPTIMIZED:  # a module or the body of a class
            continue
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            found.setdefault(name, []).append(code.co_qualname)
    return found


def main() -> int:
    """Print the list of each method; the exit status is 1 if one is too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(LIMITS))
    parser.add_argument("--functions", action="store_true", help="list functions too")
    parser.add_argument("--whole", action="store_true", help="trace the whole run")
    given = parser.parse_args()
    too_long = False
    for method in given.methods:
        with tempfile.TemporaryDirectory() as folder:
            found = trace_round(method, Path(folder), whole=given.whole)
        functions = sum(map(len, found.values()))
        limit = None if given.whole else LIMITS.get(method)
        too_long |= limit is not None and len(found) > limit
        most = f" (at most {limit})" if limit else ""
        print(f"{method}: {len(found)} files{most}, {functions} functions")
        for number, (name, names) in enumerate(found.items(), start=1):
            print(f"{number:4}  {name:45} {len(names):3} functions")
            if given.functions:
                print(*(f"          {name}" for name in names), sep="\n")
    return int(too_long)


if __name__ == "__main__":
    sys.exit(main())
