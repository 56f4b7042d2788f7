"""Natural owners: one client per graph file or dataset, the setting ``owners``.

Each owner's graph is built as in a deployment, see ``owned.py``. Then all owners agree on
features and classes by name, with the checks of ``strategies/rounds/candidates.py``.
"""

import hashlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flower_fgl.core.agreement import (
    NOT_PREPARED,
    agree_classes,
    classes_apart,
    differing_names,
    differing_recipes,
    differing_schemas,
    odd_spellings,
    whole_recipe,
)
from flower_fgl.core.atomic import cache_folder, data_folder
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError, clip, show_path
from flower_fgl.core.held_kind import (
    EDGES,
    GRAPHS,
    NODES,
    RELATIONS,
    find_owner,
    is_owner,
    name_of_file,
    owners_in,
)
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import TARGETS, listed_names, needs_classes
from flower_fgl.core.targets import CLASSES, agree_targets, targets_apart
from flower_fgl.datasets.build import check_task, default_split, hash_tensors
from flower_fgl.datasets.client_graph import ClientGraph, NodeDataset
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile
from flower_fgl.datasets.graph_files.graph_set import OwnedSet, load_graph_set
from flower_fgl.datasets.graph_files.npz import read_bytes
from flower_fgl.datasets.graph_files.typed_csv import folder_tables
from flower_fgl.datasets.owned import client_from_owned, read_owned
from flower_fgl.datasets.sources.load import find_source, load
from flower_fgl.datasets.splits.edges import require_pairs
from flower_fgl.datasets.splits.graph_sets import (
    PartKeys,
    client_from_set,
    leaks,
    part_keys,
    split_set,
)
from flower_fgl.datasets.transforms.messages import expect_target
from flower_fgl.datasets.transforms.normalize_features import order_columns
from flower_fgl.datasets.transforms.typed import told_parts

__all__ = ["Owner", "absolute_owners", "build_owners", "list_owners", "owner_contents"]

log = logging.getLogger(__name__)
MAX_NAME = 300
"""Characters of an owner's name, as in a deployment."""


@dataclass(frozen=True)
class Owner:
    """A graph file, CSV folder or dataset, under its name in tables and reports."""

    name: str
    source: Path | str


def list_owners(config: RunConfig) -> list[Owner]:
    """List the owners by partition-id, without reading their graphs.

    These are the files of a folder by name, or the entries of a list in their order, but
    not those that ``without-owners`` names. Relative paths are also looked up in
    ``data-dir``.
    """
    path = _find(config.owners, config)
    if path is not None and os.path.isdir(path):
        owners = list(_owners_of_folder(path))
    else:
        owners = [_owner_of_entry(part, config) for part in listed_names(config.owners)]
    counts = Counter(owner.name for owner in owners)
    if len(counts) < len(owners):
        twice = next(name for name, count in counts.items() if count > 1)
        places = [show_path(str(o.source)) for o in owners if o.name == twice]
        raise DataError(
            f'Two owners have the name "{twice}": {" and ".join(places)}. Rename one of '
            "them: the name of an owner is the name of its file without .npz, or of its "
            "dataset."
        )
    left_out = listed_names(config.without_owners)
    for name in left_out:
        if name not in counts:
            raise ConfigError(
                f'without-owners names "{name}", but owners has no owner of this name. '
                f"{nearest(name, counts)}"
            )
    if not counts.keys() - set(left_out):
        raise ConfigError("without-owners leaves no owner. Remove a name.")
    return [owner for owner in owners if owner.name not in left_out]


def absolute_owners(owners: str, config: RunConfig) -> str:
    """Return ``owners`` with absolute paths, for processes in other working folders."""
    whole = _find(owners, config)
    if whole is not None:
        return str(whole.resolve())
    parts = [(part, _find(part, config)) for part in listed_names(owners)]
    return ",".join(
        part if path is None else str(path.resolve()) for part, path in parts
    )


def _find(text: str, config: RunConfig) -> Path | None:
    """Return an existing path, in the working folder or in the data folder."""
    return find_owner(text, None) or find_owner(text, data_folder(config.data_dir))


def _owners_of_folder(folder: Path) -> Iterator[Owner]:
    """Yield the graph files and CSV folders in a folder, sorted by name."""
    where = show_path(folder)
    if is_owner(folder):
        raise DataError(
            f"{where} is the graph of one owner ({NODES} and {EDGES}, or {RELATIONS}), or "
            f"its set of graphs ({GRAPHS}). owners needs the folder that holds the graphs "
            "of all owners."
        )
    found = [Owner(clip(name_of_file(p), MAX_NAME), p) for p in owners_in(folder)]
    if not found:
        raise DataError(
            f"{where} holds no graph file: owners needs a folder with one .npz file, or "
            f"one folder with {NODES} and {EDGES}, {GRAPHS} or {RELATIONS}, per owner. "
            "docs/deployment.md describes the files."
        )
    yield from sorted(found, key=lambda owner: (owner.name, str(owner.source)))


def _owner_of_entry(text: str, config: RunConfig) -> Owner:
    """Return the owner of one entry of a list."""
    path = _find(text, config)
    if path is not None:
        if os.path.isdir(path) and not is_owner(path):
            raise DataError(
                f"owners lists {show_path(path)}, a folder without {NODES}, {GRAPHS} or "
                f"{RELATIONS}. A list holds datasets and graph files; give a folder of "
                "graph files alone."
            )
        return Owner(clip(name_of_file(path)), path)
    if "/" in text or text.endswith(".npz"):
        raise DataError(
            f"owners names {show_path(text)}, which exists neither in the working folder "
            "nor in data-dir. Check the path."
        )
    try:
        find_source(text)
    except ConfigError as error:
        raise ConfigError(
            f"owners names {clip(text)}, which is neither a folder or graph file in the "
            f"working folder or data-dir, nor a dataset. {error}"
        ) from error
    if text in TARGETS and needs_classes(config):
        raise ConfigError(
            f"owners lists {text}, whose items may have several labels at once: owners "
            "takes datasets with one label. Remove it, or use it alone, with dataset and "
            "target."
        )
    return Owner(text.rpartition(":")[2], text)


def owner_contents(config: RunConfig) -> list[list[Any]]:
    """Return name and content, or dataset and version, of all owners, for a key."""
    out: list[list[Any]] = []
    for owner in list_owners(config):
        if isinstance(owner.source, str):
            version = find_source(owner.source).version
            out.append([owner.name, owner.source, version])
            continue
        try:
            out.append([owner.name, file_contents(owner.source)])
        except DataError:  # an unreadable file is reported when it is built, by name
            out.append([owner.name, "unreadable"])
    return out


def file_contents(path: Path) -> list[Any]:
    """Return the SHA-256 of a graph file; of a folder, [name, SHA-256] of each table."""
    if not os.path.isdir(path):
        return [hashlib.sha256(read_bytes(path)).hexdigest()]
    return [
        [str(table.relative_to(path)), hashlib.sha256(read_bytes(table)).hexdigest()]
        for table in folder_tables(path)
    ]


def build_owners(config: RunConfig) -> tuple[list[ClientGraph], str, int]:
    """Read all owners' graphs and agree on their features and classes.

    The SHA-256 of names, edges, labels and splits follows, and the number of undirected
    edges of all owners, before ``setting`` hides any. One error names all owners whose
    graphs cannot be used.
    """
    owners = list_owners(config)
    clients, problems, edges = [], [], 0
    keys: dict[str, PartKeys] = {}
    for owner in owners:
        try:
            client, held = _client(owner, config, keys)
            clients.append(replace(client, name=owner.name))
            edges += held
        except DataError as error:
            problems.append((owner.name, str(error)))
    _refuse(problems, len(owners))
    holders = Counter(itertools.chain.from_iterable(k.train for k in keys.values()))
    for name, own in keys.items():
        if warning := leaks(own, holders):
            log.warning("%s: %s", name, warning)
    clients = _agree_on_features(clients, config)
    names = None if config.has_local_heads else _agree_on_classes(clients, config)
    clients = [
        client.renumbered(number, names or client.target.names)
        for number, client in enumerate(clients)
    ]
    if config.has_pairs:
        require_pairs(clients, config)
    return clients, _sha256(clients), edges


def _refuse(problems: Collection[tuple[str, str]], num_owners: int) -> None:
    """Raise an error with the names and problems of some owners, if there are any."""
    if problems:
        listed = "\n".join(f"{name}: {problem}" for name, problem in problems)
        raise DataError(
            f"{len(problems)} of {num_owners} owners cannot be used. {listed}"
        )


def _client(
    owner: Owner, config: RunConfig, keys: dict[str, PartKeys]
) -> tuple[ClientGraph, int]:
    """Build the graph of one owner, and count its edges; add keys of a set of graphs."""
    if isinstance(owner.source, Path):
        if config.classifies_graphs:
            owned = load_graph_set(owner.source, target_kind=config.target_kind)
            client = client_from_set(owned, config)
            chosen = expect_target(owned.dataset, config, owner.name)
            owned = replace(owned, dataset=chosen)
            masks, _ = split_set(owned, config)
            keys[owner.name] = part_keys(owned, config, masks)
            return client, client.num_edges
        return _owned_client(read_owned(owner.source, config), config)
    check_task(replace(config, dataset=owner.source))
    dataset = load(
        owner.source,
        data_dir=data_folder(config.data_dir),
        cache_dir=cache_folder(),
        kind=config.predicts,
    )
    if isinstance(dataset, NodeDataset):
        ids = torch.arange(dataset.num_nodes)
        return _owned_client(LocalGraphFile(dataset, ids), config)
    dataset = expect_target(dataset, config, owner.source)
    split = default_split(replace(config, dataset=owner.source), {})
    if split == "public":
        raise ConfigError(f'{owner.source} has no published split: split = "public".')
    owned = OwnedSet(dataset, tuple(map(str, range(dataset.num_graphs))))
    config = replace(config, split=split)
    client = client_from_set(owned, config, is_published=True)
    return client, client.num_edges


def _owned_client(owned: LocalGraphFile, config: RunConfig) -> tuple[ClientGraph, int]:
    """Apply the settings to an owner's graph; count its undirected edges."""
    later = [g for g in owned.evaluation if {"train", "val", "test"} & set(g.masks)]
    found = [owned.dataset.edge_index, *(g.edge_index for g in later)]
    edges = sum(edge_index.shape[1] // 2 for edge_index in found)
    return client_from_owned(owned, config), edges


def _agree_on_classes(
    clients: Sequence[ClientGraph], config: RunConfig
) -> tuple[str, ...]:
    """Return one order of all classes, labels or numbers; reject other spellings."""
    targets = {client.name: client.target for client in clients}
    lists = {name: target.names for name, target in targets.items()}
    odd: dict[str, str] = {}
    if config.predicts == CLASSES:
        agreed = agree_classes(list(lists.values()))
        reason, warnings = classes_apart(lists)
        if config.setting == "few-shot":  # it needs no common class
            reason = ""
        reason = reason and f'{reason}, or set class-align = "local".'
    else:
        common, odd = agree_targets(targets)
        agreed = common.names
        reason, warnings = targets_apart(targets)
    odd |= odd_spellings(lists, is_trusted=True, noun=clients[0].target.noun)
    _refuse(odd.items(), len(clients))
    if reason:
        raise DataError(reason)
    for warning in warnings:
        log.warning("%s", warning)
    return agreed


def _agree_on_schema(
    clients: Sequence[ClientGraph], config: RunConfig
) -> list[ClientGraph]:
    """Reject typed graphs whose kinds or relations do not fit; else return all."""
    align = config.schema_align
    told = {
        client.name: told_parts(client, align) if client.schema else None
        for client in clients
    }
    _refuse(differing_schemas(told, align).items(), len(clients))
    if text := _differing([(c.name, c.num_edge_features) for c in clients]):
        raise DataError(
            f"The edges of the owners have different numbers of features ({text}). Give "
            "the table of the predicted relation the same columns at all owners."
        )
    if align == "same":
        _refuse(_other_recipes(clients), len(clients))
    return list(clients)


def _agree_on_features(
    clients: Sequence[ClientGraph], config: RunConfig
) -> list[ClientGraph]:
    """Put the features of all owners into one order, by name; reject other features."""
    if any(client.schema for client in clients):
        return _agree_on_schema(clients, config)
    if config.feature_align == "project" and not config.classifies_edges:
        return list(clients)  # the layers that read features stay local
    of_edges = {c.name: c.feature_names[c.num_features :] for c in clients}
    if text := _differing([(c.name, c.num_edge_features) for c in clients]):
        if all(of_edges.values()):
            _refuse(_names_of_most(of_edges, "features of edges")[1], len(clients))
        raise DataError(
            f"The edges of the owners have different numbers of features ({text}). Give "
            "edges.csv the same columns at all owners."
        )
    if config.feature_align == "project":  # only the layers of nodes stay local
        agreed, wrong = _names_of_most(of_edges, "features of edges")
        _refuse(wrong, len(clients))
        return [
            order_columns(c, (*c.feature_names[: c.num_features], *agreed))
            if of_edges[c.name]
            else c
            for c in clients
        ]
    if text := _differing([(c.name, c.num_features) for c in clients]):
        raise DataError(
            f"The data owners' graphs have different feature widths ({text}). Agree on "
            "the features, and check every file with flower-fgl check-graph; or set "
            'feature-align = "project", which leaves the first layer of each owner local.'
        )
    named = [client for client in clients if client.feature_names]
    if 0 < len(named) < len(clients) or (not named and clients[0].num_features):
        unnamed = [client.name for client in clients if not client.feature_names]
        log.warning(
            "The graphs of %s have no names of their features: the order of their columns "
            "is not checked.",
            ", ".join(unnamed),
        )
    if not named:
        return list(clients)
    agreed, wrong = _names_of_most({c.name: c.feature_names for c in named}, "features")
    _refuse(wrong + _other_recipes(named), len(clients))
    return [order_columns(client, agreed) for client in clients]


def _other_recipes(clients: Sequence[ClientGraph]) -> list[tuple[str, str]]:
    """Say who prepared its graph in another way than most; warn of others."""
    recipes = {c.name: whole_recipe(c.prepared) for c in clients if c.prepared}
    if 0 < len(recipes) < len(clients):
        log.warning(NOT_PREPARED, ", ".join(c.name for c in clients if not c.prepared))
    most = [recipe for recipe, _ in Counter(recipes.values()).most_common(1)]
    wrong = [(name, differing_recipes(recipes[name], *most)) for name in recipes]
    return [(name, text) for name, text in wrong if text]


def _differing(widths: Sequence[tuple[str, int]]) -> str:
    """List owners with numbers of features; empty if these are equal."""
    if len({width for _, width in widths}) < 2:
        return ""
    return ", ".join(f"{name}: {width}" for name, width in widths)


def _names_of_most(
    held: Mapping[str, tuple[str, ...]], what: str
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Return the names that most owners have, in the first one's order, and who differs."""
    named = {owner: names for owner, names in held.items() if names}
    sets = Counter(frozenset(names) for names in named.values())
    most = [names for names, _ in sets.most_common(1)]
    agreed = next((names for names in named.values() if frozenset(names) in most), ())
    differing = {
        owner: differing_names(names, agreed) for owner, names in named.items()
    }
    return agreed, [
        (owner, f"its {what} differ from those of the other clients: {text}.")
        for owner, text in differing.items()
        if text
    ]


def _sha256(clients: Sequence[ClientGraph]) -> str:
    """Hash names, edges, labels and masks of all clients, in their order."""
    digest = hashlib.sha256()
    for client in clients:
        digest.update(f"{len(client.name)} {client.name}".encode())
        for graph in client.graphs:
            parts: dict[str, torch.Tensor | None] = {
                "edges": graph.edge_index,
                "labels": graph.y,
                **dict(sorted(graph.masks.items())),
                "targets": graph.targets,
                "pairs": graph.pairs,
                "pair_x": graph.pair_x,
            }
            if (messages := graph.messages) is not None:
                parts |= {"index": messages.index, "edge_x": messages.x}
            hash_tensors(digest, parts)
    return digest.hexdigest()
