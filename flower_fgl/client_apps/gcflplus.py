"""Client half of GCFL+: train all layers, upload the hidden ones and a norm."""

from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.partly_shared import HiddenLayersClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.gcflplus import GCFLPlusSettings
from flower_fgl.protocols.fedavg import DescribedWeights, Weights

__all__ = ["GCFLPlusClientApp"]

Client = AnyClient[GCFLPlusSettings]


class GCFLPlusClientApp(HiddenLayersClientApp):
    """Train the cluster's model; upload it with the norm for the client's series.

    Notes
    -----
    1. ``gcfl+.series = "gradient"``: the norm is that of the last mini-batch's gradient.
       It stands for what the client's graphs ask of the shared layers, as in the
       published code. With ``"update"`` it is ‖Δθ_i‖, as in the paper.
    2. The published code reports, for each client, the best test accuracy of any model
       that it ever had. Here a client scores the model that it trained in the round.
    3. The published network has private maps before and after its GIN layers, and shares
       these layers whole. Here the first linear map inside the first GIN layer is the
       private input layer, so P_s has one matrix less with as many GIN layers.
    """

    up = DescribedWeights

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train, and measure the gradient or the update of the shared layers."""
        result = super().fit(client, server_round, download)
        model = result.model
        assert model is not None  # of the base class
        shared = self.shared_state(client, model)
        parts: list[Tensor]
        if client.config.method_config.series == "gradient":
            parts = [
                parameter.grad
                for name, parameter in model.named_parameters()
                if name in shared and parameter.grad is not None
            ]
        else:
            parts = [t.cpu() - download.tensors[name] for name, t in shared.items()]
        norms = [torch.linalg.vector_norm(part.detach()).cpu() for part in parts]
        norm = torch.stack(norms).norm() if norms else torch.zeros(())
        upload = DescribedWeights(shared, {"norm": norm[None]})
        return replace(result, upload=upload)
