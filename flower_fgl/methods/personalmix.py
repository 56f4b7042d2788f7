"""Settings that all methods with personalized averages share."""

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = ["PersonalMixSettings"]


@dataclass(frozen=True)
class PersonalMixSettings:
    """Settings of a server half that averages separately for each client."""

    absent: str = option("mean", choices="mean last")
    """model that a client receives if it was not in the last round: the mean of that
    round's uploads, or its own last mixture"""
