"""Server half of FedPer and FedRep: average the bodies; heads stay on the clients."""

from torch import nn

from flower_fgl.strategies.fedavg import FedAvg, draw_model

__all__ = ["FedPer"]


class FedPer(FedAvg):
    """Average the bodies, Algorithm 2; 4·P_f bytes up and down per client.

    Notes
    -----
    1. The average weights clients by ``weight-by``, as in FedAvg.
    2. The body does not depend on the number of classes, so clients may have heads of
       different sizes.
    """

    has_global = False

    def build(self, model: str) -> nn.Module:
        """Draw the initial backbone and remove its head."""
        network = draw_model(self.config, self.federation, model)
        network.classifier = nn.Identity()
        network.decoder = None
        return network
