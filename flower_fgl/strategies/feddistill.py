"""Server half of FedDistill: average the clients' mean logits of each class."""

from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import mean_prototypes
from flower_fgl.protocols.prototypes import no_prototypes
from flower_fgl.strategies.fedproto import FedProto

__all__ = ["FedDistill"]


class FedDistill(FedProto):
    """Send every client the mean logits of every class.

    Notes
    -----
    1. The mean over the owners of a class weights them equally.
    2. A class that no client uploads in a round keeps its previous logits.
    """

    def prepare(self) -> None:
        """Start without logits."""
        classes = self.federation.num_classes
        self.table = (classes, 1, classes)
        self.prototypes = no_prototypes(self.table)

    def combine(self, server_round: int, uploads: Tensor, counts: Tensor) -> Tensor:
        """Return the mean of the owners' logits (C, 1, C)."""
        return mean_prototypes(uploads, (counts > 0).long())
