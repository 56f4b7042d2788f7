"""A federation of clients with given sizes, for tests of strategies."""

from __future__ import annotations

from flower_fgl.protocols.describe import Description
from flower_fgl.strategies.federation import Federation


def federation_of(num_train: list[int]) -> Federation:
    """Make clients with these numbers of training nodes, three features, two classes."""
    count = len(num_train)
    clients = {
        pid: Description(pid, count, 2 * n, 9, n, 1, 1, 3, ("a", "b"), (), "gcn")
        for pid, n in enumerate(num_train)
    }
    return Federation(clients, {pid: 10 + pid for pid in clients})
