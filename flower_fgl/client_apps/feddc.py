"""Client half of FedDC: FedAvg that learns its own drift and corrects it.

Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022.

===========  ==========================================================
symbol       argument
===========  ==========================================================
θ, w         ``parameters``, ``received``
h_i          ``drift``
Δ_i, Δ̄       ``own_change``, ``mean_change``
η, S         ``lr``, ``steps``
α            ``alpha``
===========  ==========================================================
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.feddc import FedDCSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import DescribedWeights
from flower_fgl.protocols.weights import ControlledWeights

__all__ = ["FedDCClientApp", "drift_penalty", "gradient_correction"]


def gradient_correction(
    own_change: Tensor, mean_change: Tensor, *, steps: int, lr: float
) -> Tensor:
    """Compute (Δ_i − Δ̄)/(η S), the client's excess over the mean step.

    Δ_i and Δ̄ are of the last round, which took S = ``steps`` optimizer steps; 0 without
    steps.
    """
    if steps == 0:
        return torch.zeros_like(own_change)
    return (own_change - mean_change) / (lr * steps)


def drift_penalty(
    parameters: Iterable[Tensor],
    received: Iterable[Tensor],
    drift: Iterable[Tensor],
    corrections: Iterable[Tensor],
    *,
    alpha: float,
) -> Tensor:
    """Compute (α/2)‖θ + h_i − w‖² + ⟨θ, (Δ_i − Δ̄)/(ηS)⟩, Gao et al. 2022, Eq. (4).

    ``parameters`` are θ, with gradient; w, h_i and :func:`gradient_correction` are
    constants in the same order.
    """
    terms = [
        0.5 * alpha * (theta + h - w).square().sum() + (theta * change).sum()
        for theta, w, h, change in zip(
            parameters, received, drift, corrections, strict=True
        )
    ]
    return torch.stack(terms).sum()


Client = AnyClient[FedDCSettings]

STEPS = "feddc-steps"
"""Optimizer steps of the client's last round."""


class FedDCClientApp(FedAvgClientApp):
    """Train near w − h_i; upload the weights plus the drift, and their change.

    Notes
    -----
    1. In a client's first round the cross-entropy is the only loss: it has no drift yet.
    2. Δ_i and S are those of the client's last round, also if it was not sampled since.
    3. The correction is a mean gradient only with ``optimizer = "sgd"``, the default.
    4. Fine-tuning trains without penalty.
    """

    down = ControlledWeights
    up = DescribedWeights

    def fit(  # type: ignore[override]  # the download holds the mean change too
        self, client: Client, server_round: int, download: ControlledWeights
    ) -> Fit:
        """Train with the penalty, then add the change to the drift."""
        model = client.receive(download.tensors)
        drift = {n: t.cpu() for n, t in client.state.group("drift").items()}
        penalty = self.drift_term(client, model, download, drift) if drift else None
        steps = 0

        def term() -> Tensor:
            nonlocal steps
            steps += 1
            return torch.zeros((), device=client.device) if not penalty else penalty()

        loss = client.train(model, server_round, penalty=term)
        state = {n: t.detach().cpu() for n, t in model.state_dict().items()}
        change = {n: t - download.tensors[n] for n, t in state.items()}
        drift = {n: drift[n] + t if drift else t for n, t in change.items()}
        client.state.set_group("drift", drift)
        client.state.set_group("change", change)
        client.state.values[STEPS] = steps
        corrected = {n: t + drift[n] for n, t in state.items()}
        return Fit(model, DescribedWeights(corrected, change), loss)

    def drift_term(
        self,
        client: Client,
        model: Backbone,
        download: ControlledWeights,
        drift: dict[str, Tensor],
    ) -> Callable[[], Tensor]:
        """Return a function for the penalty of the model's present weights."""
        names = [name for name, _ in model.named_parameters()]
        own, steps = client.state.group("change"), client.state.values[STEPS]
        correct = partial(gradient_correction, steps=int(steps), lr=client.config.lr)
        corrections = {n: correct(own[n].cpu(), download.control[n]) for n in names}
        lists = [
            [tensors[n].to(client.device) for n in names]
            for tensors in (download.tensors, drift, corrections)
        ]
        alpha = client.config.method_config.alpha
        return lambda: drift_penalty(model.parameters(), *lists, alpha=alpha)
