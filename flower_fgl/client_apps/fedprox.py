"""Client half of FedProx: FedAvg with a proximal term.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.methods.fedprox import FedProxSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedProxClientApp", "proximal_term"]


def proximal_term(
    parameters: Iterable[Tensor],
    anchors: Iterable[Tensor],
    *,
    mu: float,
    num_clients: int = 1,
) -> Tensor:
    """Compute (μ/2)‖θ − w‖² of each client, Li et al. 2020, Eq. (2).

    ``parameters`` (K, ...) are θ, with gradient, and ``anchors`` w, the received
    weights, in the same order. The tensors of one client need no leading dimension.
    """
    terms = [
        (theta - w).square().reshape(num_clients, -1).sum(1)
        for theta, w in zip(parameters, anchors, strict=True)
    ]
    return 0.5 * mu * torch.stack(terms).sum(0)


class FedProxClientApp(FedAvgClientApp):
    """Train with the proximal term; the rest is FedAvg."""

    stacked = True

    def penalties(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> Callable[[], Tensor]:
        """Return the proximal term; its anchors are the received weights in ``model``."""
        shared = group.exchanged(dict(model.named_parameters()))
        anchors = [parameter.detach().clone() for parameter in shared.values()]
        settings: FedProxSettings = group.config.method_config
        mu = settings.mu
        return lambda: proximal_term(
            shared.values(), anchors, mu=mu, num_clients=len(group)
        )
