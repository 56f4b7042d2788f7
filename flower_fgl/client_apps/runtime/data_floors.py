"""Floors of a node that depend on its graph, and the record of an owner's first split."""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.releases import OwnerFile
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import Scalar

__all__ = ["SplitRecord", "broken_by_data"]


def broken_by_data(
    node: NodeSettings, config: RunConfig, data: ClientData
) -> list[str]:
    """Return a phrase, without numbers of the graph, for each floor that a run breaks."""
    found = []
    if data.graph.replaces_split and node.own_split:
        # the default of a set of graphs is a split by identifiers
        is_set = config.classifies_graphs
        remedy = (
            "set split = public in the run" if is_set else "leave split out of the run"
        )
        found.append(
            f"split = {config.split}, but the split in its graph file counts: {remedy}, or "
            "the data owner sets own-split = false"
        )
    if int(data.training.index.numel()) < node.min_train_nodes:
        found.append(
            f"too few training items here: its node config demands min-train-nodes = "
            f"{node.min_train_nodes}"
        )
    name, least = config.positive_class, config.min_class_count
    if node.hides_numbers:
        # else the server could choose the run's number, and the refusals would count
        least = node.min_class_count
    if node.graph and name and least > 1 and fewest_members(data, name) < least:
        found.append(
            f"positive-class = {name}, of which a set of this node has fewer than "
            f"min-class-count = {least} items"
        )
    return found


def fewest_members(data: ClientData, name: str) -> int:
    """Return the fewest items of a class in a non-empty set; 0 if the graph lacks it."""
    if name not in data.graph.class_names or data.graph.graph.targets is not None:
        return 0
    number, sets = data.graph.class_names.index(name), [data.training.labels]
    for _, y, masks in zip(data.inputs, data.labels, data.columns, strict=True):
        sets += [y[mask & (y >= 0)] for mask in masks.values()]
    return min((int((y == number).sum()) for y in sets if len(y)), default=0)


@dataclass(frozen=True)
class SplitRecord(OwnerFile):
    """File with the settings from which the split of an owner's first run was drawn.

    Two splits that differ by one item give away what that item adds to an upload.
    ``label`` is the name of the node, for errors; ``drawn`` are the settings, by name,
    from which the run draws the split.
    """

    label: str
    drawn: tuple[tuple[str, Scalar], ...]
    kind = "split"

    def require(self) -> None:
        """Raise a RunError if the first run had another split, or the file is damaged."""
        try:
            first = self.read()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError):
            first = None
        if not isinstance(first, dict):
            raise RunError(
                f"{self.label} refuses the run: the record of its split, {self.path.name} "
                "in its state-dir, is damaged. The data owner must restore or delete it."
            )
        if first != dict(self.drawn):
            raise RunError(
                f"{self.label} refuses the run: it draws the split from "
                f"{_text(dict(self.drawn))}, the owner's first run drew it from "
                f"{_text(first)}. Use these settings. For another split the data owner "
                f"deletes {self.path.name} in its state-dir."
            )

    def keep(self) -> None:
        """Store the settings of the first run on disk; compare those of a later one."""
        try:
            with self.locked():
                self.require()
                if not self.path.exists():
                    self.write(dict(self.drawn))
        except OSError as error:
            raise RunError(
                f"{self.label} refuses the run: the record of its split cannot be written "
                f"to its state-dir: {error.strerror}."
            ) from error


def _text(drawn: dict[str, Scalar]) -> str:
    """Write settings for a message."""
    return ", ".join(f"{key} = {value}" for key, value in drawn.items())
