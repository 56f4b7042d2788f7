"""Distillation from the received model, for several client halves."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.nn import Backbone

__all__ = ["distillation", "received_logits"]


@torch.no_grad()
def received_logits(client: Client, model: Backbone) -> Tensor:
    """Predict the client's training graph with the received weights.

    Parameters
    ----------
    client : Client
        Owner of the graph.
    model : Backbone
        Holds the received weights; left in evaluation mode.

    Returns
    -------
    Tensor of shape (N, C), or (G, C) for graph classification
        Without dropout and gradient; to be computed once per round.
    """
    model.eval()
    logits: Tensor = model(client.data.inputs[0])
    return logits


def distillation(student: Tensor, teacher: Tensor, *, tau: float = 1.0) -> Tensor:
    """Compute the mean of KL(softmax(teacher/τ) ‖ softmax(student/τ)), Hinton 2015.

    Parameters
    ----------
    student : Tensor of shape (b, c), float
        Logits, with gradient.
    teacher : Tensor of shape (b, c), float
        Logits, without gradient.
    tau : float, positive
        Temperature.

    Returns
    -------
    Tensor of shape ()
        Not scaled by τ²; zero for fewer than two columns.
    """
    return F.kl_div(
        F.log_softmax(student / tau, dim=1),
        F.log_softmax(teacher / tau, dim=1),
        reduction="batchmean",
        log_target=True,
    )
