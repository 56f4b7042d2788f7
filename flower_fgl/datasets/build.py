"""Build the clients' graphs from a dataset and settings: load, partition, split."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.atomic import cache_folder, data_folder
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.core.settings import has_targets, is_file, needs_classes
from flower_fgl.core.targets import CLASSES
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    GraphDataset,
    NodeDataset,
    OutsideEdges,
    numbered_within,
)
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.graph_files.graph_set import OwnedSet, load_graph_set
from flower_fgl.datasets.partition.assign import MIN_CLIENT_SIZE
from flower_fgl.datasets.partition.partition import (
    EDGE_RULES,
    IntArray,
    partition_edges,
    partition_graphs,
    partition_nodes,
    partition_sha256,
)
from flower_fgl.datasets.sources.load import find_source, load
from flower_fgl.datasets.sources.synthetic import (
    synthetic_dataset,
    with_kinds,
    with_numbers,
)
from flower_fgl.datasets.splits.edges import (
    edge_client,
    require_pairs,
    with_edge_classes,
)
from flower_fgl.datasets.splits.graph_sets import (
    SET_SPLIT,
    cut_graph_clients,
    replaces_split,
    split_rule,
    split_set,
    with_degrees,
)
from flower_fgl.datasets.splits.links import link_client, links_sha256
from flower_fgl.datasets.splits.split import (
    SPLITS,
    draw_few_shot,
    draw_split,
    few_shot_labels,
    parse_split,
    published_split,
    strata,
)
from flower_fgl.datasets.splits.unseen import (
    UNSEEN_SPLIT,
    cut_unseen_clients,
    expansion_hops,
    partition_unseen,
)
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.datasets.transforms.messages import (
    choose_messages,
    expect_predicted,
    expect_target,
    finish_messages,
)
from flower_fgl.datasets.transforms.normalize_features import can_standardize, scale_raw
from flower_fgl.datasets.transforms.subgraph import (
    Sparsity,
    cut_clients,
    induced_graph,
    inductive_graphs,
    largest_dataset,
    sparsify,
    sparsity_sha256,
)

__all__ = ["FILE_SPLIT", "build_clients", "check_task", "in_setting", "load_dataset"]
__all__ += ["reading_options"]

NODE_SETTINGS = '"transductive" or another node setting'
VALIDATION = 0.2
"""Share of published training nodes for validation, if no validation is published."""
DIRICHLET_BINS = 10
"""Bins of a number that stand for classes in a partition by ``dirichlet``."""
FILE_SPLIT = "20/40/40"
"""Default split of a graph file without masks."""


def load_dataset(config: RunConfig) -> NodeDataset | GraphDataset | OwnedSet:
    """Load the dataset named in the settings."""
    check_task(config)
    if config.dataset == "synthetic":
        made = synthetic_dataset(config.synthetic, config.partition_seed)
        if config.classifies_edges:
            made = with_edge_classes(made)
        elif config.predicts_numbers:
            made = with_numbers(made, config.partition_seed)
        if config.reads_types:
            made = with_kinds(made, config.partition_seed)
        return expect_predicted(made, config, config.dataset)
    if is_file(config.dataset) and config.classifies_graphs:
        owned_set = load_graph_set(config.dataset, target_kind=config.target_kind)
        graphs = expect_target(owned_set.dataset, config, config.dataset)
        return replace(owned_set, dataset=graphs)
    if is_file(config.dataset):
        options = reading_options(config) | {"needs_labels": needs_classes(config)}
        owned = load_graph_file(config.dataset, **options)
        if owned.evaluation:
            raise DataError(
                f"{config.dataset} holds one client's part of a dataset: it contains "
                "evaluation graphs, which cannot be partitioned again. Use it as a "
                "SuperNode's graph (graph=...), or export it in the transductive setting."
            )
        return expect_predicted(owned.dataset, config, config.dataset)
    dataset = load(
        config.dataset,
        data_dir=data_folder(config.data_dir),
        cache_dir=cache_folder(),
        target=config.target if has_targets(config) else "",
        kind=config.predicts,
    )
    return expect_predicted(dataset, config, config.dataset)


def reading_options(config: RunConfig) -> dict[str, Any]:
    """Return the options of :class:`.Wanted` with which a run reads an owner's graph."""
    return {
        "needs_labels": not config.has_pairs,
        # links need none of the columns, so there is nothing to choose
        "target_kind": CLASSES if config.predicts_links else config.target_kind,
        "target_node": config.target_node,
        "target_relation": config.target_relation,
    }


def check_task(config: RunConfig) -> None:
    """Reject a setting whose task differs from the task of the dataset."""
    if is_file(config.dataset):
        return  # its reader rejects another setting
    has_graphs = find_source(config.dataset).task == "graph"
    if has_graphs == config.classifies_graphs:
        return
    kind, need, other = (
        ("a set of graphs for graph classification", '"graph"', "node")
        if has_graphs
        else ("one graph for node classification", NODE_SETTINGS, "graph")
    )
    raise ConfigError(
        f"{config.dataset} is {kind}: it needs setting = {need}, got setting = "
        f'"{config.setting}". flower-fgl datasets lists datasets of task "{other}".'
    )


def default_split(config: RunConfig, masks: Mapping[str, Tensor]) -> str:
    """Resolve ``split = "default"``; ``masks`` are the published masks."""
    if config.split != "default":
        return config.split
    if config.has_unseen:
        return UNSEEN_SPLIT
    if is_file(config.dataset):
        default = SET_SPLIT if config.classifies_graphs else FILE_SPLIT
        return "public" if masks else default
    return find_source(config.dataset).split


def build_clients(
    config: RunConfig, num_clients: int
) -> tuple[list[ClientGraph], str, int]:
    """Load a dataset, partition and split it, and build the graphs of K clients.

    The SHA-256 of the partition, its sparsity, its few-shot sample and its target follows,
    of a user's own data also that of labels and split, and the number of undirected edges
    of the partitioned graph, or of all graphs.
    """
    dataset = load_dataset(config)
    if isinstance(dataset, OwnedSet):
        owned, dataset = dataset, dataset.dataset
        if split_rule(owned, config) != "random":  # all clients split alike
            masks, drawn_from = split_set(owned, config)
            replaces_split(dataset, drawn_from)  # the log warns of it
            dataset = replace(dataset, masks=masks)
            config = replace(config, split="public", split_by="auto")
    shared: list[IntArray] | None = None
    if isinstance(dataset, NodeDataset) and config.partition in EDGE_RULES:
        if config.needs_cross_edges:
            raise ConfigError(
                f"{config.method} sends what passes along edges between clients, but with "
                f'partition = "{config.partition}" clients share their nodes. Use '
                'partition = "metis".'
            )
        shared = partition_edges(
            dataset, config.partition, num_clients, seed=config.partition_seed
        )
    listed = dataset.messages
    of_file = is_file(config.dataset)
    is_published = not of_file and not find_source(config.dataset).loader
    dataset = choose_messages(dataset, config, is_published=is_published)
    if isinstance(dataset, GraphDataset):
        clients, sha256, edges = _build_graphs(dataset, config, num_clients)
    elif shared is not None and listed is not None:
        clients, sha256, edges = _build_sharing(dataset, listed.index, shared, config)
    elif config.has_unseen:
        clients, sha256, edges = _build_unseen(dataset, config, num_clients)
    else:
        clients, sha256, edges = _build_nodes(dataset, config, num_clients)
    has_nodes = isinstance(dataset, NodeDataset) and not config.has_pairs
    if has_nodes and num_clients > 1:
        _check_targets(clients, config)
    if config.has_pairs:
        require_pairs(clients, config)
        sha256 = links_sha256(sha256, clients)
    if has_targets(config) or config.predicts_numbers:
        sha256 = hashlib.sha256(f"{sha256} target={config.target}".encode()).hexdigest()
    if not is_published:  # it may be written anew with another split
        sha256 = _scored_sha256(sha256, clients)
    is_dense = can_standardize(dataset.x)
    clients = [scale_raw(client, config, is_dense=is_dense) for client in clients]
    return clients, sha256, edges


def _scored_sha256(partition: str, clients: Sequence[ClientGraph]) -> str:
    """Hash the SHA-256 of a partition, and what its clients train on and score."""
    digest = hashlib.sha256(partition.encode())
    for graph in (g for client in clients for g in client.graphs):
        masks = dict(sorted(graph.masks.items()))
        hash_tensors(digest, {"y": graph.y, "targets": graph.targets, **masks})
    return digest.hexdigest()


def hash_tensors(digest: Any, tensors: Mapping[str, Tensor | None]) -> None:
    """Add tensors with their names and shapes to a hash of :mod:`hashlib`."""
    for name, tensor in tensors.items():
        if tensor is not None:
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())


def _build_graphs(
    dataset: GraphDataset, config: RunConfig, num_clients: int
) -> tuple[list[ClientGraph], str, int]:
    """Partition and split the graphs of a graph classification dataset."""
    if config.graph_features == "degree":
        dataset = with_degrees(dataset, config.max_degree)
    parts = partition_graphs(
        _order(dataset, config),
        config.partition,
        num_clients,
        seed=config.partition_seed,
        alpha=config.dirichlet_alpha,
    )
    masks = _split_clients(dataset, parts, config)
    clients = cut_graph_clients(dataset, parts, masks)
    clients = [finish_messages(client, config) for client in clients]
    return clients, partition_sha256(parts), dataset.edge_index.shape[1] // 2


def _order(dataset: NodeDataset | GraphDataset, config: RunConfig) -> Tensor:
    """Return what the rule of the partition reads: classes, or bins of a number."""
    if dataset.targets is None or config.partition not in ("dirichlet", "quantile"):
        return dataset.y
    bins = DIRICHLET_BINS if config.partition == "dirichlet" else len(dataset.y)
    return strata(dataset.y, dataset.targets, bins)


def _build_nodes(
    dataset: NodeDataset, config: RunConfig, num_clients: int
) -> tuple[list[ClientGraph], str, int]:
    """Partition and split the nodes of a graph."""
    parts = partition_nodes(
        replace(dataset, y=_order(dataset, config)),
        config.partition,
        num_clients,
        seed=config.partition_seed,
        alpha=config.dirichlet_alpha,
    )
    hashed = parts
    if config.classifies_edges:
        none = [torch.zeros(len(part), dtype=torch.bool) for part in parts]
        masks = [dict.fromkeys(SPLITS, mask) for mask in none]
    elif config.setting == "few-shot":
        masks = [
            draw_few_shot(
                dataset.y[torch.from_numpy(part)],
                dataset.target.width,
                config.shots,
                has_networks=dataset.network is not None,
                seed=config.partition_seed,
                partition_id=partition_id,
            )
            for partition_id, part in enumerate(parts)
        ]
        sampled = [mask[name] for mask in masks for name in ("train", "test")]
        hashed = [*parts, *(mask.nonzero().flatten().numpy() for mask in sampled)]
    else:
        masks = _split_clients(dataset, parts, config)
    clients = _node_clients(dataset, parts, masks, config)
    sha256 = sparsity_sha256(partition_sha256(hashed), Sparsity.of(config))
    return clients, sha256, dataset.edge_index.shape[1] // 2


def _build_sharing(
    dataset: NodeDataset,
    index: Tensor,
    parts: Sequence[IntArray],
    config: RunConfig,
) -> tuple[list[ClientGraph], str, int]:
    """Split a typed graph, and give each client its edges (2, M) and their ends."""
    # all nodes at once, so that one that several clients hold has one role
    published = _with_validation(dataset.masks, config.partition_seed)
    everyone = [np.arange(dataset.num_nodes)]
    (split,) = _split_clients(replace(dataset, masks=published), everyone, config)
    clients = []
    for partition_id, part in enumerate(parts):
        edges = torch.from_numpy(part)
        nodes = torch.unique(index[:, edges])
        own = numbered_within(index[:, edges], nodes, dataset.num_nodes)
        graph = induced_graph(
            replace(dataset, messages=None),
            nodes,
            undirected_simple(own, len(nodes)),
            {name: mask[nodes] for name, mask in split.items()},
        )
        if dataset.messages is not None:  # in the order of ``index``
            chosen = torch.zeros(index.shape[1], dtype=torch.bool)
            chosen[edges] = True
            held = replace(dataset.messages.select(chosen), index=own)
            graph = replace(graph, messages=held)
        client = dataset.client_of(graph, partition_id=partition_id, node_ids=nodes)
        clients.append(in_setting(client, config))
    return clients, partition_sha256(parts), dataset.edge_index.shape[1] // 2


def _with_validation(masks: Mapping[str, Tensor], seed: int) -> Mapping[str, Tensor]:
    """Return a published split; a fifth of training is for validation if it has none."""
    if "train" not in masks or ("val" in masks and bool(masks["val"].any())):
        return masks
    train = masks["train"].nonzero().flatten().numpy()
    generator = numpy_generator(seed, 0, SERVER, "validation")
    taken = generator.permutation(train)[: round(VALIDATION * len(train))]
    val = torch.zeros_like(masks["train"])
    val[torch.from_numpy(taken)] = True
    return {**masks, "train": masks["train"] & ~val, "val": val}


def _check_targets(clients: Sequence[ClientGraph], config: RunConfig) -> None:
    """Reject a partition of a typed graph with too few nodes to predict at a client."""
    for client in clients:
        schema = client.schema
        if schema is None:
            continue
        # in the inductive setting each graph has other target nodes
        held = sum(replace(client, graph=graph).num_items for graph in client.graphs)
        if held < MIN_CLIENT_SIZE:
            raise DataError(
                f'The rule "{config.partition}" assigns client {client.partition_id} '
                f"{held} target nodes (of the kind {schema.target}), and each client needs "
                f"at least {MIN_CLIENT_SIZE}. Use fewer clients or another rule."
            )


def _build_unseen(
    dataset: NodeDataset, config: RunConfig, num_clients: int
) -> tuple[list[ClientGraph], str, int]:
    """Build clients that are evaluated on unseen nodes, see ``splits/unseen.py``."""
    component, node_ids = largest_dataset(dataset)
    partition = partition_unseen(
        component,
        num_clients,
        is_open=config.setting == "open-set",
        hops=expansion_hops(config.dataset, config.expansion_hops),
        seed=config.partition_seed,
    )
    # one class: the split is not per class
    at_random = replace(component, y=component.y.clamp(max=0))
    nodes = [part.nodes for part in partition.parts]
    masks = _split_clients(at_random, nodes, config)
    clients = cut_unseen_clients(component, node_ids, partition, masks)
    clients = [finish_messages(client, config) for client in clients]
    in_source = [node_ids.numpy()[array] for array in partition.arrays]
    return clients, partition_sha256(in_source), component.edge_index.shape[1] // 2


def _split_clients(
    dataset: NodeDataset | GraphDataset, parts: Sequence[IntArray], config: RunConfig
) -> list[dict[str, Tensor]]:
    """Split each client's nodes (or graphs) into train, val and test."""
    published, is_keyed = dataset.masks, config.split_by == "id"
    seed = config.partition_seed
    fractions = parse_split(default_split(config, {} if is_keyed else published))
    if is_keyed and fractions is None:  # the default of the dataset is published
        fractions = parse_split(FILE_SPLIT)
    masks = []
    for number, part in enumerate(parts):
        items, targets = torch.from_numpy(part), dataset.targets
        y = dataset.y[items]
        if fractions is None:
            masks.append(published_split(published, part))
        else:
            own = None if targets is None else targets[items]
            keys = map(str, part.tolist()) if is_keyed else None
            drawn = draw_split(
                y, own, fractions, seed=seed, partition_id=number, keys=keys
            )
            masks.append(drawn)
    return masks


def _node_clients(
    dataset: NodeDataset,
    parts: Sequence[IntArray],
    masks: Sequence[Mapping[str, Tensor]],
    config: RunConfig,
) -> list[ClientGraph]:
    """Build each client's induced subgraph, and apply sparsity and setting."""
    sparsity = Sparsity.of(config)
    pieces = cut_clients(dataset.edge_index, dataset.num_nodes, parts)
    between: list[Tensor] = []
    if config.needs_cross_edges:
        whole = (dataset.edge_index, dataset.num_nodes)
        between = cut_clients(*whole, parts, are_inside=False)
    clients = []
    for partition_id, (part, edge_index) in enumerate(zip(parts, pieces, strict=True)):
        nodes = torch.from_numpy(part)
        graph = induced_graph(dataset, nodes, edge_index, masks[partition_id])
        graph = sparsify(
            graph, sparsity, seed=config.partition_seed, partition_id=partition_id
        )
        client = dataset.client_of(
            graph,
            partition_id=partition_id,
            node_ids=nodes,
            edges=dataset.edges and dataset.edges.within(nodes, dataset.num_nodes),
        )
        if between:
            own, other = between[partition_id]
            client = replace(client, outside=OutsideEdges(own, other, nodes))
        clients.append(in_setting(client, config))
    return clients


def in_setting(
    client: ClientGraph, config: RunConfig, ids: Sequence[str] = ()
) -> ClientGraph:
    """Apply ``setting``: restrict the part of its graph a client sees in training.

    ``ids`` (N,) are the identifiers of its nodes, by default their numbers as text.
    """
    if config.has_pairs and config.split_by == "id":
        ids = ids or [str(number) for number in client.node_ids.tolist()]
    if config.predicts_links:
        client = link_client(client, config, ids)
    elif config.classifies_edges:
        client = edge_client(client, config, ids)
    elif config.setting == "few-shot":
        graph = client.graph
        client = replace(client, graph=replace(graph, y=few_shot_labels(graph)))
    elif config.setting == "inductive":
        schema = client.schema
        target = 0 if schema is None else schema.node_types.index(schema.target)
        (train, *later), nodes = inductive_graphs(client.graph, target)
        client = replace(
            client,
            graph=train,
            node_ids=client.node_ids[nodes],
            evaluation=tuple(later),
        )
    return finish_messages(client, config)
