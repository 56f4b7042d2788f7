"""Clients as a server half knows them after they have described themselves."""

from __future__ import annotations

from flower_fgl.protocols.describe import Description
from flower_fgl.strategies.federation import Federation


def federation_of(num_train: list[int]) -> Federation:
    """Clients with so many training nodes, three features and two classes."""
    count = len(num_train)
    clients = {
        pid: Description(pid, count, 2 * n, 9, n, 1, 1, 3, ("a", "b"), (), "gcn")
        for pid, n in enumerate(num_train)
    }
    return Federation(clients, {pid: 10 + pid for pid in clients})
