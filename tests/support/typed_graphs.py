"""Typed graphs of several owners: cards that pay at shops of their class."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

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


def write_tables(folder: Path, tables: Mapping[str, str]) -> Path:
    """Write text tables by their path in a folder."""
    for name, text in tables.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def typed_tables(seed: int, *, has_device: bool = False) -> dict[str, str]:
    """Return the tables of :func:`typed_bank`, with its numbers to 6 decimals."""
    bank = typed_bank(seed, has_device=has_device)
    assert bank.schema is not None
    assert bank.node_type is not None
    assert bank.messages is not None
    assert bank.messages.relation is not None
    blocks, out = dict(bank.schema.blocks()), {}
    ids = [""] * bank.num_nodes
    for number, kind in enumerate(bank.schema.node_types):
        rows = (bank.node_type == number).nonzero().flatten().tolist()
        columns = bank.feature_names[blocks[kind]]
        header = ["id", *(name.partition(".")[2] for name in columns)]
        lines = []
        for place, row in enumerate(rows):
            ids[row] = f"{kind}-{place}"
            cells = [f"{v:.6f}" for v in bank.x[row, blocks[kind]].tolist()]
            if kind == "card":
                part = next(p for p, mask in bank.masks.items() if bool(mask[row]))
                cells += [bank.class_names[int(bank.y[row])], part]
            lines.append(",".join([ids[row], *cells]))
        header += ["label", "split"] if kind == "card" else []
        out[f"nodes/{kind}.csv"] = "\n".join([",".join(header), *lines, ""])
    listed = ["relation,source,target"]
    for number, (source, name, target) in enumerate(bank.schema.relations):
        listed.append(f"{name},{source},{target}")
        edges = bank.messages.index[:, bank.messages.relation == number].T.tolist()
        lines = [f"{ids[a]},{ids[b]}" for a, b in edges]
        out[f"edges/{name}.csv"] = "\n".join(["source,target", *lines, ""])
    out["relations.csv"] = "\n".join([*listed, ""])
    return out


def airline(
    seed: int, *, has_time: bool = False, shift: float = 0.0, columns: str = "a,b"
) -> dict[str, str]:
    """Return airports, planes and flights; whether one is a codeshare is a feature's sign.

    The feature ``a`` of a flight, plus ``shift``, tells the class.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ports = [f"{i},{v:.4f},{w:.4f}" for i, (v, w) in enumerate(draw(30, 2).tolist())]
    planes = [f"{i},{v:.4f}" for i, (v,) in enumerate(draw(6, 1).tolist())]
    ends = torch.randint(0, 30, (200, 2), generator=generator)
    values = draw(200, 2)
    flights = []
    for place, ((source, target), (a, b)) in enumerate(
        zip(ends.tolist(), values.tolist(), strict=True)
    ):
        name = "codeshare" if a + shift > 0 else "own"
        name = "" if place % 20 == 7 else name
        found = {"a": f"{a:.4f}", "b": f"{b:.4f}"}
        cells = [
            str(source),
            str(target),
            name,
            *(found[c] for c in columns.split(",")),
        ]
        flights.append(",".join(cells + [str(place)] * has_time))
    serves = [
        f"{plane},{port}"
        for plane, port in torch.unique(
            torch.stack(
                [
                    torch.randint(0, 6, (60,), generator=generator),
                    torch.randint(0, 30, (60,), generator=generator),
                ]
            ),
            dim=1,
        ).T.tolist()
    ]
    header = f"source,target,label,{columns}" + ",time" * has_time
    return {
        "relations.csv": (
            "relation,source,target\nflies,airport,airport\nserves,plane,airport\n"
        ),
        "nodes/airport.csv": "\n".join(["id,x,y", *ports, ""]),
        "nodes/plane.csv": "\n".join(["id,seats", *planes, ""]),
        "edges/flies.csv": "\n".join([header, *flights, ""]),
        "edges/serves.csv": "\n".join(["source,target", *serves, ""]),
    }


def hetero(dataset: NodeDataset) -> HeteroData:
    """Return a typed graph as a ``HeteroData``."""
    assert dataset.schema is not None
    assert dataset.node_type is not None
    assert dataset.messages is not None
    data, first = HeteroData(), dict[str, int]()
    for number, (kind, columns) in enumerate(dataset.schema.blocks()):
        rows = (dataset.node_type == number).nonzero().flatten()
        first[kind] = int(rows[0])
        data[kind].num_nodes = len(rows)
        if columns.stop > columns.start:
            data[kind].x = dataset.x[rows][:, columns]
        if kind == dataset.schema.target:
            data[kind].y = dataset.y[rows]
            for name, mask in dataset.masks.items():
                data[kind][f"{name}_mask"] = mask[rows]
    for number, triple in enumerate(dataset.schema.relations):
        edges = dataset.messages.index[:, dataset.messages.relation == number]
        start = torch.tensor([[first[triple[0]]], [first[triple[2]]]])
        data[triple].edge_index = edges - start
    return data
