"""Client half of FedSST: epochs and upload by the client's weight, and a signal."""

from dataclasses import replace
from typing import Any, cast

import torch

from flower_fgl.algorithms import fedsst
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.partly_shared import HiddenLayersClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.methods.fedsst import FedSSTSettings
from flower_fgl.nn import GIN
from flower_fgl.protocols.fedavg import DescribedWeights

__all__ = ["FedSSTClientApp"]

Client = AnyClient[FedSSTSettings]


class FedSSTClientApp(HiddenLayersClientApp):
    """Train longer with a larger weight, mix the received layers into the upload.

    Notes
    -----
    1. The signal is that of the client's trained model, before it is mixed: of the
       received model it would be the same for all clients.
    2. A client scores the model that it trained. The paper joins the averaged layers with
       the client's own input layer and head.
    3. E_base is the setting ``local-epochs``. A copy that is trained to be evaluated takes
       ``final-local-epochs``, whatever the client's weight.
    4. All clients draw the same probe, from the run's seed.
    """

    down = DescribedWeights
    up = DescribedWeights

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the shared layers and of the client's weight."""
        return super().download_spec(client), {"weight": (1,)}

    def refresh_config(self, config: RunConfig) -> RunConfig:
        """Train a copy for ``final-local-epochs``, whatever the download says."""
        fixed = replace(config.method_config, adapts_epochs=False)
        return super().refresh_config(replace(config, method_config=fixed))

    def fit(self, client: Client, server_round: int, download: DescribedWeights) -> Fit:
        """Train, measure the signal and mix the upload."""
        settings = client.config.method_config
        share = min(max(float(download.descriptor["weight"]), 0.0), 1.0)
        epochs = client.config.local_epochs
        if settings.adapts_epochs:
            epochs = fedsst.epochs_for(share, epochs, settings)
        model = self.assemble(Group(client), [download])
        loss = client.train(model, server_round, epochs=epochs)
        network = cast(GIN, model)
        draw = torch_generator(client.config.seed, 0, SERVER, "probe")
        probe = fedsst.probe_graph(network.hidden_channels, settings.probe_mu, draw)
        with torch.no_grad():
            signal = fedsst.structure_signal(
                fedsst.first_layer(network, probe.to(client.device))
            )
        alpha = fedsst.fusion_share(share, settings) if settings.fuses else 0.0
        fused = {
            name: fedsst.fuse(download.tensors[name], tensor.cpu(), alpha)
            for name, tensor in self.shared_state(client, model).items()
        }
        upload = DescribedWeights(fused, {"signal": signal.cpu()[None]})
        terms = {"epochs": float(epochs), "fusion": alpha}
        return Fit(model, upload, loss, terms=terms)
