"""Server halves of FedProto, FedDistill and FedTGP: one prototype of each class.

===========  =====================================
symbol       here
===========  =====================================
C_i^(j)      ``uploads[i, j]``, client i's mean of class j
abs D_{i,j}  ``counts[i, j]``
C̄^(j)        ``FedProto.prototypes``
===========  =====================================
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import (
    PrototypeGenerator,
    class_spread,
    mean_prototypes,
    topology_loss,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedtgp import FedTGPSettings
from flower_fgl.nn import optimizers
from flower_fgl.protocols.prototypes import (
    CountedTable,
    LocalPrototypes,
    Prototypes,
    no_prototypes,
)
from flower_fgl.strategies.base import FglStrategy, Upload

__all__ = ["MARGIN_LIMIT", "FedDistill", "FedProto", "FedTGP", "PrototypeTrainer"]

SERVER_LR = 0.01
"""FedTGP's learning rate (Adam) of the global prototypes."""
MARGIN_LIMIT = 100.0
"""FedTGP's κ, the largest margin, from the published code."""


class FedProto(FglStrategy):
    """Send every client the mean prototype of every class.

    Notes
    -----
    1. A class that no client uploads in a round keeps its previous prototype.
    """

    down = Prototypes
    up = LocalPrototypes
    kept: ClassVar[tuple[str, ...]] = ("prototypes",)

    @property
    def width(self) -> int:
        """Numbers p of a prototype."""
        return self.config.hidden_channels

    def prepare(self) -> None:
        """Start without prototypes."""
        self.table = (self.federation.num_classes, 1, self.width)
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


class FedDistill(FedProto):
    """Send every client the mean logits of every class.

    Notes
    -----
    1. The mean over the owners of a class weights them equally.
    2. A class that no client uploads in a round keeps its previous logits.
    """

    @property
    def width(self) -> int:
        """Logits of a node, C."""
        return self.federation.num_classes

    def combine(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Return the mean of the owners' logits (C, 1, C)."""
        return mean_prototypes(uploads, (counts > 0).long())


class PrototypeTrainer:
    """Generator of prototypes and its Adam optimizer, both kept between rounds.

    ``table`` is (C, H, p). With ``is_fused`` Adam steps in one kernel: faster, and
    different in the last bits.
    """

    def __init__(
        self,
        table: tuple[int, int, int],
        *,
        seed: int,
        is_normalised: bool,
        lr: float,
        weight_decay: float = 0.0,
        is_fused: bool = False,
    ) -> None:
        with seeded(derive_seed(seed, 0, SERVER, "prototypes")):
            self.generator = PrototypeGenerator(*table, is_normalised=is_normalised)
        self.optimizer = optimizers.Adam(
            self.generator.parameters(),
            lr=lr,
            weight_decay=weight_decay,
            fused=is_fused or None,
        )
        self.losses: list[float] = []

    def train(self, epochs: int, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Minimise a loss of the prototypes (C, H, p), and return them, one step per epoch.

        ``losses`` stores the values.
        """
        self.losses = []
        for _ in range(epochs):
            self.optimizer.zero_grad()
            value = loss(self.generator())
            value.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(float(value.detach()))
        with torch.no_grad():
            out: Tensor = self.generator()
        return out


class FedTGP(FedProto):
    """Replace FedProto's average by trained prototypes."""

    config: RunConfig[FedTGPSettings]
    kept = ("generator",)

    def prepare(self) -> None:
        """Draw the initial table P̂ and network F."""
        super().prepare()
        self.trainer = PrototypeTrainer(
            self.table, seed=self.config.seed, is_normalised=False, lr=SERVER_LR
        )
        self.generator = self.trainer.generator
        self.optimizers = {"generator": self.trainer.optimizer}

    def combine(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Train for ``server-epochs`` and return P̂."""
        method_config = self.config.method_config
        margin = class_spread(uploads, counts, limit=MARGIN_LIMIT)
        members = (counts > 0)[None]  # (H, K, C, H) with one hop
        return self.trainer.train(
            method_config.server_epochs,
            lambda made: topology_loss(made, uploads, members, margin=margin),
        )
