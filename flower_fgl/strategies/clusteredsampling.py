"""Server half of clustered sampling: FedAvg with a lower-variance client sampling.

===========  ==========================================================
symbol       here
===========  ==========================================================
m            number of draws, set by ``participation`` or ``participants``
n_i          weight of client i, set by ``weight-by``
r_{k,i}      ``table[k, i]`` / n, see ``algorithms/clusteredsampling.py``
===========  ==========================================================
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flower_fgl.algorithms import clusteredsampling
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.methods.clusteredsampling import ClusteredSamplingSettings
from flower_fgl.nn.state import state_to_vector
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["ClusteredSampling"]


class ClusteredSampling(FedAvg):
    """Sample m clients from m distributions and average them with weights 1/m.

    Notes
    -----
    1. A client that is drawn several times trains once; its upload is weighted by the
       number of its draws.
    2. If all clients take part, nothing is drawn and the round equals FedAvg's: the
       weights n_i/n have no variance.
    3. With ``clusters = "similarity"`` the server stores the last update of each client:
       4·K·P bytes.
    """

    config: RunConfig[ClusteredSamplingSettings]
    kept = ("updates",)

    def prepare(self) -> None:
        """Build the initial model and start without client updates."""
        super().prepare()
        self.draws: Counter[int] = Counter()
        self.updates: dict[int, Tensor] = {}

    def sample(self, server_round: int) -> list[int]:
        """Draw m times and return the distinct clients, ascending."""
        trainable = self.available(server_round)
        number = len(super().sample(server_round))
        self.draws.clear()
        if number == len(trainable):
            return trainable
        counts = np.array([int(self.messenger.weight_of(pid)) for pid in trainable])
        if self.config.method_config.clusters == "size":
            table = clusteredsampling.table_by_size(counts, number)
        else:
            angles = clusteredsampling.update_angles(self.known(trainable))
            table = clusteredsampling.table_by_similarity(counts, number, angles)
        generator = numpy_generator(self.config.seed, server_round, SERVER, "draws")
        self.draws.update(
            trainable[i] for i in clusteredsampling.draw_clients(table, generator)
        )
        return sorted(self.draws)

    def num_replies(self, uploads: Mapping[int, Upload]) -> int:
        """Count each upload as often as its client was drawn."""
        return sum(self.draws[pid] or 1 for pid in uploads)

    def known(self, partition_ids: list[int]) -> np.ndarray[tuple[int, int]]:
        """Stack the clients' last updates (K, P); rows without an update are zero."""
        zeros = torch.zeros_like(state_to_vector(self.weights.tensors))
        updates = [self.updates.get(pid, zeros) for pid in partition_ids]
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
