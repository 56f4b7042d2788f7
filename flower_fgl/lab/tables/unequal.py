"""Settings in which the rows of a comparison differ although they are no method's own."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from flower_fgl.core.options import Scalar

__all__ = ["COMPARED", "finetuned_note", "unequal_settings"]

COMPARED = {
    "backbone": ("model", "hidden-channels", "num-layers", "dropout"),
    "optimizer": ("optimizer", "lr", "optimizer-state", "batch-size"),
    "weight decay": ("weight-decay",),
    "training": ("rounds", "local-epochs", "check-every", "patience"),
    "evaluation": (
        "evaluate",
        "evaluate-every",
        "eval-policy",
        "final-local-epochs",
        "absent-classes",
    ),
}
"""General settings that a fair comparison shares, by subject. Methods may have other
defaults of them."""


def unequal_settings(
    rows: Mapping[str, Mapping[str, Scalar]],
    tuned: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Name the general settings in which rows of one comparison differ, one sentence each.

    ``tuned`` holds the settings that a row chose on validation nodes, in which it is
    not compared; nor is it in those of its name.
    """
    chosen = tuned or {}
    out = []
    for subject, keys in COMPARED.items():
        for key in keys:
            values: dict[str, list[str]] = {}
            for name, settings in rows.items():
                is_named = any(part.startswith(f"{key}=") for part in name.split(", "))
                is_chosen = is_named or key in chosen.get(name, ())
                if key in settings and not is_chosen:
                    values.setdefault(_shown(settings[key]), []).append(name)
            if len(values) > 1:
                listed = ", ".join(
                    f"{value} ({'; '.join(names)})" for value, names in values.items()
                )
                advice = f" (--set {key}={next(iter(values))} makes them equal)"
                out.append(
                    f"{subject}: {key} is {listed}{advice * (subject == 'backbone')}"
                )
    return out


def finetuned_note(names: Iterable[str]) -> str:
    """Say whose scores are taken after the last round."""
    return (
        f"Scores of {'; '.join(names)} are taken after the fine-tuning or second step "
        "that follows the last round."
    )


def _shown(value: Scalar) -> str:
    """Format a value; equal numbers have equal text."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)
