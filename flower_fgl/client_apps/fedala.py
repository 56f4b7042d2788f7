"""Client half of FedALA: FedAvg from a learned blend of old and received weights.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
AAAI 2023.

===========  ==========================================================
symbol       here
===========  ==========================================================
Θ_i^{t-1}    ``old``, the model the client trained last
Θ^{t-1}      ``received``
Θ̂_i^t        result of :func:`blend`
W_i^p        ``weights``, stored in the client's state as ``blend``
p, s, η      ``fedala.layers``, ``fedala.sample``, ``WEIGHT_LR``
===========  ==========================================================
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit, Rows
from flower_fgl.methods.fedala import FedALASettings
from flower_fgl.nn.state import layer_of
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedALAClientApp", "blend", "blend_step", "last_layers"]

WEIGHT_LR = 1.0
"""η, step size of the blending weights W."""
WINDOW = 10
"""Number of last losses that decide whether W has converged, as in the published code."""
SPREAD = 0.1
"""Standard deviation of these losses below which W has converged."""
MAX_PASSES = 200
"""Maximum number of passes if W does not converge."""


def last_layers(names: Iterable[str], number: int) -> list[str]:
    """Return the parameters of the last ``number`` layers of a backbone, in their order.

    ``names`` are in the order of the layers. A layer is the classifier, or one part of
    the encoder; of a backbone with fewer layers all parameters are returned.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    return [name for layer in list(layers.values())[-number:] for name in layer]


def blend(old: Tensor, received: Tensor, weights: Tensor) -> Tensor:
    """Compute Θ̂ = Θ_old + (Θ − Θ_old) ⊙ W, Zhang et al. 2023, Eq. (4).

    All of one shape; W in [0, 1]: 0 keeps ``old``, 1 takes ``received``.
    """
    return old + (received - old) * weights


def blend_step(
    weights: Tensor, gradient: Tensor, old: Tensor, received: Tensor, *, lr: float
) -> Tensor:
    """Step W to clip(W − η ∇_Θ̂ L ⊙ (Θ − Θ_old), 0, 1), Zhang et al. 2023, Eq. (5).

    ``weights`` are W, and ``gradient`` is that of the loss with respect to Θ̂; all
    tensors have one shape. η is ``lr``.
    """
    return (weights - lr * gradient * (received - old)).clamp(0, 1)


class FedALAClientApp(FedAvgClientApp):
    """Blend the last layers of the old and the received model, then train.

    Notes
    -----
    1. ``fedala.layers`` counts layers; the published code counts parameter tensors.
    2. W is learned without dropout, because it selects between two models as they are
       used for prediction.
    3. The loss that W minimises may never converge: learning stops after ``MAX_PASSES``.
    4. In its first round a client has no old model and starts from the received one.
    """

    stacked = True
    fit = GroupClientApp.fit

    def stack_key(self, client: Client, download: Weights) -> tuple[bool, bool]:
        """Separate clients without an old model, and without blending weights."""
        return client.state.has_group("model"), client.state.has_group("blend")

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train as FedAvg, but from the blended weights."""
        has_old, has_weights = self.stack_key(group.clients[0], downloads[0])
        if has_old:
            blended = self.learn(group, downloads, is_first=not has_weights)
            downloads = [
                Weights({**download.tensors, **layers})
                for download, layers in zip(downloads, blended, strict=True)
            ]
        return super().fit_group(group, downloads)

    def learn(
        self, group: Group, downloads: Sequence[Weights], *, is_first: bool
    ) -> list[dict[str, Tensor]]:
        """Learn W of every client, store it, and return the blended layers."""
        settings: FedALASettings = group.config.method_config
        model = group.build_model([download.tensors for download in downloads]).eval()
        parameters = dict(model.named_parameters())
        names = last_layers(parameters, settings.layers)
        used = [parameters[name] for name in names]
        received = {name: parameters[name].detach().clone() for name in names}
        old = group.join([{n: own[n] for n in names} for own in group.stored()])
        if is_first:
            weights = {name: torch.ones_like(received[name]) for name in names}
        else:
            weights = group.join(group.stored("blend"))
        group = group.epoch("blend items")
        rows = sample_rows(group, share=settings.sample / 100)
        losses: list[list[float]] = [[] for _ in group.clients]
        active = [True] * len(group)
        while any(active):
            with torch.no_grad():
                for name, parameter in zip(names, used, strict=True):
                    parameter.copy_(blend(old[name], received[name], weights[name]))
            loss = group.task_loss(model, rows)
            gradients = torch.autograd.grad(loss.sum(), used)
            learning = torch.tensor(active, device=group.device)
            for name, gradient in zip(names, gradients, strict=True):
                ends = old[name], received[name]
                step = blend_step(weights[name], gradient, *ends, lr=WEIGHT_LR)
                moves = learning.view(-1, *[1] * (step.dim() - 1))
                weights[name] = torch.where(moves, step, weights[name])
            for place, value in enumerate(loss.tolist()):
                if active[place]:
                    losses[place].append(value)
                    active[place] = not is_learned(losses[place], is_first=is_first)
        group.keep("blend", weights)
        return group.split(
            {name: blend(old[name], received[name], weights[name]) for name in names}
        )


def sample_rows(group: Group, *, share: float) -> Rows:
    """Return a random share, at least one, of each client's training items."""
    first, places = 0, []
    counts = group.rows.count.tolist()
    for generator, count in zip(group.generators("blend"), counts, strict=True):
        order = torch.randperm(count, generator=generator)
        number = max(1, math.ceil(share * count - 1e-9))
        places.append(first + order[:number].sort().values)
        first += count
    return group.rows.select(torch.cat(places).to(group.device))


def is_learned(losses: list[float], *, is_first: bool) -> bool:
    """Return whether W is learned: by convergence at first, later after one pass."""
    if not is_first or len(losses) >= MAX_PASSES:
        return bool(losses)
    return len(losses) > WINDOW and float(torch.tensor(losses[-WINDOW:]).std()) < SPREAD
