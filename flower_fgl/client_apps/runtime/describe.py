"""A client's description, all that it reports about its graph, and checks of its node."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from flwr.app import RecordDict

from flower_fgl.client_apps.runtime.data import ClientData, models_folder, node_place
from flower_fgl.client_apps.runtime.secure_aggregation import check_identity
from flower_fgl.core.agreement import hash_names, whole_recipe
from flower_fgl.core.atomic import make_private_folder
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError, clip
from flower_fgl.core.node_settings import parse_node_config
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.protocols.describe import (
    HASHED,
    MAX_TEXT,
    PRIVATE,
    Description,
    Rejection,
)

__all__ = ["check_description", "check_node", "describe", "enough", "to_reply"]

log = logging.getLogger(__name__)


def check_description(description: Description) -> None:
    """Raise the PayloadError with which the server would refuse a description."""
    Description.from_record(description.to_record())


def to_reply(description: Description) -> RecordDict:
    """Pack a description; a data owner's that the server would refuse is a rejection."""
    try:
        check_description(description)
    except PayloadError as error:
        if not description.is_owned:
            raise
        reason = f"its description is not allowed: {error}"
        return Rejection(description.name, reason).to_record()
    return description.to_record()


def enough(counts: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return class counts, 0 for counts below ``min-class-count``."""
    return tuple(count if count >= least else 0 for count in counts)


def describe(
    data: ClientData,
    config: RunConfig,
    *,
    place: tuple[int, int],
    model: str,
    name: str,
    public_key: bytes = b"",
    about: str = "",
) -> Description:
    """Describe a client's graph by counts that the settings let leave the client.

    ``place`` is -1 and 0 if the server assigns the partition-id; ``model`` is empty if it
    depends on that. Without ``share-feature-names`` only a hash of the names is included.
    Classes with fewer training nodes than ``min-class-count`` are reported as 0. Peers
    encrypt shares of secure aggregation for this client with its ``public_key``. ``about``
    are the owner's words on its data.
    """
    graph = data.graph
    counts: tuple[int, ...] = ()
    if config.share_class_counts and graph.graph.targets is None:  # one class each
        counts = tuple(graph.class_counts("train").tolist())
    counts = enough(counts, config.min_class_count)
    is_joint = graph.schema is None or config.schema_align == "same"
    names = graph.feature_names if is_joint else ()
    schema, type_features = "", tuple[str, ...]()
    if graph.schema is not None:
        schema, type_features = _told_schema(graph, config.schema_align)
    return Description(
        partition_id=place[0],
        num_partitions=place[1],
        num_nodes=graph.num_items,
        num_edges=graph.num_edges,
        num_train=int(data.training.index.numel()),
        num_val=data.sizes.get("val", 0),
        num_test=data.sizes.get("test", 0),
        num_features=graph.num_features if is_joint else 0,
        class_counts=counts,
        model=model,
        partition_sha256=data.partition_sha256,
        public_key=public_key,
        name=name,
        scale=graph.scale,
        feature_names=names if config.share_feature_names else (),
        features_sha256=hash_names(names),
        num_edge_features=graph.num_edge_features,
        num_entries=data.num_entries if config.weight_by == "entries" else 0,
        prepared=whole_recipe(graph.prepared) if is_joint else "",
        **graph.target.entries,
        schema=schema,
        type_features=type_features,
        about=clip(about, MAX_TEXT),
    )


def _told_schema(graph: ClientGraph, align: str) -> tuple[str, tuple[str, ...]]:
    """Return what a client tells of its schema, and the hashes of the features of kinds.

    Private relations, and with ``schema-align = "private"`` all, stay untold.
    """
    from flower_fgl.datasets.transforms.typed import told_parts

    if align == "private":
        return PRIVATE, ()
    if align == "same":
        assert graph.schema is not None
        return f"{HASHED}{graph.schema.hashed().to_text()}", ()
    told = told_parts(graph, align)
    return told.schema.to_text(), told.features


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
