"""Typed graphs of several owners: cards that pay at shops of their class."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from flower_fgl.core.schema import Triple
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.transforms.typed import NodeTable, TypedTarget, typed_dataset

PAYS, OWNS = ("card", "pays", "shop"), ("person", "owns", "card")
USED = ("card", "used", "device")


def typed_bank(
    seed: int,
    *,
    has_device: bool = False,
    private: Collection[Triple] = (),
    size: int = 40,
) -> NodeDataset:
    """Return cards, persons and shops, with devices on request."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    y = torch.arange(size) % 2
    shop = torch.arange(8) % 2
    tables = {
        "shop": NodeTable(
            torch.stack([shop, 1 - shop], 1) + 0.3 * draw(8, 2), ("s", "t")
        ),
        "card": NodeTable(draw(size, 3), ("a", "b", "c")),
        "person": NodeTable(draw(10, 1), ("age",)),
    }
    source = torch.arange(size).repeat_interleave(3)
    target = 2 * torch.randint(0, 4, (len(source),), generator=generator) + y[source]
    holder = torch.randint(0, 10, (size,), generator=generator)
    relations = {
        PAYS: torch.stack([source, target]),
        OWNS: torch.stack([holder, torch.arange(size)]),
    }
    if has_device:
        tables["device"] = NodeTable(torch.empty(5, 0))
        used = torch.randint(0, 5, (size,), generator=generator)
        relations[USED] = torch.stack([torch.arange(size), used])
    part = torch.arange(size) % 5
    masks = {"train": part < 3, "val": part == 3, "test": part == 4}
    wanted = TypedTarget(y, Target.classes(("good", "bad")), masks)
    return typed_dataset(
        f"bank{seed}", tables, relations, "card", wanted, frozenset(private)
    )


def client_of(dataset: NodeDataset) -> ClientGraph:
    """Return a dataset as the graph of client 0."""
    graph = Graph(
        dataset.x,
        dataset.edge_index,
        dataset.y,
        dict(dataset.masks),
        messages=dataset.messages,
        node_type=dataset.node_type,
    )
    return ClientGraph(
        0,
        graph,
        dataset.target,
        torch.arange(dataset.num_nodes),
        feature_names=dataset.feature_names,
        schema=dataset.schema,
    )


def typed_owners(folder: Path, *datasets: NodeDataset) -> str:
    """Write one graph file per owner; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, dataset in enumerate(datasets):
        save_client_graph(folder / f"bank{number}.npz", client_of(dataset))
    return str(folder)
