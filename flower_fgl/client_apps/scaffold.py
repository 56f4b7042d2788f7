"""Client half of SCAFFOLD: FedAvg with corrected gradients.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.

===========  ==========================================================
symbol       argument
===========  ==========================================================
x, y_i       ``received``, ``trained``
c, c_i       ``common``, ``own``
K, η_l       ``steps``, ``lr``
===========  ==========================================================
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.protocols.fedavg import DescribedWeights
from flower_fgl.protocols.weights import ControlledWeights

__all__ = ["ScaffoldClientApp", "control_term", "new_control"]


def control_term(parameters: Iterable[Tensor], corrections: Iterable[Tensor]) -> Tensor:
    """Compute ⟨y, c − c_i⟩, whose gradient corrects a local step by c − c_i.

    ``parameters`` are y, with gradient, and ``corrections`` c − c_i, constants, in the
    same order.
    """
    pairs = zip(parameters, corrections, strict=True)
    return torch.stack([(theta * change).sum() for theta, change in pairs]).sum()


def new_control(
    own: Tensor,
    common: Tensor,
    received: Tensor,
    trained: Tensor,
    *,
    steps: int,
    lr: float,
) -> Tensor:
    """Compute c_i⁺ = c_i − c + (x − y_i)/(K η_l), Algorithm 1, option II.

    K = ``steps`` are the optimizer steps of the round, not epochs; with 0 steps c_i does
    not change. All tensors have one shape.
    """
    if steps == 0:
        return own
    return own - common + (received - trained) / (steps * lr)


class ScaffoldClientApp(FedAvgClientApp):
    """Correct every gradient by c − c_i; upload the weights and the change of c_i.

    Notes
    -----
    1. Before its first round a client has c_i = 0.
    2. The new c_i is the mean gradient of the round only with ``optimizer = "sgd"``, the
       default. With Adam the correction enters before the moments and the estimate is a
       heuristic: call such a run SCAFFOLD (Adam).
    3. Fine-tuning trains without corrections.
    4. c_i is stored before the upload is sent. If the upload is lost, left out or clipped,
       c is no longer the mean of the c_i.
    """

    down = ControlledWeights
    up = DescribedWeights

    def fit(  # type: ignore[override]  # the download holds the control variate too
        self, client: Client, server_round: int, download: ControlledWeights
    ) -> Fit:
        """Train with corrected gradients, then renew c_i."""
        model = client.receive(download.tensors)
        zero = {name: torch.zeros_like(t) for name, t in download.control.items()}
        own = client.state.group("control") or zero
        own = {name: t.cpu() for name, t in own.items()}
        changes = [
            (download.control[name] - own[name]).to(client.device)
            for name, _ in model.named_parameters()
        ]
        steps = 0

        def term() -> Tensor:
            nonlocal steps
            steps += 1
            return control_term(model.parameters(), changes)

        loss = client.train(model, server_round, penalty=term)
        state = model.state_dict()
        renew = partial(new_control, steps=steps, lr=client.config.lr)
        control, received = download.control, download.tensors
        new = {
            name: renew(own[name], control[name], received[name], t.detach().cpu())
            for name, t in state.items()
        }
        client.state.set_group("control", new)
        change = {name: new[name] - own[name] for name in new}
        return Fit(model, DescribedWeights(state, change), loss)
