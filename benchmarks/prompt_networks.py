"""Compare FedLoG's prompt generators trained with fewer random networks, Eq. (12).

    python benchmarks/prompt_networks.py --networks 20 5 1 0 --seeds 0 1

The generators of a stack of clients train from the same weights and with the same dropout;
a seed draws the random networks. Afterwards all are scored without dropout: Eq. (11), and
Eq. (12) with networks that no training has seen, means over clients. "prompts differ by" is
the distance to the prompts of the first row, relative to their norm. 0 networks train by
Eq. (11) alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from flower_fgl.algorithms.fedlog import prompts
from flower_fgl.algorithms.fedlog.matching import PromptTask, RandomNets, TaskStack
from flower_fgl.client_apps import fedlog
from flower_fgl.simulation.run import run_one

HELD_OUT, HELD_OUT_SEED = 60, 10**6


class Caught(BaseException):
    """Ends a run once its tasks are known; carries them."""


def tasks_of(dataset: str, clients: int) -> Sequence[PromptTask]:
    """Return the tasks of a run's first stack of clients."""

    def catch(_: Any, tasks: Sequence[PromptTask], **options: Any) -> None:
        raise Caught(tasks)

    settings: dict[str, Any] = {"dataset": dataset, "clients": clients}
    with tempfile.TemporaryDirectory() as folder:
        settings |= {
            "method": "fedlog",
            "rounds": 1,
            "threads": 1,
            "output-dir": folder,
        }
        with mock.patch.object(fedlog, "train_prompt_generators", catch):
            try:
                run_one(settings, engine="local", workers=1)
            except Caught as caught:
                return caught.args[0]  # type: ignore[no-any-return]
    raise SystemExit("The run trained no prompt generators.")


def nothing(
    nets: RandomNets, stack: TaskStack, *_: Any, **options: bool
) -> tuple[Tensor, Tensor]:
    """Take the place of Eq. (12)."""
    return stack.x.new_zeros(len(stack.x)), torch.zeros_like(stack.x)


def draw(tasks: Sequence[PromptTask], number: int, seed: int) -> RandomNets:
    """Draw random networks."""
    generator = torch.Generator().manual_seed(seed)
    width = tasks[0].graph.num_features
    return RandomNets.draw(number, width, tasks[0].num_classes, generator=generator)


def train(
    tasks: Sequence[PromptTask], number: int, seed: int, epochs: int
) -> list[nn.Sequential]:
    """Train a generator for each client."""
    torch.manual_seed(7)
    generators = [prompts.make_generator(tasks[0].graph.num_features) for _ in tasks]
    wanted = RandomNets.mismatch if number else nothing
    with mock.patch.object(RandomNets, "mismatch", wanted):
        prompts.train_prompt_generators(
            generators,
            tasks,
            epochs=epochs,
            networks=lambda epoch: draw(tasks, number or 1, 1000 * seed + epoch),
            seeds=lambda place, epoch: 100 * epoch + place,
            lr=0.01,
            batch_sizes=[0] * len(tasks),
        )
    return generators


@torch.no_grad()
def score(
    tasks: Sequence[PromptTask], generators: Sequence[nn.Sequential], held: RandomNets
) -> tuple[float, float, Tensor]:
    """Return Eqs. (11) and (12), and all prompts."""
    features = [task.features() for task in tasks]
    stack = TaskStack(tasks, features)
    most = stack.x.shape[1]
    rows = [g(x) for g, (x, _, _) in zip(generators, features, strict=True)]
    made = torch.stack([F.pad(row, (0, 0, 0, most - len(row))) for row in rows])
    losses = [
        (row - mean).square().sum(1).mean()
        for row, (_, mean, _) in zip(rows, features, strict=True)
    ]
    found, _ = held.mismatch(stack, made)
    of_gradients = found.mean() / held.number
    return float(torch.stack(losses).mean()), float(of_gradients), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--networks", type=int, nargs="+", default=[20, 5, 1, 0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = tasks_of(options.dataset, options.clients)
    held = draw(tasks, HELD_OUT, HELD_OUT_SEED)
    columns = ("Eq. (11)", "Eq. (12), held out", "prompts differ by", "seconds")
    table = Table("networks", "seed", *columns, title=f"{len(tasks)} clients")
    first: Tensor | None = None
    for seed in options.seeds:
        for number in options.networks:
            clock = time.process_time()
            generators = train(tasks, number, seed, options.epochs)
            took = time.process_time() - clock
            of_features, of_gradients, made = score(tasks, generators, held)
            first = made if first is None else first
            apart = float((made - first).norm() / first.norm())
            shown = [
                f"{of_features:.3f}",
                f"{of_gradients:.5f}",
                f"{100 * apart:.1f} %",
            ]
            table.add_row(str(number), str(seed), *shown, f"{took:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
