"""Client half of FedProx: FedAvg with a proximal term.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fedprox import FedProxSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedProxClientApp", "proximal_term"]

Client = AnyClient[FedProxSettings]


def proximal_term(
    parameters: Iterable[Tensor], anchors: Iterable[Tensor], *, mu: float
) -> Tensor:
    """Compute (μ/2)‖θ − w‖², Li et al. 2020, Eq. (2).

    Parameters
    ----------
    parameters : iterable of Tensor
        θ, with gradient.
    anchors : iterable of Tensor
        w, the received weights, in the same order.
    mu : float, at least 0
        Weight of the term.

    Returns
    -------
    Tensor of shape ()
    """
    terms = [
        (theta - w).square().sum() for theta, w in zip(parameters, anchors, strict=True)
    ]
    return 0.5 * mu * torch.stack(terms).sum()


class FedProxClientApp(FedAvgClientApp):
    """Train with the proximal term; the rest is FedAvg."""

    stacked = "flower_fgl.client_apps.stacked.averaging:StackedFedProx"

    def penalty(
        self, client: Client, model: Backbone, download: Weights
    ) -> Callable[[], Tensor]:
        """Return the proximal term with the received weights as anchors."""
        shared = client.shared(dict(model.named_parameters()))
        anchors = [download.tensors[name].to(client.device) for name in shared]
        mu = client.config.method_config.mu
        return lambda: proximal_term(shared.values(), anchors, mu=mu)
