"""Server half of FedProto: average the clients' prototypes.

===========  =====================================
symbol       here
===========  =====================================
C_i^(j)      ``uploads[i, j]``, client i's mean of class j
abs D_{i,j}  ``counts[i, j]``
C̄^(j)        ``FedProto.prototypes``
===========  =====================================
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import mean_prototypes
from flower_fgl.protocols.prototypes import (
    CountedTable,
    LocalPrototypes,
    Prototypes,
    no_prototypes,
)
from flower_fgl.strategies.base import FglStrategy, Upload

__all__ = ["FedProto"]


class FedProto(FglStrategy):
    """Send every client the mean prototype of every class.

    Notes
    -----
    1. A class that no client uploads in a round keeps its previous prototype.
    """

    down = Prototypes
    up = LocalPrototypes
    kept: ClassVar[tuple[str, ...]] = ("prototypes",)

    def prepare(self) -> None:
        """Start without prototypes."""
        self.table = (self.federation.num_classes, 1, self.config.hidden_channels)
        self.prototypes = no_prototypes(self.table)

    def download(self, server_round: int, partition_id: int) -> Prototypes:
        """Return the mean prototypes, the same for all clients."""
        return self.prototypes

    def upload_spec(self, partition_id: int) -> CountedTable:
        """Return (C, 1, p): at most one prototype of each class, of training nodes."""
        return CountedTable(self.table, self.federation.clients[partition_id].num_train)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Combine the uploads; classes without an upload keep their prototype."""
        values, counts = LocalPrototypes.stack(up.payload for up in uploads.values())
        new = self.combine(server_round, values, counts)
        owned = (counts > 0).any(dim=0)
        old = self.prototypes
        self.prototypes = Prototypes(
            torch.where(owned[..., None], new, old.values), owned | old.present
        )

    def combine(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Return the new prototypes (C, 1, p) of the uploaded classes."""
        return mean_prototypes(uploads, counts)
