"""Commands for deployments: new-app, certificates and rehearse."""

from pathlib import Path

import typer

from flower_fgl.cli.arguments import SettingPairs, parse_pairs, show
from flower_fgl.core.config import pyproject_table
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.methods import METHODS

__all__ = ["certificates", "new_app", "rehearse"]


def new_app(
    folder: Path = typer.Argument(..., help="Folder of the app; created."),
) -> None:
    """Write the Flower app that `flwr run FOLDER` runs.

    Its pyproject.toml holds all settings with their defaults. The app has no code of its
    own: it runs the flower-fgl that is installed where the SuperLink and each SuperNode
    run.
    """
    from flower_fgl.simulation.flower.flower_simulation import write_app_folder

    if (folder / "pyproject.toml").exists():
        raise RunError(
            f"{folder} has a pyproject.toml, which is not overwritten. Choose another "
            "folder, or remove it."
        )
    try:
        write_app_folder(folder, config=pyproject_table(METHODS))
    except OSError as error:
        raise RunError(f"Cannot write {folder}: {error.strerror}.") from error
    show(f"{folder / 'pyproject.toml'}: flwr run {folder} runs the app.")


def certificates(
    folder: Path = typer.Argument(..., help="Folder to write to."),
    owners: list[str] = typer.Argument(..., help="Names of the data owners."),
    host: list[str] | None = typer.Option(
        None,
        help="Host name or address of the SuperLink, besides localhost and "
        "127.0.0.1. Repeatable.",
    ),
) -> None:
    """Create a CA, a certificate of the SuperLink, and a key pair for each data owner.

    For rehearsals. In production your own CA signs the certificate, and each owner creates
    its key and sends only the .pub file.
    """
    from flower_fgl.simulation.flower.certificates import make_certificates

    for path in make_certificates(folder, owners, host or ()):
        show(str(path))


def rehearse(
    folder: Path = typer.Argument(..., help="New folder for all files."),
    graphs: list[Path] | None = typer.Argument(
        None,
        help="Graph file or CSV folder of each data owner; without any, a benchmark "
        "graph is partitioned.",
    ),
    tls: bool = typer.Option(
        False, "--tls", help="Encrypt, and admit registered keys only."
    ),
    method: str = typer.Option("fedavg", help="Method, see flower-fgl methods."),
    rounds: int | None = typer.Option(
        None, help="Rounds (default 3; 1 for one-shot methods)."
    ),
    dataset: str | None = typer.Option(
        None, help="Dataset to partition without GRAPHS (default synthetic)."
    ),
    clients: int | None = typer.Option(
        None, help="Number of data owners without GRAPHS (default 3)."
    ),
    timeout: float = typer.Option(600.0, help="Seconds within which the run must end."),
    settings: SettingPairs = None,
) -> None:
    """Rehearse a deployment on this machine: a SuperLink and the SuperNodes of all owners.

    Checks each owner's graph, starts all programs on free ports of 127.0.0.1, runs a
    method, predicts with each owner's model, and ends what it started.
    """
    if graphs and (dataset is not None or clients is not None):
        raise ConfigError(
            "--dataset and --clients choose the graphs of a rehearsal without GRAPHS. "
            "Leave them out, or name no graphs."
        )
    from flower_fgl.cli.rehearsal import plan_rehearsal, run_rehearsal

    values: dict[str, Scalar] = {"method": method}
    if rounds is not None:
        values["rounds"] = rounds
    plan = plan_rehearsal(
        graphs or (),
        values,
        parse_pairs(settings or []),
        dataset=dataset or "synthetic",
        clients=3 if clients is None else clients,
    )
    run_rehearsal(folder, plan, tls=tls, timeout=timeout)
