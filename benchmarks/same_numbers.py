"""Compare results on Cora, by default of six methods, between two checkouts, bit for bit.

    python benchmarks/same_numbers.py --against ../other-checkout

Each method runs three rounds with three clients and the local engine in both checkouts.
``summary.json`` without seconds, start time and environment, ``rounds.jsonl`` without
seconds, and the saved model, must be equal.
Prints one line per method; the exit status is 1 if any method differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedpg": {},
    "fedlog": {},
    "opfgl": {"rounds": 1, "local_epochs": 200, "opfgl": {"server_steps": 300}},
    "fedpano": {"participants": 2},
    "adpfedgnn": {},
}
RUN = """
import json, sys
from flower_fgl import simulate
simulate(**json.loads(sys.argv[1]))
"""


def numbers(checkout: Path, method: str, dataset: str, folder: Path) -> dict[str, Any]:
    """Run one method in a checkout; return all results that must not change."""
    run_dir = folder / f"{hashlib.sha1(str(checkout).encode()).hexdigest()}-{method}"
    keywords = {
        "method": method,
        "dataset": dataset,
        "clients": 3,
        "rounds": 3,
        "run_dir": str(run_dir),
        **SETTINGS.get(method, {}),
    }
    subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(keywords)],
        check=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
    )
    lines = (run_dir / "rounds.jsonl").read_text("utf-8").splitlines()
    model = run_dir / "model.safetensors"
    return {
        "summary.json": without_seconds(
            json.loads((run_dir / "summary.json").read_text())
        ),
        "rounds.jsonl": [without_seconds(json.loads(line)) for line in lines],
        "model": hashlib.sha256(model.read_bytes()).hexdigest()
        if model.exists()
        else "",
    }


def without_seconds(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without seconds, start time and environment."""
    skipped = ("seconds", "started", "environment")
    return {key: value for key, value in values.items() if key not in skipped}


def main() -> int:
    """Print one line per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="other checkout")
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS))
    given = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for method in given.methods:
            here, there = (
                numbers(checkout, method, given.dataset, Path(folder))
                for checkout in (HERE, given.against.resolve())
            )
            changed = [name for name in here if here[name] != there[name]]
            different += bool(changed)
            found = here["summary.json"]["last"]
            print(
                f"{method:10} {'differs: ' + ', '.join(changed) if changed else 'equal'}"
                f"  {json.dumps(found)[:90]}",
                flush=True,
            )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
