"""Change one operator or number of a module at a time, and list those no test notices.

    pip install mutmut
    python benchmarks/mutation.py flower_fgl/core/metrics.py --folder /tmp/mutants

clones the last commit into a folder, lets mutmut change the modules there, and runs the
tests of the modules of the same name. A second call with the same folder skips what the
first has done; ``mutmut show NAME`` in ``FOLDER/clone`` prints a change.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """[mutmut]
source_paths=
    flower_fgl
only_mutate=
    {modules}
also_copy=
    README.md
    benchmarks
    docs
    experiments
pytest_add_cli_args=
    -n0
    -x
pytest_add_cli_args_test_selection=
    {tests}
process_isolation=forkserver
timeout_constant=20
do_not_mutate_patterns=
    raise \\w+
    warnings\\.warn
    __all__
"""
KILLED = {"killed", "timeout", "suspicious", "segfault", "caught by type check"}


def tests_of(module: Path) -> list[str]:
    """Return the tests of a module: those of its name, else of its folder's name."""
    inside = module.relative_to("flower_fgl").with_suffix("")
    mirror = ROOT / "tests" / inside.parent
    alone = mirror / f"test_{inside.name}.py"
    found = [alone] if alone.exists() else [mirror]
    if inside.parts[0] in ("algorithms", "protocols"):
        method = inside.parts[1]
        found += sorted((ROOT / "tests" / "client_apps").glob(f"test_{method}*.py"))
    return [str(path.relative_to(ROOT)) for path in found]


def clone(folder: Path, modules: list[Path], tests: list[str]) -> Path:
    """Clone the last commit, or update the clone, and write mutmut's settings."""
    copy = folder / "clone"
    if copy.exists():
        pull = ["git", "-C", str(copy), "pull", "-q", "--ff-only"]
    else:
        pull = ["git", "clone", "-q", str(ROOT), str(copy)]
    subprocess.run(pull, check=True)
    config = CONFIG.format(
        modules="\n    ".join(map(str, modules)), tests="\n    ".join(tests)
    )
    (copy / "setup.cfg").write_text(config, "utf-8")
    return copy


def report(results: str, modules: list[Path]) -> None:
    """Print the survivors, and for each module the share of its changes found."""
    lines = [line.strip() for line in results.splitlines() if ": " in line]
    pairs = [line.split(": ") for line in lines if not line.endswith("not checked")]
    for module in modules:
        start = ".".join(module.with_suffix("").parts) + "."
        of_module = [(name, status) for name, status in pairs if name.startswith(start)]
        for name, status in of_module:
            if status not in KILLED:
                print(f"{status}: {name}")
        found = sum(status in KILLED for _, status in of_module)
        share = found / max(1, len(of_module))
        print(f"{module}: {found} of {len(of_module)} changes found, {share:.1%}")


def main() -> None:
    """Run mutmut and print one line for each module and each survivor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tests", nargs="*", help="by default those of the same name")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of changes, with *"
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    tests = options.tests or sorted({t for m in options.modules for t in tests_of(m)})
    copy = clone(options.folder, options.modules, tests)
    # one thread each: forked processes cannot use the threads of their parent
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    run = [sys.executable, "-m", "mutmut", "run", "--max-children"]
    run += [str(options.processes), *options.only]
    with (options.folder / "log.txt").open("w") as log:
        subprocess.run(run, cwd=copy, env=quiet, stdout=log, check=False)
    results = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        cwd=copy, env=quiet, capture_output=True, text=True, check=True,
    )  # fmt: skip
    report(results.stdout, options.modules)


if __name__ == "__main__":
    main()
