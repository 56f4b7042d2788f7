"""The ``tune`` command: the same number of trials for each row of an experiment."""

import os
from pathlib import Path

import typer

from flower_fgl.cli.arguments import SettingPairs, parse_pairs, show
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.score_names import ScoreScale
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.methods import parse_config

__all__ = ["tune"]


def tune(
    experiment: Path = typer.Argument(
        ..., help="Experiment file (TOML) with draws and [tune]."
    ),
    budget: int = typer.Option(
        ..., help="Trials of each row; the first is the row as it stands."
    ),
    jobs: int = typer.Option(
        1,
        min=0,
        help="Trials that run at once, one process and thread each; 0: one per core.",
    ),
    out: Path | None = typer.Option(
        None,
        help="Tuned experiment file (default: EXPERIMENT-tuned.toml beside it).",
        dir_okay=False,
    ),
    case: list[str] | None = typer.Option(
        None, help="Tune only the rows of this case, or this row. Repeatable."
    ),
    settings: SettingPairs = None,
    seed: int = typer.Option(0, help="Seed of the proposals."),
    defaults: bool = typer.Option(
        True, help="Add each tuned row's default settings as a row of its own."
    ),
    quiet: bool = typer.Option(False, help="Hide the line of each trial."),
) -> None:
    """Tune all rows of an experiment file with the same number of trials.

    Trials are compared by the validation accuracy (or AUROC or RMSE, if selecting) of their
    best round, never by test scores. If the command is killed, run it again: it
    continues. It writes the tuned experiment file, and all trials to the folder tune of
    the experiment's output.
    """
    from flower_fgl.lab.experiments.experiment_file import read_experiment, with_clients

    pairs = parse_pairs(settings or [])
    plan = read_experiment(experiment).with_options(pairs)
    if fixed := sorted(pairs.keys() & plan.tune.keys()):
        raise ConfigError(
            f"--set {fixed[0]}=… fixes a setting that [tune] of {experiment} varies. "
            "Remove one of them."
        )
    # loads the studies' code: a wrong file is reported first
    from flower_fgl.lab.tune import tuned_file, tuning
    from flower_fgl.simulation.resources import num_cpus

    rows = tuning.rows_to_tune(plan)
    if wrong := [c for c in case or [] if not any(row.is_named([c]) for row in rows)]:
        known = "; ".join(row.label for row in rows)
        raise ConfigError(f'{experiment} has no row "{wrong[0]}". Its rows: {known}.')
    reject_unused_settings(
        pairs, [parse_config(with_clients(r.settings)) for r in rows]
    )
    output = Path(os.path.expanduser(str(plan.config.get("output-dir", "runs"))))
    folder = output / plan.name / "tune"
    target = out or experiment.with_name(f"{experiment.stem}-tuned.toml")
    if target.resolve() == experiment.resolve():
        raise ConfigError(f"--out {out} is the experiment itself. Choose another file.")
    place = target.resolve().parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"Cannot write {target}: {place} is no folder to write to. Choose another "
            "file with --out."
        )

    def on_trial(study: tuning.RowStudy, trial: tuning.Trial) -> None:
        number = f"{study.row.label}: trial {trial.index + 1} of {budget}"
        values = ", ".join(f"{k} = {v}" for k, v in trial.settings.items())
        score = trial.score
        scale = ScoreScale(study.metric)
        unit = "" if scale.kind.has_units else " %"
        shown = (
            f"failed: {trial.error}" if score is None else f"{scale.show(score)}{unit}"
        )
        show(f"{number}, validation {shown} ({values})")

    studies = tuning.tune(
        plan,
        [row for row in rows if not case or row.is_named(case)],
        folder.resolve(),
        budget=budget,
        jobs=jobs or num_cpus(),
        seed=seed,
        on_trial=None if quiet else on_trial,
        on_note=None if quiet else show,
    )
    for study in studies:
        best, first = study.best, study.trials[0].score
        values = ", ".join(f"{k} = {v}" for k, v in best.settings.items())
        values = f" ({values})" if values else ""
        scale = ScoreScale(study.metric)
        before = "failed" if first is None else scale.show(first)
        show(
            f"{study.row.label}: {scale.show(best.score)} in trial {best.index + 1}"
            f" of {len(study.trials)}, default {before}{values}"
        )
    if len(studies) < len(rows):
        show(
            f"Rows tuned: {len(studies)} of {len(rows)}. Run the command without --case "
            f"to write {target}."
        )
        return
    digest = tuned_file.write_study(plan, studies, folder, budget=budget)
    tuned_file.write_tuned_experiment(
        plan, studies, target, budget=budget, study=digest, with_defaults=defaults
    )
    show(f"Study: {folder / 'study.json'}")
    show(f"Tuned experiment: {target}")
