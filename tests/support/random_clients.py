"""Clients with random graphs, for tests of client halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import parse_config

FEATURES = 6


def random_client(
    method: str,
    *,
    partition_id: int = 0,
    num_nodes: int = 30,
    num_classes: int = 3,
    classes: Sequence[int] | None = None,
    train: Sequence[int] | None = None,
    settings: dict[str, Any] | None = None,
    **method_config: Any,
) -> Client:
    """Make a client whose nodes cycle through its classes.

    ``classes`` are the client's classes, by default all. ``train`` are its training
    nodes, by default the first half.
    """
    draw = torch.Generator().manual_seed(3 + partition_id)
    own = list(range(num_classes)) if classes is None else list(classes)
    y = torch.tensor([own[n % len(own)] for n in range(num_nodes)])
    x = torch.randn(num_nodes, FEATURES, generator=draw)
    x[:, 0] += y
    upper = torch.rand(num_nodes, num_nodes, generator=draw).triu(1) > 0.8
    masks = {
        name: torch.zeros(num_nodes, dtype=torch.bool)
        for name in ("train", "val", "test")
    }
    masks["train"][list(range(num_nodes // 2)) if train is None else train] = True
    masks["test"] = ~masks["train"]
    graph = ClientGraph(
        partition_id,
        Graph(x, (upper | upper.T).nonzero().T.contiguous(), y, masks),
        Target.classes([f"class {c}" for c in range(num_classes)]),
        torch.arange(num_nodes),
    )
    config = parse_config(
        {
            "method": method,
            "hidden-channels": 8,
            "model": "gcn",
            **(settings or {}),
            **{
                f"{method}.{key.replace('_', '-')}": v
                for key, v in method_config.items()
            },
        }
    )
    device = torch.device("cpu")
    data = ClientData.build(graph, device)
    return Client(config, partition_id, 2, data, ClientState(), device)
