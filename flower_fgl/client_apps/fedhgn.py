"""Client half of FedHGN: FedAvg that keeps coefficients, and draws them to the others'.

Fu and King, "FedHGN: A Federated Framework for Heterogeneous Graph Neural Networks", IJCAI
2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fedhgn import FedHGNSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedhgn import AlignedWeights, Coefficients

__all__ = ["FedHGNClientApp", "alignment", "coefficient_rows"]


def alignment(own: Tensor, others: Tensor) -> Tensor:
    """Return ``A = Σ_l Σ_r min_r' ‖a_r^l − a_r'^l‖²``, the alignment of FedHGN.

    ``own`` (L, R, B) are the coefficients of the client's relations in each layer, with
    gradient; ``others`` (L, M, B) those of other clients, constant; M is at least 1.

    Notes
    -----
    1. The published code compares with zeros in the first round, and one layer too many;
       here a client without others has no term.
    """
    distance = (own[:, :, None] - others[:, None]).square().sum(dim=-1)
    return distance.amin(dim=2).sum()


Client = AnyClient[FedHGNSettings]


def coefficient_rows(model: Backbone) -> Tensor:
    """Return the coefficients (L, R, B) of a network's relations, both directions."""
    encoder: Any = model.encoder
    ways = [way for way in ("relations", "reverse") if way in encoder]
    relations = [one for way in ways for one in encoder[way]]
    layers, bases = len(encoder["bases"]), encoder["bases"][0].weight.shape[0]
    if not relations:
        return torch.zeros(layers, 0, bases)
    return torch.stack(
        [torch.stack([one.weight for one in r]) for r in relations], dim=1
    )


class FedHGNClientApp(FglClientApp):
    """Train all weights from the received shared ones; keep those of kinds and relations.

    Notes
    -----
    1. Without alignment this is FedAvg with ``schema-align = "private"``.
    2. The gradient of the alignment reaches the client's own coefficients only.
    """

    down = AlignedWeights
    up = AlignedWeights

    def download_spec(self, client: Client) -> tuple[Any, ...]:
        """Return the shapes of the shared weights, and the sizes of coefficients."""
        shapes = client.shared(client.state_shapes())
        layers = sum(".bases." in name for name in shapes)
        return shapes, {"layers": layers, "bases": client.config.num_bases}

    def fit(self, client: Client, server_round: int, download: AlignedWeights) -> Fit:
        """Train for ``local-epochs`` with the alignment."""
        model = client.receive(download.tensors)
        settings, others = client.config.method_config, download.coefficients.rows
        aligns = settings.alignment == "peers"
        fixed, weight = others.to(client.device), settings.weight
        has_term = aligns and fixed.shape[1] and weight
        loss = client.train(
            model,
            server_round,
            penalty=(lambda: weight * alignment(coefficient_rows(model), fixed))
            if has_term
            else None,
        )
        rows = coefficient_rows(model).detach().cpu()
        upload = AlignedWeights(
            client.shared(model.state_dict()),
            Coefficients(rows if aligns else rows[:, :0]),
        )
        return Fit(model, upload, loss)

    def first_model(
        self, client: Client, download: AlignedWeights | None
    ) -> Backbone | None:
        """Return the received weights with the client's initial coefficients."""
        return None if download is None else client.receive(download.tensors)
