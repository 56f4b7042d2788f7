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

===============================================  ==========================
Algorithm 1, client                              function
===============================================  ==========================
Θ̂ by Eq. (4)                                     ``blend``
one step of W by Eq. (5)                         ``blend_step``
until W converges, or one pass                   ``FedALAClientApp.learn``
===============================================  ==========================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import DataLoss, TrainingSet, load_state
from flower_fgl.core.seeds import torch_generator
from flower_fgl.methods.fedala import FedALASettings
from flower_fgl.nn import Backbone
from flower_fgl.nn.body_head import layer_of
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedALAClientApp", "blend", "blend_step", "last_layers"]

Client = AnyClient[FedALASettings]

WEIGHT_LR = 1.0
"""η, step size of the blending weights W."""
WINDOW = 10
"""Number of last losses that decide whether W has converged, as in the published code."""
SPREAD = 0.1
"""Standard deviation of these losses below which W has converged."""
MAX_PASSES = 200
"""Maximum number of passes if W does not converge."""


def last_layers(names: Iterable[str], number: int) -> list[str]:
    """Return the parameters of the last layers of a backbone.

    A layer is the classifier, or one part of the encoder.

    Parameters
    ----------
    names : iterable of str
        Names of the parameters, in the order of the layers.
    number : int, at least 1
        Layers wanted; all parameters if the backbone has fewer.

    Returns
    -------
    list of str
        In the order of ``names``.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    return [name for layer in list(layers.values())[-number:] for name in layer]


def blend(old: Tensor, received: Tensor, weights: Tensor) -> Tensor:
    """Compute Θ̂ = Θ_old + (Θ − Θ_old) ⊙ W, Zhang et al. 2023, Eq. (4).

    Parameters
    ----------
    old, received, weights : Tensor of one shape, float32
        ``weights`` in [0, 1]: 0 keeps ``old``, 1 takes ``received``.

    Returns
    -------
    Tensor of that shape
    """
    return old + (received - old) * weights


def blend_step(
    weights: Tensor, gradient: Tensor, old: Tensor, received: Tensor, *, lr: float
) -> Tensor:
    """Step W to clip(W − η ∇_Θ̂ L ⊙ (Θ − Θ_old), 0, 1), Zhang et al. 2023, Eq. (5).

    Parameters
    ----------
    weights, gradient, old, received : Tensor of one shape, float32
        W, the gradient of the loss with respect to Θ̂, Θ_old and Θ.
    lr : float, positive
        η.

    Returns
    -------
    Tensor of that shape, in [0, 1]
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

    stacked = "flower_fgl.client_apps.stacked.fedala:StackedFedALA"

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train as FedAvg, but from the blended weights."""
        old = client.state.group("model")
        if old:
            download = Weights(self.learn(client, server_round, old, download.tensors))
        return super().fit(client, server_round, download)

    def learn(
        self,
        client: Client,
        server_round: int,
        old: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Learn W, store it, and return the blended state."""
        method_config = client.config.method_config
        state = {name: t.to(client.device) for name, t in received.items()}
        model = client.build_model().eval()
        load_state(model, state)
        names = last_layers(
            (name for name, _ in model.named_parameters()), method_config.layers
        )
        kept = {n: t.to(client.device) for n, t in client.state.group("blend").items()}
        weights = kept or {name: torch.ones_like(state[name]) for name in names}
        ends = {name: (old[name].to(client.device), state[name]) for name in names}
        data = client.data.training.epoch(
            torch_generator(
                client.config.seed, server_round, client.partition_id, "blend items"
            )
        )
        index, labels = sample_nodes(
            client, server_round, share=method_config.sample / 100, data=data
        )
        task_loss = client.task_loss()
        losses: list[float] = []
        while not is_learned(losses, is_first=not kept):
            blended = {name: blend(*ends[name], weights[name]) for name in names}
            load_state(model, blended)
            loss, gradients = _gradients(data, model, names, index, labels, task_loss)
            losses.append(loss)
            weights = {
                name: blend_step(weights[name], gradient, *ends[name], lr=WEIGHT_LR)
                for name, gradient in zip(names, gradients, strict=True)
            }
        client.state.set_group("blend", weights)
        return state | {name: blend(*ends[name], weights[name]) for name in names}


def sample_nodes(
    client: Client,
    server_round: int,
    *,
    share: float,
    data: TrainingSet | None = None,
) -> tuple[Tensor, Tensor]:
    """Return indices and labels of a random share, at least one, of the training items."""
    data = data or client.data.training
    generator = torch_generator(
        client.config.seed, server_round, client.partition_id, "blend"
    )
    order = torch.randperm(len(data.index), generator=generator)
    rows = (
        order[: num_sampled(len(order), share=share)]
        .sort()
        .values.to(data.index.device)
    )
    return data.index[rows], data.labels[rows]


def num_sampled(count: int, *, share: float) -> int:
    """Return how many of ``count`` training items a share takes, at least one."""
    return max(1, math.ceil(share * count - 1e-9))


def _gradients(
    data: TrainingSet,
    model: Backbone,
    names: list[str],
    index: Tensor,
    labels: Tensor,
    task_loss: DataLoss | None,
) -> tuple[float, tuple[Tensor, ...]]:
    """Return the loss of the task and its gradients with respect to some parameters."""
    parameters = dict(model.named_parameters())
    logits = data.logits(model, index)
    if task_loss is None:
        loss = F.cross_entropy(logits, labels)
    else:
        loss = task_loss(logits, labels, index)
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
    return float(loss.detach()), gradients


def is_learned(losses: list[float], *, is_first: bool) -> bool:
    """Return whether W is learned: by convergence at first, later after one pass."""
    if not is_first or len(losses) >= MAX_PASSES:
        return bool(losses)
    return len(losses) > WINDOW and float(torch.tensor(losses[-WINDOW:]).std()) < SPREAD
