"""Notes of ``check-graph`` on a set of graphs: sizes, repeated identifiers, split."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from flower_fgl.core.config import RunConfig
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, GraphDataset
from flower_fgl.datasets.graph_files.graph_set import OwnedSet, inspect_graph_set
from flower_fgl.datasets.splits.graph_sets import (
    SET_SPLIT,
    client_from_set,
    leaks,
    split_keys,
    split_rule,
    split_set,
)
from flower_fgl.datasets.splits.split import PUBLIC

__all__ = ["each_class", "read_set"]

MAY_LEAK = "may test an item that another owner trains on"


def each_class(target: Target) -> str:
    """Return of what a random split has its shares."""
    return "the items with a known value" if target.has_numbers else "each class"


def read_set(
    path: Path, config: RunConfig
) -> tuple[ClientGraph | None, list[str], list[str]]:
    """Return the client of a set of graphs, the problems of its file, and notes on it."""
    owned, problems = inspect_graph_set(path)
    if owned is None:
        return None, problems, []
    rule = split_rule(owned, config)
    has_own = bool(owned.dataset.masks)
    is_own = config.split == PUBLIC or (
        config.split == "default" and rule == "random" and has_own
    )
    notes = [*owned.notes, *_sizes(owned)]
    if is_own or rule == "random":
        masks, _ = split_set(owned, config)
        notes += [text for text in (leaks(owned, config, masks),) if text]
    if is_own:
        notes.append(f"The split of this file {MAY_LEAK}.")
        return client_from_set(owned, config), [], notes
    share = SET_SPLIT if config.split == "default" else config.split
    if rule == "random":
        keyed = owned
        notes.append(
            f"A random split will be drawn, {share} percent of "
            f"{each_class(owned.dataset.target)}, which {MAY_LEAK}. "
            + (
                "Remove split-by to split by identifiers."
                if owned.keys
                else "Name the items in graph_keys (CSV: key), alike at all owners."
            )
        )
    else:  # the identifiers of molecules take long: they are computed once
        keyed = replace(owned, keys=split_keys(owned, rule), smiles=())
        config = replace(config, split_by="id")
        notes += _repeats(keyed)
        notes.append(
            f'The split follows split-by = "{rule}": about {share} percent of the '
            "identifiers, each in the same part at all owners with the same seed."
        )
        if has_own:
            notes.append(
                f'The split in this file is not used. split = "{PUBLIC}" uses it; it '
                f"{MAY_LEAK}."
            )
    return client_from_set(keyed, config), [], notes


def _sizes(owned: OwnedSet) -> list[str]:
    """Return notes on the sizes of the graphs, and on known labels."""
    dataset = owned.dataset
    number = dataset.num_graphs
    nodes = torch.bincount(dataset.batch, minlength=number)
    of_edge = dataset.batch[dataset.edge_index[0]]
    edges = torch.bincount(of_edge, minlength=number) // 2
    known = int((dataset.y >= 0).sum())
    return [
        f"{number:,} graphs, {known:,} of them with a known {_known_of(dataset)}. "
        "Smallest, median and largest number of nodes: "
        f"{_three(nodes)}; of edges: {_three(edges)}. "
        f"{int((edges == 0).sum()):,} graphs have no edge."
    ]


def _known_of(dataset: GraphDataset) -> str:
    """Return what is known of the graphs; of several targets, how many of each."""
    target, values = dataset.target, dataset.targets
    if values is None:
        return "label"
    is_known = ~values.isnan() if target.has_numbers else values >= 0
    counts = zip(target.names, is_known.sum(dim=0).tolist(), strict=True)
    return f"value ({', '.join(f'{name}: {count:,}' for name, count in counts)})"


def _three(counts: torch.Tensor) -> str:
    """Return minimum, median and maximum for a note."""
    return f"{int(counts.min()):,}, {int(counts.median()):,}, {int(counts.max()):,}"


def _repeats(owned: OwnedSet) -> list[str]:
    """Return a note on identifiers that several graphs have."""
    counts = Counter(owned.keys)
    repeated = {key for key, count in counts.items() if count > 1}
    if not repeated:
        return []
    y, targets = owned.dataset.y, owned.dataset.targets
    rows = (y[:, None] if targets is None else targets).numpy()
    labels = zip(owned.keys, map(bytes, rows), strict=True)
    pairs = {(key, label) for key, label in labels if key in repeated}
    differing = sum(count > 1 for count in Counter(key for key, _ in pairs).values())
    graphs = sum(counts[key] for key in repeated)
    return [
        f"{len(repeated):,} identifiers stand for several graphs, {graphs:,} in all, which "
        f"are in one part of the split and all count; {differing:,} of these identifiers "
        "have different values."
    ]
