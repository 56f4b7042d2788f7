"""Predict the solubility of molecules, with nine sources of measured values as owners.

python examples/molecules/run.py [FOLDER] [--data DIR] [--rounds 15] [--draws 1]
    [--jobs 2] [--no-rehearsal]

Writes the sources of AqSolDB as nine owners' folders, checks them, rehearses three owners
with SuperNodes and TLS, trains alone, FedAvg, FedPer and a pooled upper bound, writes each
owner's gain, and predicts new molecules. docs/molecules.md shows the results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pictures import draw_gains, draw_predictions
from scores import (
    Scored,
    rmse,
    score_owners,
    score_pooled,
    test_molecules,
    write_scores,
)
from sources import OWNERS, read_source, write_new, write_owner, write_pooled

from flower_fgl import load, simulate
from flower_fgl.datasets.graph_files.graph_set import inspect_graph_set

TASK: dict[str, Any] = {"setting": "graph", "target-kind": "numbers", "model": "gine"}
SETTINGS: dict[str, Any] = {
    **TASK,
    "batch-size": 64,
    "hidden-channels": 64,
    "num-layers": 3,
    "dropout": 0.0,
    "readout": "mean",
    "lr": 0.003,
    "clip-gradient": 1.0,
    "weight-decay": 0.0,
    "local-epochs": 1,
}
SMALL = ("G", "H", "I")
"""Owners of the rehearsal."""


def words(settings: dict[str, Any]) -> list[str]:
    """Return settings as options of a command."""
    return [
        word for key, value in settings.items() for word in ("--set", f"{key}={value}")
    ]


def command(*arguments: object) -> str:
    """Run ``flower-fgl`` and return what it printed."""
    program = str(Path(sys.executable).with_name("flower-fgl"))
    done = subprocess.run(
        [program, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"flower-fgl {arguments[0]} failed.\n{done.stdout}")
    return done.stdout


def problems_of(folder: Path) -> list[str]:
    """Return what makes a table unusable, as ``flower-fgl check-graph`` prints it."""
    return inspect_graph_set(folder)[1]


def check_owners(folder: Path, pool: ProcessPoolExecutor) -> dict[str, Path]:
    """Check all owners' tables; write those with SMILES that cannot be read again."""
    owners = {owner: folder / "owners" / owner for owner in OWNERS}
    for owner, problems in zip(
        owners, pool.map(problems_of, owners.values()), strict=True
    ):
        if not problems:
            continue
        print("\n".join(problems), flush=True)
        given = owners[owner].rename(folder / f"{owner}-as-published")
        print(command("check-graph", given, "--drop-unreadable", owners[owner]), end="")
    print(f"checked the tables of {len(owners)} owners", flush=True)
    return owners


def train(folder: Path, row: str, draw: int, rounds: int) -> Path:
    """Train one row of the table in this process; return the run folder."""
    torch.set_num_threads(1)
    clock = time.process_time()
    place = folder / "runs" / f"{row}-{draw}"
    # "pooled" holds one owner with all molecules
    owners = folder / ("pooled" if row == "pooled" else "owners")
    settings = {key.replace("-", "_"): value for key, value in SETTINGS.items()}
    simulate(
        "fedavg" if row == "pooled" else row,
        owners=str(owners),
        seed=draw,
        partition_seed=draw,
        rounds=rounds,
        run_dir=str(place),
        **settings,
    )
    print(f"{place.name}: {time.process_time() - clock:.0f} s of CPU", flush=True)
    return place


def predict(model: Path, molecules: Path, output: Path) -> pd.Series:
    """Predict with ``flower-fgl predict``; return the numbers by id."""
    command(*("predict", "--model", model, "--graph", molecules, "--output", output))
    return pd.read_csv(output, index_col="graph")["predicted"]


def one_draw(
    folder: Path,
    owners: Mapping[str, Path],
    draw: int,
    rounds: int,
    pool: ProcessPoolExecutor,
) -> tuple[list[Scored], pd.DataFrame]:
    """Train all rows with one split, and score them on each owner's test molecules.

    Returns the scores, and the predictions of the global model of FedAvg.
    """
    rows = ("pooled", "fedavg", "fedper", "local")
    size = len(rows)
    runs = dict(
        zip(
            rows,
            pool.map(train, [folder] * size, rows, [draw] * size, [rounds] * size),
            strict=True,
        )
    )
    everyone, output = folder / "pooled" / "all", folder / "predictions"
    predicted = {
        row: pool.submit(predict, runs[row], everyone, output / f"{row}-{draw}.csv")
        for row in ("pooled", "fedavg")
    }
    tested = test_molecules(everyone, owners, load(runs["fedavg"]))
    pairs = {
        row: tested.assign(predicted=found.result()[tested.index])
        for row, found in predicted.items()
    }
    scores = [
        score for row in rows[1:] for score in score_owners(row, draw, load(runs[row]))
    ]
    scores += score_pooled(draw, pairs["pooled"])
    return scores, pairs["fedavg"]


def rehearse(folder: Path, owners: Sequence[Path]) -> None:
    """Run FedAvg with a SuperLink, a SuperNode per owner, TLS and registered keys."""
    clock = time.monotonic()
    options = [*words(SETTINGS), "--tls", "--rounds", "2"]
    print(command("rehearse", folder / "rehearsal", *owners, *options), end="")
    print(f"rehearsal: {time.monotonic() - clock:.0f} s", flush=True)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("molecules-example")
    )
    parser.add_argument("--data", type=Path, help="folder with dataset-A.csv.gz, …")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes that train")
    parser.add_argument("--no-rehearsal", action="store_true")
    given = parser.parse_args()
    clock = time.monotonic()
    folder = given.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists. Name another folder, or remove it.")
    data = given.data or Path(os.environ.get("FLOWER_FGL_DATA", "")) / "AqSolDB"
    if not (data / "dataset-A.csv.gz").is_file():
        sys.exit(
            f"{data} has no dataset-A.csv.gz. Give the folder of AqSolDB's sources with "
            "--data, or set FLOWER_FGL_DATA to the folder that contains AqSolDB."
        )
    for owner in OWNERS:
        write_owner(folder / "owners" / owner, read_source(data, owner))
    write_new(folder / "new")
    (folder / "predictions").mkdir()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context) as pool:
        owners = check_owners(folder, pool)
        write_pooled(folder / "pooled" / "all", list(owners.values()))
        if not given.no_rehearsal:
            rehearse(folder, [owners[owner] for owner in SMALL])
        draws = [
            one_draw(folder, owners, draw, given.rounds, pool)
            for draw in range(1, given.draws + 1)
        ]
    scores = [score for found, _ in draws for score in found]
    print(
        f"\nRMSE of log S on each owner's test molecules, {given.draws} draw(s), "
        f"{given.rounds} rounds"
    )
    print(write_scores(folder, scores))
    pairs = draws[0][1]
    print(
        f"\nglobal model of FedAvg, draw 1, all test molecules: RMSE {rmse(pairs):.2f}"
    )
    draw_gains(scores, folder / "gains.svg")
    draw_predictions(pairs, folder / "predictions.svg")
    new = predict(folder / "runs" / "fedavg-1", folder / "new", folder / "new.csv")
    print("\nnew molecules, by the global model of FedAvg (log10 mol/L)")
    print("\n".join(f"  {name:12} {value:6.2f}" for name, value in new.items()))
    used = sum(
        sum(resource.getrusage(who)[:2])
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        f"\ntables, pictures and predictions: {folder} "
        f"({time.monotonic() - clock:.0f} s, {used:.0f} s of CPU)"
    )


if __name__ == "__main__":
    main()
