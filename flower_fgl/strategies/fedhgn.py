"""Server half of FedHGN: average what no schema names; pass on coefficients unnamed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.core.errors import RunError
from flower_fgl.core.seeds import torch_generator
from flower_fgl.methods.fedhgn import FedHGNSettings
from flower_fgl.protocols.weights import AlignedWeights, Coefficients
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedHGN"]

LEAST = 3
"""Clients below which the coefficients of the others name their owner."""


class FedHGN(FedAvg):
    """Average bases, root weights and head; pass on the coefficients of other clients.

    Notes
    -----
    1. Coefficients of clients that a round does not sample are those of their last upload.
    2. The order of the coefficients is drawn anew for each round and client, the same in
       all layers, so that a row cannot be followed over rounds by its place.
    """

    down = AlignedWeights
    up = AlignedWeights
    kept = ("rows",)

    def prepare(self) -> None:
        """Build the shared weights, and require settings that keep coefficients local."""
        config, number = self.config, len(self.federation.clients)
        if config.schema_align != "private" or not config.num_bases:
            raise RunError(
                "fedhgn averages bases and keeps coefficients local: set schema-align = "
                '"private" and num-bases above 0.'
            )
        if self.aligns and number < LEAST:
            raise RunError(
                f'fedhgn.alignment = "peers" needs at least {LEAST} clients, got {number}: '
                "with 2 each would know the other's relations."
            )
        super().prepare()
        self.rows: dict[int, Tensor] = {}

    @property
    def aligns(self) -> bool:
        """Whether coefficients are exchanged."""
        settings: FedHGNSettings = self.config.method_config
        return settings.alignment == "peers"

    def download(self, server_round: int, partition_id: int) -> AlignedWeights:  # type: ignore[override]
        """Send the shared weights, and the others' coefficients in a drawn order."""
        others = [rows for pid, rows in self.rows.items() if pid != partition_id]
        layers, bases = self._sizes
        rows = torch.cat([torch.zeros(layers, 0, bases), *others], dim=1)
        generator = torch_generator(
            self.config.seed, server_round, partition_id, "coefficients"
        )
        order = torch.randperm(rows.shape[1], generator=generator)
        return AlignedWeights(self.weights.tensors, Coefficients(rows[:, order]))

    @property
    def _sizes(self) -> tuple[int, int]:
        """Layers L and bases B."""
        layers = sum(".bases." in name for name in self.shapes)
        return layers, self.config.num_bases

    def upload_spec(self, partition_id: int) -> tuple[Any, ...]:  # type: ignore[override]
        """Expect the shared weights, and coefficients of any number of relations."""
        layers, bases = self._sizes
        return self.shapes, {"layers": layers, "bases": bases}

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the shared weights; keep the coefficients of each client."""
        if self.aligns:
            self.rows |= {
                pid: upload.payload.coefficients.rows for pid, upload in uploads.items()
            }
        super().aggregate(server_round, uploads)

    def finish(self) -> None:
        """Do nothing: the clients' models are already personalized."""
