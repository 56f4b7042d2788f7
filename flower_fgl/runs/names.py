"""Names of run folders, and of runs in a comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar

__all__ = ["check_folder_name", "in_folder_name", "some_names", "tell_apart"]


def in_folder_name(value: Scalar) -> str:
    """Convert a case name or grid value to text that is safe in a folder name."""
    text = "".join(c if c.isalnum() or c in ".+-" else "_" for c in str(value))
    return re.sub("_+", "_", text).strip("_")


def check_folder_name(name: str, what: str) -> None:
    """Reject a name of which :func:`in_folder_name` leaves nothing but dots, e.g. ``..``.

    ``what`` has the name; the message of the ConfigError begins with it.
    """
    if not in_folder_name(name).strip("."):
        raise ConfigError(
            f'{what} "{name}" cannot be the name of a run folder. Use a name with letters '
            "or digits."
        )


def tell_apart(
    configs: Sequence[Mapping[str, Any]], *, but: Collection[str] = ()
) -> list[str]:
    """Name runs by method and by the settings that differ among runs of that method.

    ``configs`` are the flat settings of each run without irrelevant ones; those in
    ``but`` are not part of a name. A name is e.g. ``adpfedgnn · rl=false``.
    """
    names = []
    for config in configs:
        method = str(config["method"])
        same = [other for other in configs if other["method"] == method]
        own = [
            f"{key.removeprefix(f'{method}.')}="
            f"{value if isinstance(value, str) else json.dumps(value)}"
            for key, value in config.items()
            if key not in but and any(other.get(key) != value for other in same)
        ]
        names.append(" · ".join([method, *own]))
    return names


def some_names(names: Sequence[str], separator: str) -> str:
    """List up to three names, and the number of the others."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return separator.join([*names[:3], *more])
