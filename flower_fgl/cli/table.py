"""The ``table`` command: results of experiments as a table that can be cited."""

import tomllib
from pathlib import Path

import typer

from flower_fgl.cli.arguments import encodable, show
from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.tables.cells import (
    CELLS,
    DEFAULT_SUFFIX,
    Cell,
    read_cells,
    write_cells,
)
from flower_fgl.lab.tables.compare import select_runs
from flower_fgl.runs.files import ROUNDS, grouped

__all__ = ["load_cells", "read_labels", "table"]

ENDINGS = {
    ".md": "markdown",
    ".txt": "markdown",
    ".tex": "latex",
    ".csv": "csv",
    ".html": "html",
}
"""Format of a table by the ending of its file."""


def table(
    runs: list[str] = typer.Argument(
        ...,
        help="Run folders, folders of run folders, or patterns; FOLDER:NAME selects "
        "the runs of one case, or of one method. Or cells: .jsonl files or folders of "
        "them.",
    ),
    format: str = typer.Option(
        "",
        help="markdown, latex, csv or html. By default that of the file's ending "
        "(.md, .txt, .tex, .csv, .html) with --out, else markdown.",
    ),
    layout: str = typer.Option(
        "",
        help="full: one table per dataset with all scores, costs and comparisons; "
        "overview: one column per dataset; summary: ranks, counts of verdicts, costs; "
        "owners: one column per natural owner, and its gain. By default full, and "
        "overview in LaTeX, which fits a page.",
    ),
    column: str = typer.Option("test", help="Node set: test, unseen, …"),
    metric: str = typer.Option(
        "",
        help="accuracy, macro_f1, worst_accuracy, auroc, auprc, …; or bytes, seconds. "
        "By default the score that selects the round: accuracy or auroc; "
        "mean_accuracy for few-shot runs.",
    ),
    against: str = typer.Option(
        "", help="Row or method to compare all rows with (default: local, if there)."
    ),
    draws: int = typer.Option(
        0, min=0, help="Use only the first N draws of all rows; 0: all of them."
    ),
    row: list[str] | None = typer.Option(None, help="Show only this row. Repeatable."),
    defaults: bool = typer.Option(
        True, help='Show the rows "…, default" of tuned experiments.'
    ),
    incomplete: bool = typer.Option(
        False,
        "--skip-incomplete",
        help="Leave out rows that lack draws, and name them, instead of an error.",
    ),
    select: str = typer.Option(
        "",
        help="Validation score that selects each run's round: auroc, mean_auroc, … By "
        "default the runs' own.",
    ),
    experiments: list[Path] | None = typer.Option(
        None,
        "--experiment",
        help="Experiment file of run folders without a copy of it: my.toml is used "
        "for those in a folder my. Repeatable.",
    ),
    labels: Path | None = typer.Option(
        None, help="TOML file with display names: fedavg = 'FedAvg'."
    ),
    cells: Path | None = typer.Option(
        None,
        help="Also write each experiment as a file of JSON lines into this folder.",
    ),
    notes: str = typer.Option(
        "all",
        help="Sentences below the table: all, marks (marks, tests and ranks), none.",
    ),
    ranks: Path | None = typer.Option(
        None,
        help="Also draw the critical-difference diagram of the ranks: SVG, PNG or PDF "
        "by the file's ending; SVG without one.",
        dir_okay=False,
    ),
    out: Path | None = typer.Option(
        None, help="File to write instead of the terminal."
    ),
) -> None:
    """Make a table of finished runs: mean ± standard deviation over draws.

    Bold marks the best row, ≈ rows that are tied with it. All rows of one dataset need the
    same draws. What is not equal in a comparison is printed below it as a warning.
    """
    found, missing = load_cells(runs, experiments or [], select)
    shown = select_rows(found, row or [], defaults=defaults)
    if incomplete:
        found, _ = complete_rows(found)
        shown, skipped = complete_rows(shown, draws)
        missing = [*missing, *skipped]
    from flower_fgl.lab.tables.ranks import draw_ranks
    from flower_fgl.lab.tables.results_table import ResultsTable
    from flower_fgl.lab.tables.table_formats import format_table
    from flower_fgl.runs.writer import replace_file

    made = ResultsTable(
        shown,
        column=column,
        metric=metric,
        against=against,
        draws=draws,
        labels=read_labels(labels) if labels is not None else {},
    )
    if not format and out is not None and out.suffix not in ENDINGS:
        raise ConfigError(
            f"{out} has none of the endings {', '.join(ENDINGS)}. Use one of them, or name "
            "the format: --format markdown."
        )
    format = format or (ENDINGS[out.suffix] if out else "markdown")
    text = format_table(made, layout=layout, format=format, notes=notes)
    if ranks is not None:
        ranked, _ = made.ranks()
        if ranked is None:
            raise ConfigError(
                "--ranks needs scores of several rows on several datasets, got "
                f"{len(made.blocks)} dataset."
            )
        ranks = draw_ranks(ranked, ranks)  # before anything else is written
    if cells is not None:
        written = write_cells(found, cells)
        show(f"Cells: {len(written)} files in {cells}")
        for path, kept in written.items():
            if kept:
                missing.append(
                    f"Warning: {path} also holds rows that were not written now: "
                    f"{'; '.join(cell.row for cell in kept)}. Remove those that are not "
                    "rows of the experiment any more."
                )
    if out is None:
        typer.echo(encodable(text), nl=False)
    else:
        replace_file(out, text.encode())
        show(f"Table: {out}")
    if format == "csv" or notes != "all":  # else the table contains them
        missing = [*missing, *(f"Warning: {text}." for text in made.warnings())]
    for note in missing:
        typer.echo(encodable(note), err=True)
    if ranks is not None:
        show(f"Picture: {ranks}")


def load_cells(
    texts: list[str], experiments: list[Path], select: str = ""
) -> tuple[list[Cell], list[str]]:
    """Read cells from files, and make those of run folders; also return what they lack."""
    cells: list[Cell] = []
    notes: list[str] = []
    selected = []
    for text in texts:
        path = Path(text)
        if path.suffix == CELLS or _is_cells_folder(path):
            cells += read_cells(path)
        else:
            selected += select_runs(text)
    if select and cells:
        raise ConfigError(
            f"--select {select} needs run folders: a cell holds one round of each draw."
        )
    if select:
        selected = [run.selected_by(select) for run in selected]
    if selected:
        # loads the experiments' code, which cells do not need
        from flower_fgl.lab.tabulate import tabulate_runs

        made, notes = tabulate_runs(selected, experiments)
        cells += made
    return cells, notes


def _is_cells_folder(path: Path) -> bool:
    """Return whether a folder holds cells and no run folders."""
    if not path.is_dir() or (path / "config.toml").exists():
        return False
    if any(path.glob("*/config.toml")):  # without a walk through all run folders
        return False
    names = {file.name for file in path.rglob(f"*{CELLS}")}
    return bool(names) and ROUNDS not in names


def select_rows(cells: list[Cell], rows: list[str], *, defaults: bool) -> list[Cell]:
    """Return the cells of some rows; all if none is named."""
    known = list(dict.fromkeys(cell.row for cell in cells))
    if wrong := [name for name in rows if name not in known]:
        raise ConfigError(
            f'The table has no row "{wrong[0]}". Its rows: {"; ".join(known)}.'
        )
    return [
        cell
        for cell in cells
        if (not rows or cell.row in rows)
        and (defaults or not cell.row.endswith(DEFAULT_SUFFIX))
    ]


def complete_rows(cells: list[Cell], number: int = 0) -> tuple[list[Cell], list[str]]:
    """Return the cells with the first draws of their dataset, and notes on the others."""
    places = grouped(cells, lambda cell: cell.place_key)
    whole, notes = [], []
    for cell in cells:
        draws = {draw.key for one in places[cell.place_key] for draw in one.draws}
        needed = sorted(draws)[: number or None]
        lacking = set(needed) - {draw.key for draw in cell.draws}
        if lacking:
            notes.append(
                f'{cell.experiment}: row "{cell.row}" is left out, it lacks '
                f"{len(lacking)} of {len(needed)} draws."
            )
        else:
            whole.append(cell)
    return whole, notes


def read_labels(path: Path) -> dict[str, str]:
    """Read display names of rows, datasets and partitions from a TOML file."""
    try:
        found = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    if not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(
            f'{path}: each label must be a text, as in fedavg = "FedAvg".'
        )
    return found
