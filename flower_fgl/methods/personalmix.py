"""Settings that all methods with personalized averages share."""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = ["PersonalMixSettings"]


@dataclass(frozen=True)
class PersonalMixSettings:
    """Settings of a server half that averages separately for each client."""

    absent: str = option(
        "mean",
        "what a client receives that was not in the last round: the mean of that "
        "round's uploads, or its own last mixture",
        choices="mean last",
    )
