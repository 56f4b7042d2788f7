"""Node config of a SuperNode: the keys that a data owner may set, and their checks.

A data owner starts its SuperNode with ``--node-config``. Some keys are floors: limits that
a run cannot lower. The module loads no torch.
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import tomli_w

from flower_fgl.core.errors import ConfigError, RunError, refuse
from flower_fgl.core.options import (
    Scalar,
    fields_by_key,
    kebab,
    nearest,
    option,
    parse_settings,
)
from flower_fgl.core.settings import GeneralSettings

__all__ = ["NodeSettings", "broken_floors", "floors_in_force", "node_config_text"]
__all__ += ["parse_node_config", "read_node_config"]

WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|\S)+""")
PAIR = re.compile(r"""[^\s=#]+=(?:"[^"]*"|'[^']*'|[^\s"'#]+)""")

ABSOLUTE = ("state-dir", "identity", "peers", "id-key")
"""Keys of paths that must be absolute: each message may have another working folder."""


@dataclass(frozen=True)
class NodeSettings:
    """Keys of a SuperNode's ``--node-config``."""

    graph: str = option("", is_path=True)
    """absolute path of the .npz file or the CSV folder"""
    name: str = option("")
    """the owner's name in logs and in the run folder; by default the file's name without
    its ending"""
    about: str = option("", keeps_commas=True)
    """what the card of the model is to say of the owner's data, e.g. their time span; the
    server and all readers of the card see it"""
    partition_id: int = option(-1, ge=0)
    """the owner's number, or that of its partition of `dataset`"""
    num_partitions: int = option(0, "number of owners or partitions", ge=1)
    model_dir: str = option("", "folder for the owner's models", is_path=True)
    state_dir: str = option("", is_path=True)
    """folder for optimizer moments and other client state; by default the SuperNode keeps
    it in memory"""
    worker_idle: float = option(0.0, ge=0)
    """seconds without a message after which the owner's worker stops"""
    identity: str = option("", is_path=True)
    """file with the owner's identity key, for secure aggregation"""
    peers: str = option("", is_path=True)
    """file with the keys of the other owners, for secure aggregation"""
    id_key: str = option("", is_path=True)
    """file with a secret of the owners, which the server has not: identifiers of nodes
    travel as hashes with this key; the same file at all owners"""
    max_message_mb: float = option(math.inf, gt=0)
    """message size in 10⁶ bytes above which this node refuses a message"""
    # FLOORS are the fields from here on
    min_class_count: int = option(1, ge=1)
    """smallest min-class-count of a run that this node takes part in"""
    min_target_count: int = option(
        1, 'smallest min-target-count of a run with target-scale = "shared"', ge=1
    )
    upload_clip: float = option(math.inf, gt=0)
    """largest upload-clip of a run; a run without clipping is refused"""
    upload_noise: float = option(0.0, "smallest upload-noise of a run", ge=0)
    share_class_counts: bool = option(True)
    """false: refuse a run with share-class-counts = true"""
    share_target_statistics: bool = option(
        True, 'false: refuse a run that predicts numbers with target-scale = "shared"'
    )
    share_feature_names: bool = option(True)
    """false: refuse a run with share-feature-names = true"""
    share_type_names: bool = option(
        True, 'false: refuse a run on typed graphs with schema-align = "name"'
    )
    share_coefficients: bool = option(
        True,
        "false: refuse a run in which other owners see the coefficients of this owner's "
        'relations, such as one with fedhgn.alignment = "peers"',
    )
    secure_aggregation: bool = option(False)
    """true: refuse a run without secure aggregation"""
    secure_threshold: float = option(0.0, gt=0.5, le=1)
    """smallest secure-threshold of a run with secure aggregation"""
    fixed_roster: bool = option(False)
    """true: help to open only sums over all clients of the first sum; needs
    secure-aggregation and state-dir"""
    max_releases: int = option(0, ge=1)
    """number of replies with uploads or scores that this node sends in all runs together;
    needs state-dir, where they are counted"""
    own_split: bool = option(True)
    """false: a run may draw another split than the one in the graph file, or than that of
    the first run"""
    min_train_nodes: int = option(0, ge=1)
    """least number of training items; a run that leaves fewer is refused"""
    min_scored_nodes: int = option(0, ge=1)
    """least number of items of a set whose scores this node sends"""
    scores: str = option("all", choices="all rounded none")
    """scores and losses that this node sends; rounded: scores to 0.01, losses to 0.1 within
    -10 to 10, none: none"""
    methods: str = option("", keeps_commas=True)
    """methods that a run may use (fedavg,fedpg); by default all"""
    settings: str = option("", keeps_commas=True)
    """values of setting that a run may use (transductive,inductive); by default all"""

    @cached_property
    def hides_numbers(self) -> bool:
        """Whether replies lack scores, the loss or its terms, or round them."""
        is_rounded = self.scores != "all"
        return is_rounded or bool(self.min_scored_nodes) or self.hides_loss

    @property
    def hides_loss(self) -> bool:
        """Whether replies lack the loss: that of a crafted model tells counts or means."""
        shares_all = self.share_class_counts and self.share_target_statistics
        return self.scores == "none" or not shares_all

    def allows(self, key: str, name: str) -> bool:
        """Return whether the list ``methods`` or ``settings`` allows a name."""
        allowed = _names(getattr(self, key))
        return not allowed or name in allowed


KEYS = list(fields_by_key(NodeSettings))
FLOORS = tuple(KEYS[KEYS.index("min-class-count") :])
"""Keys that limit the runs in which a node takes part."""


def read_node_config(text: str) -> dict[str, Scalar]:
    """Read the text of ``--node-config`` as Flower does, and refuse what Flower drops.

    The text holds pairs ``key=value`` separated by blanks, or is the path of a TOML file.
    Raises a ConfigError if Flower would drop a part of it without a word, or cannot read
    it.
    """
    # loads Flower, which a command should not do at its start
    from click import ClickException

    from flower_fgl.core.flower_internals import parse_config_args

    words = [] if text.endswith(".toml") else WORD.findall(text)
    if dropped := [word for word in words if not PAIR.fullmatch(word)]:
        raise ConfigError(_dropped(dropped))
    try:
        values: dict[str, Scalar] = parse_config_args([text])
    except ClickException as error:
        raise ConfigError(
            f"Flower cannot read --node-config {text}: {error.message} A text needs "
            "quotes, and each key stands once."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Flower cannot read --node-config {text}: {error}"
        ) from error
    if len(values) < len(words):
        raise ConfigError(_dropped([w for w in words if not parse_config_args([w])]))
    return values


def _dropped(words: Sequence[str]) -> str:
    """Say that Flower does not read words of a node config."""
    return (
        f"Flower does not read this part of --node-config: {' '.join(words)}. The "
        "SuperNode would start without it, and without an error. Write key=value with no "
        'blank beside "=", texts in quotes, and blanks between the pairs: '
        "'graph=\"/data/a.npz\" min-class-count=5'."
    )


def node_config_text(values: Mapping[str, Scalar]) -> str:
    """Write a node config as text for ``--node-config``.

    Flower ends a text at its next quotation mark, also after a backslash. So both
    characters are written by their numbers.
    """
    words = []
    for key, value in values.items():
        _, _, text = tomli_w.dumps({"value": value}).strip().partition(" = ")
        text = text.replace(r"\\", r"\u005c").replace('\\"', r"\u0022")
        words.append(f"{key}={text}")
    return " ".join(words)


def floors_in_force(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the floors that a node config sets; RunError if it is wrong."""
    settings, known = parse_node_config(values), fields_by_key(NodeSettings)
    found = {key: getattr(settings, known[key].name) for key in FLOORS}
    return {key: value for key, value in found.items() if value != known[key].default}


def parse_node_config(values: Mapping[str, Scalar]) -> NodeSettings:
    """Parse and check Flower's ``context.node_config``; a RunError says what is wrong."""
    for key in values:
        if key not in KEYS:
            raise RunError(
                f'Unknown key "{key[:50]}" in the node config. {nearest(key, KEYS)} '
                "Correct --node-config and restart the SuperNode."
            )
    try:
        settings: NodeSettings = parse_settings(NodeSettings, values)
    except ConfigError as error:
        raise RunError(f"The node config is wrong: {error}") from error
    _check_paths(settings, values)
    choices = fields_by_key(GeneralSettings)["setting"].metadata["choices"]
    _require_known("settings", settings.settings, choices)
    has_roster = settings.state_dir and settings.secure_aggregation
    reasons = {
        "The node config is wrong: max-releases needs state-dir, the folder in which "
        "the node counts its replies.": settings.max_releases
        and not settings.state_dir,
        "The node config is wrong: fixed-roster needs secure-aggregation = true, and "
        "state-dir, the folder in which the node notes the clients of its first sum.": (
            settings.fixed_roster and not has_roster
        ),
    }
    refuse(reasons, RunError)
    return settings


def _check_paths(settings: NodeSettings, values: Mapping[str, Scalar]) -> None:
    """Reject paths that are relative or hold a control character."""
    for one in fields(settings):
        key, path = kebab(one.name), getattr(settings, one.name)
        if key not in values or not one.metadata["is_path"]:
            continue
        if any(ord(c) < ord(" ") or ord(c) == 127 for c in path):
            raise RunError(
                f"The node config is wrong: {key} holds a control character, {path!r}. "
                'Between double quotes \\t is a tab and \\n a line break: write "C:/temp", '
                "or single quotes."
            )
        if key in ABSOLUTE and not os.path.isabs(path):
            raise RunError(
                f"The node config's {key} must be an absolute path, got {path!r}. Start "
                f"the SuperNode with --node-config '{key}=\"/path\" …'."
            )


def _names(text: str) -> list[str]:
    """Split a list of names at commas."""
    return [name.strip() for name in text.split(",")] if text.strip() else []


def _require_known(key: str, text: str, known: Collection[str]) -> None:
    """Reject a list with an unknown name."""
    for name in _names(text):
        if name not in known:
            raise RunError(
                f'The node config is wrong: {key} names "{name[:50]}", which is unknown. '
                f"{nearest(name, known)}"
            )


def broken_floors(
    node: NodeSettings,
    run: Mapping[str, Scalar],
    *,
    uploads: bool,
    predicts_numbers: bool = False,
    known_methods: Mapping[str, Any],
) -> list[str]:
    """Say which effective settings of a run are weaker than the floors of a data owner.

    A method that uploads nothing has no uploads to protect, and only a run that predicts
    numbers sends statistics of targets.
    """
    _require_known("methods", node.methods, known_methods)
    found = []

    def note(key: str, demand: str) -> None:
        value = run[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = f"{value:g}" if is_number else str(value).lower()
        found.append(f"{key} = {shown}, but its node config demands {demand}")

    for key, allowed in (("methods", "method"), ("settings", "setting")):
        if not node.allows(key, str(run[allowed])):
            note(allowed, f"one of {', '.join(_names(getattr(node, key)))}")
    if run["min-class-count"] < node.min_class_count:  # type: ignore[operator]
        note("min-class-count", f"at least {node.min_class_count}")
    if run["share-class-counts"] and not node.share_class_counts:
        note("share-class-counts", "false")
    if predicts_numbers and run["target-scale"] == "shared":
        if run["min-target-count"] < node.min_target_count:  # type: ignore[operator]
            note("min-target-count", f"at least {node.min_target_count}")
        if not node.share_target_statistics:
            note("target-scale", '"given", "own" or "none"')
    if run["share-feature-names"] and not node.share_feature_names:
        note("share-feature-names", "false")
    if run["schema-align"] == "name" and not node.share_type_names:
        note("schema-align", '"same" or "private"')
    floors = known_methods[str(run["method"])].floors
    for key, (setting, allowed) in floors.items():
        if not getattr(node, key.replace("-", "_")) and run[setting] != allowed:
            note(setting, f'"{allowed}"')
    if uploads:
        clip = float(run["upload-clip"])
        if not 0 < clip <= node.upload_clip and math.isfinite(node.upload_clip):
            note("upload-clip", f"at most {node.upload_clip:g}, and clipping")
        if run["upload-noise"] < node.upload_noise:  # type: ignore[operator]
            note("upload-noise", f"at least {node.upload_noise:g}")
        elif node.upload_noise and run["upload-noise-model"] != "local":
            # a client then adds only a share of the noise
            note(
                "upload-noise-model", f'"local" with upload-noise {node.upload_noise:g}'
            )
        if node.secure_aggregation and not run["secure-aggregation"]:
            note("secure-aggregation", "true")
    if run["secure-aggregation"] and run["secure-threshold"] < node.secure_threshold:  # type: ignore[operator]
        note("secure-threshold", f"at least {node.secure_threshold:g}")
    return found
