"""Client half of MOON: FedAvg with a contrast between models.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.

===========  ==========================================================
symbol       here
===========  ==========================================================
z            ``embedding``, of the model in training
z_glob       ``received``, of the model that the server sent
z_prev       ``previous``, of the model the client trained last
μ, τ         ``moon.mu``, ``moon.tau``
===========  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.methods.moon import MoonSettings
from flower_fgl.nn.embedding_recorder import RecordingBackbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["MoonClientApp", "model_contrast"]

Client = AnyClient[MoonSettings]


def model_contrast(
    embedding: Tensor, received: Tensor, previous: Tensor, *, tau: float
) -> Tensor:
    """Compute the model-contrastive loss, Li et al. 2021, Eq. (3).

    ``mean −log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )``

    Parameters
    ----------
    embedding : Tensor of shape (n, p), float32
        z, with gradient; n at least 1.
    received, previous : Tensor of shape (n, p), float32
        z_glob and z_prev, constants.
    tau : float, positive
        Temperature.

    Returns
    -------
    Tensor of shape ()
        At least 0; log 2 if z is equally similar to both.
    """
    # cos(z, g) − cos(z, p) = ẑ·(ĝ − p̂): one product that needs a gradient, not two
    towards = F.normalize(received, dim=1) - F.normalize(previous, dim=1)
    nearer = (F.normalize(embedding, dim=1) * towards).sum(dim=1)
    return F.softplus(-nearer / tau).mean()


class MoonClientApp(FedAvgClientApp):
    """Train towards the received model's embeddings, away from the previous model's.

    Notes
    -----
    1. The embeddings are the backbone's. The paper adds a projection head, which would
       change the network that methods are compared with.
    2. The embeddings of both fixed models are computed once a round, without dropout.
    3. In a client's first round there is no previous model and no contrastive term.
    4. For graph classification the graphs of the training step are contrasted, whatever
       ``moon.nodes`` is.
    5. For link prediction all nodes are contrasted, whatever ``moon.nodes`` is.
    6. Fine-tuning starts with fresh moments of the optimizer.
    """

    stacked = "flower_fgl.client_apps.stacked.moon:StackedMoon"

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train from the received weights with the contrastive term."""
        model = RecordingBackbone(client.build_model())
        previous = client.state.group("model")
        term = None
        if previous and client.config.method_config.mu:
            term = self.contrast(client, model, download.tensors, previous)
        load_state(model.backbone, download.tensors)
        loss = client.train(model, server_round, penalty=term)
        return Fit(model.backbone, Weights(model.backbone.state_dict()), loss)

    def contrast(
        self,
        client: Client,
        model: RecordingBackbone,
        received: Mapping[str, Tensor],
        previous: Mapping[str, Tensor],
    ) -> Callable[[], Tensor]:
        """Return a function for μ times the contrastive term of the last embedding."""
        method_config, data = client.config.method_config, client.data.training
        frozen = []
        for state in (received, previous):
            load_state(model.backbone, state)
            frozen.append(model.at_rest(data.inputs))
        are_some = method_config.nodes == "train" and data.inputs.pairs is None
        rows = data.index if are_some else slice(None)

        def term() -> Tensor:
            items = model.items
            z = model.embedding[rows] if items is None else model.embedding
            z_glob, z_prev = (t[rows if items is None else items] for t in frozen)
            loss = model_contrast(z, z_glob, z_prev, tau=method_config.tau)
            return float(method_config.mu) * loss

        return term
