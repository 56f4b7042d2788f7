"""Server half of FedSEM: several centres, each the mean of the clients nearest to it.

===========  ==========================================================
symbol       here
===========  ==========================================================
W_i          ``models[i]``
W̃^(k)        ``centers[k]``, ``FedSEM.centers``
r_i^(k)      ``members[i] == k``, ``FedSEM.members``
K            ``fedsem.centers``
===========  ==========================================================
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.methods.fedsem import FedSEMSettings
from flower_fgl.nn.state import state_to_vector, vector_to_state
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedSEM", "mean_of_members", "nearest_centers"]


def nearest_centers(models: Tensor, centers: Tensor) -> Tensor:
    """Assign models (K, P) to their nearest centres (Q, P), Long et al. 2023, Eq. (7).

    Returns the centre (K,) at the smallest squared distance; the first one in a tie.
    """
    sq_distance = torch.stack(
        [(models - center).square().sum(dim=1) for center in centers], dim=1
    )  # (K, Q)
    return sq_distance.argmin(dim=1)


def mean_of_members(
    models: Tensor, weights: Tensor, members: Tensor, centers: Tensor
) -> Tensor:
    """Move each centre to the mean of its members, Long et al. 2023, Eq. (8).

    Models are (K, P), ``weights`` n_i and ``members``, the centre of each client, (K,). A
    centre (Q, P) without members does not move.

    Notes
    -----
    1. The paper's mean is unweighted. Here members are weighted as in FedAvg;
       ``weight-by = "equal"`` gives the paper's mean.
    """
    share = torch.zeros(len(centers), len(models), device=models.device)
    share[members, torch.arange(len(models), device=models.device)] = weights
    total = share.sum(dim=1, keepdim=True)  # (Q, 1)
    share /= total.clamp(min=1e-12)  # before the sum, which could overflow
    return torch.where(total > 0, share @ models, centers)


class FedSEM(FedAvg):
    """Send each client the centre nearest to its last upload.

    Notes
    -----
    1. Centres start as the first models of randomly drawn clients. If a round has fewer
       clients than there are centres, the missing centres start in the next rounds in
       which clients take part for the first time.
    2. One E-step and one M-step follow each round, on the uploads of the round. A centre
       without members does not move.
    3. A client without an upload gets the mean of the centres, each weighted by the total
       weight of its members. Before round 1 it gets the initial model.
    """

    config: RunConfig[FedSEMSettings]
    kept = ("centers", "members")

    def prepare(self) -> None:
        """Build the initial model and start without centres."""
        super().prepare()
        number = self.config.method_config.centers
        num_trainable = len(self.federation.trainable)
        if number > num_trainable:
            raise RunError(
                f"fedsem.centers = {number}, but only {num_trainable} clients train and "
                "the model of one client can initialise only one centre. "
                f"Set fedsem.centers to {num_trainable} or less."
            )
        self.centers: list[Weights] = []
        self.members: dict[int, int] = {}

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Return the centre that the client is assigned to."""
        if partition_id in self.members:
            return self.centers[self.members[partition_id]]
        return self.weights

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Start missing centres, assign the clients, move the centres."""
        models = {
            pid: state_to_vector(up.payload.tensors) for pid, up in uploads.items()
        }
        starting = self.starting(
            server_round, [p for p in models if p not in self.members]
        )
        known = [state_to_vector(center.tensors) for center in self.centers]
        centers = torch.stack([*known, *(models[pid] for pid in starting)])
        stacked = torch.stack(list(models.values()))
        weights = torch.tensor([upload.num_examples for upload in uploads.values()])
        members = nearest_centers(stacked, centers)
        centers = mean_of_members(stacked, weights, members, centers)
        self.members |= dict(zip(models, members.tolist(), strict=True))
        self.set_centers(centers)

    def starting(self, server_round: int, new: list[int]) -> list[int]:
        """Draw the new clients whose first models become centres, ascending."""
        missing = self.config.method_config.centers - len(self.centers)
        generator = numpy_generator(self.config.seed, server_round, SERVER, "centers")
        drawn = generator.permutation(new)[:missing]
        return sorted(int(pid) for pid in drawn)

    def set_centers(self, centers: Tensor) -> None:
        """Store centres (Q, P), and their mean for clients without an upload."""
        self.centers = [
            Weights(vector_to_state(center, self.shapes)) for center in centers
        ]
        size = torch.zeros(len(centers))
        for pid, center in self.members.items():
            size[center] += self.messenger.weight_of(pid)
        self.weights = Weights(
            vector_to_state((size / size.sum()) @ centers, self.shapes)
        )

    def restored(self) -> None:
        """Make downloads of the centres."""
        found: Any = self.centers
        self.centers = [Weights(**center) for center in found]
