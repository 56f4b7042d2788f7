"""Which settings go together with ``closed-set``, ``open-set`` and ``few-shot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flower_fgl.errors import ConfigError
from flower_fgl.options import kebab

if TYPE_CHECKING:
    from flower_fgl.config import GeneralSettings

__all__ = ["MAX_SHOTS", "UNSEEN_SETTINGS", "check_few_shot", "check_unseen"]

UNSEEN_SETTINGS = ("closed-set", "open-set")
"""Settings that score nodes which the client did not have in training."""

MAX_SHOTS = 11
"""A class that is kept has 26 nodes or more, of which 15 test (a test compares them)."""


def check_unseen(settings: GeneralSettings) -> None:
    """Refuse what does not go with nodes that are unseen in training.

    Parameters
    ----------
    settings : GeneralSettings
        All general settings.

    Raises
    ------
    ConfigError
        In ``closed-set`` or ``open-set``, for a partition other than METIS or any
        sparsity.
    """
    if settings.setting not in UNSEEN_SETTINGS:
        return
    if settings.partition != "metis":
        raise ConfigError(
            f'setting = "{settings.setting}" cuts the graph into the clients and a new '
            f'one with METIS: use partition = "metis", got "{settings.partition}".'
        )
    for name in ("feature_sparsity", "edge_sparsity", "label_sparsity"):
        if getattr(settings, name):
            raise ConfigError(
                f'{kebab(name)} takes away from what a client has, but setting = "'
                f'{settings.setting}" scores it on more than that: use {kebab(name)} = '
                f"0, got {getattr(settings, name)}."
            )


def check_few_shot(settings: GeneralSettings) -> None:
    """Refuse what does not go with a fixed number of training nodes per class.

    Parameters
    ----------
    settings : GeneralSettings
        All general settings.

    Raises
    ------
    ConfigError
        In ``few-shot``, for too many shots, a split, or ``label-sparsity``.
    """
    if settings.setting != "few-shot":
        return
    if settings.shots > MAX_SHOTS:
        raise ConfigError(
            "A client keeps the classes of which it has more than 25 nodes; 15 of them "
            f"test, so that at least 11 are left to train: shots must be at most "
            f"{MAX_SHOTS}, got {settings.shots}."
        )
    if settings.split != "default":
        raise ConfigError(
            'setting = "few-shot" draws the shots and 15 test nodes of each class: '
            f'split = "{settings.split}" is not possible, leave it at "default".'
        )
    if settings.label_sparsity:
        raise ConfigError(
            'label-sparsity takes training nodes away, but setting = "few-shot" gives '
            "every class the same number: use label-sparsity = 0 and fewer shots, got "
            f"{settings.label_sparsity}."
        )
