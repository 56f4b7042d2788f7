"""Checks of a node config that need the node's disk, before its first round."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from flower_fgl.client_apps.runtime.data import node_place
from flower_fgl.client_apps.runtime.model_store import models_folder
from flower_fgl.client_apps.runtime.secure_aggregation import check_identity
from flower_fgl.core.atomic import make_private_folder
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.node_settings import parse_node_config
from flower_fgl.core.options import Scalar

__all__ = ["check_node"]

log = logging.getLogger(__name__)


def check_node(
    node: Mapping[str, Scalar], config: RunConfig, *, creates: bool = True
) -> None:
    """Raise the RunError with which a node refuses its own node config.

    The graph is not read here. Missing folders, and the key of the identity, are created
    if ``creates``.
    """
    settings = parse_node_config(node)
    node_place(node)
    models = models_folder(node)
    if models is not None:
        _require_writable(models, "model-dir", creates=creates)
    if settings.state_dir:
        _require_writable(Path(settings.state_dir), "state-dir", creates=creates)
    if config.secure_aggregation:
        check_identity(node, creates=creates)


def _require_writable(folder: Path, key: str, *, creates: bool) -> None:
    """Raise an error if a folder cannot be created or written to."""
    try:
        if creates:
            make_private_folder(folder)
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise PermissionError
    except OSError:
        log.error("The folder %s of %s cannot be written.", folder.absolute(), key)
        raise RunError(
            f"its {key} is not writable. Set {key} in its node config to a writable "
            "folder."
        ) from None
