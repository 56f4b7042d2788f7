"""Clustered sampling's server half: FedAvg with a better draw of clients.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for
Clients Selection in Federated Learning", ICML 2021.

===========  ==========================================================
symbol       here
===========  ==========================================================
m            what ``participation`` or ``participants`` asks
n_i          what ``weight-by`` makes client i weigh
r_{k,i}      ``table[k, i]`` / n, see ``client_sampling.py``
===========  ==========================================================

===============================================  ==========================
algorithm                                        function
===============================================  ==========================
1, clusters by size                              ``table_by_size``
2, clusters by like updates                      ``table_by_similarity``
===============================================  ==========================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flower_fgl.algorithms.clusteredsampling import (
    draw_clients,
    table_by_similarity,
    table_by_size,
    update_angles,
)
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.nn.vectorize import state_to_vector
from flower_fgl.runs.checkpoints import Snapshot
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["ClusteredSampling"]


class ClusteredSampling(FedAvg):
    """Draw m clients from m distributions, average them with weights 1/m.

    Notes
    -----
    1. A client that is drawn several times trains once and counts as often.
    2. If all clients take part nothing is drawn, and the round is FedAvg's: weights
       n_i/n have no variance at all.
    3. With like updates the server keeps each client's last update: 4·K·P bytes.
    """

    def prepare(self) -> None:
        """Build the initial model; no client has sent an update."""
        super().prepare()
        self.draws: Counter[int] = Counter()
        self.updates: dict[int, Tensor] = {}

    def sample(self, server_round: int) -> list[int]:
        """Draw m times; a client that is drawn twice stands once in the list."""
        able = self.federation.trainable
        number = len(super().sample(server_round))
        self.draws.clear()
        if number == len(able):
            return able
        counts = np.array([int(self._weight(pid)) for pid in able])
        if self.config.method_config.clusters == "size":
            table = table_by_size(counts, number)
        else:
            table = table_by_similarity(counts, number, update_angles(self.known(able)))
        generator = numpy_generator(self.config.seed, server_round, SERVER, "draws")
        self.draws.update(able[place] for place in draw_clients(table, generator))
        return sorted(self.draws)

    def num_replies(self, uploads: Mapping[int, Upload]) -> int:
        """Count a client as often as it was drawn."""
        return sum(self.draws[pid] or 1 for pid in uploads)

    def known(self, partition_ids: list[int]) -> np.ndarray[tuple[int, int]]:
        """Stack the clients' last updates (K, P), zeros where there is none."""
        nothing = torch.zeros_like(state_to_vector(self.weights.tensors))
        updates = [self.updates.get(pid, nothing) for pid in partition_ids]
        return torch.stack(updates).numpy()

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Replace the weights by the mean over the draws."""
        if self.config.method_config.clusters == "similarity":
            before = state_to_vector(self.weights.tensors)
            for pid, upload in uploads.items():
                self.updates[pid] = state_to_vector(upload.payload.tensors) - before
        if self.draws:
            uploads = {
                pid: replace(upload, num_examples=float(self.draws[pid]))
                for pid, upload in uploads.items()
            }
        super().aggregate(server_round, uploads)

    def server_state(self) -> Snapshot:
        """Keep the aggregated weights and the clients' last updates."""
        updates = {str(pid): update for pid, update in self.updates.items()}
        return Snapshot.join(
            {"weights": super().server_state(), "updates": Snapshot(updates)}
        )

    def load_server_state(self, state: Snapshot) -> None:
        """Take both back."""
        super().load_server_state(state.part("weights"))
        updates = state.part("updates").tensors
        self.updates = {int(pid): update for pid, update in updates.items()}
