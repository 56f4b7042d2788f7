"""Client half of FedHGN: FedAvg that keeps coefficients, and draws them to the others'.

Fu and King, "FedHGN: A Federated Framework for Heterogeneous Graph Neural Networks", IJCAI
2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.methods.fedhgn import FedHGNSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import AlignedWeights, Coefficients

__all__ = ["FedHGNClientApp", "alignment", "coefficient_rows"]


def alignment(own: Tensor, others: Tensor) -> Tensor:
    """Return ``A = Σ_l Σ_r min_r' ‖a_r^l − a_r'^l‖²``, the alignment of FedHGN.

    ``own`` (L, R, B) are the coefficients of the client's relations in each layer, with
    gradient; ``others`` (L, M, B) those of other clients, constant; M is at least 1. For K
    clients both have a leading dimension, and the result is (K,).

    Notes
    -----
    1. The published code compares with zeros in the first round, and one layer too many;
       here a client without others has no term.
    """
    distance = (own[..., :, None, :] - others[..., None, :, :]).square().sum(dim=-1)
    out: Tensor = distance.amin(dim=-1).sum(dim=(-2, -1))
    return out


def coefficient_rows(model: Backbone) -> Tensor:
    """Return the coefficients (L, R, B) of a network's relations, both directions.

    Those of K stacked networks are (K, L, R, B).
    """
    encoder: Any = model.encoder
    ways = [way for way in ("relations", "reverse") if way in encoder]
    relations = [one for way in ways for one in encoder[way]]
    first: Tensor = encoder["bases"][0].weight
    if not relations:
        return first.new_zeros(
            *first.shape[:-3], len(encoder["bases"]), 0, first.shape[-3]
        )
    rows = [torch.stack([one.weight for one in r], dim=-2) for r in relations]
    return torch.stack(rows, dim=-2)


class FedHGNClientApp(GroupClientApp):
    """Train all weights from the received shared ones; keep those of kinds and relations.

    Notes
    -----
    1. Without alignment this is FedAvg with ``schema-align = "private"``.
    2. The gradient of the alignment reaches the client's own coefficients only.
    """

    stacked = True
    down = AlignedWeights
    up = AlignedWeights

    def download_spec(self, client: Client) -> tuple[Any, ...]:
        """Return the shapes of the shared weights, and the sizes of coefficients."""
        shapes = client.shared(client.state_shapes())
        layers = sum(".bases." in name for name in shapes)
        return shapes, {"layers": layers, "bases": client.config.num_bases}

    def stack_key(self, client: Client, download: AlignedWeights) -> tuple[int, ...]:
        """Return the shape of the coefficients of other clients."""
        return tuple(download.coefficients.rows.shape)

    def fit_group(self, group: Group, downloads: Sequence[AlignedWeights]) -> GroupFit:
        """Train for ``local-epochs`` with the alignment."""
        weights = [Weights(download.tensors) for download in downloads]
        model = group.receive(weights, Client.build_model)
        settings: FedHGNSettings = group.config.method_config
        aligns, weight = settings.alignment == "peers", settings.weight
        others = [{"rows": download.coefficients.rows} for download in downloads]
        fixed = group.join(others)["rows"]

        def term() -> Tensor:
            found: Tensor = weight * alignment(coefficient_rows(model), fixed)
            return found

        has_term = aligns and fixed.shape[-2] and weight
        losses = group.train(model, penalty=term if has_term else None)
        rows = group.split({"rows": coefficient_rows(model).detach().cpu()})
        shared = group.split(group.exchanged(model.state_dict()))
        uploads = [
            AlignedWeights(
                tensors, Coefficients(own["rows"] if aligns else own["rows"][:, :0])
            )
            for tensors, own in zip(shared, rows, strict=True)
        ]
        return GroupFit(model, uploads, losses)

    def first_model(
        self, client: Client, download: AlignedWeights | None
    ) -> Backbone | None:
        """Return the received weights with the client's initial coefficients."""
        return None if download is None else client.receive(download.tensors)
