"""Client half of FedAux: train weights and direction together."""

from torch import nn

from flower_fgl.algorithms.fedaux import DIRECTION, FedAuxNet
from flower_fgl.algorithms.fedpub import MaskedBackbone
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fedpub import MASK, kept_masks
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.methods.fedaux import FedAuxSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedAuxClientApp"]

Client = AnyClient[FedAuxSettings]


class FedAuxClientApp(FedAvgClientApp):
    """Train the received network by the cross-entropy and upload all of it.

    Notes
    -----
    1. The direction is not projected to unit length. The paper's theorem projects it,
       its algorithm and the published code do not.
    2. There is no pull to the received weights, as in the code of the published log.
    3. With ``fedaux.mask`` a private mask multiplies every weight but the direction, as in
       the published code: FED-PUB's mask without its penalties. No entry is pruned.
    """

    def build(self, client: Client) -> FedAuxNet:
        """Build FedAux's network."""
        return client.build_own(FedAuxNet)

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train as in FedAvg, or weights and private mask together."""
        if not client.config.method_config.mask:
            return super().fit(client, server_round, download)
        network = client.receive(download.tensors, self.build)
        model = self.masked(client, network)
        loss = client.train(model, server_round)
        names = dict(network.named_parameters())
        client.state.set_group(MASK, dict(zip(names, model.masks, strict=True)))
        personal = self.build(client)
        load_state(personal, model.eval().effective())
        return Fit(personal, Weights(network.state_dict()), loss)

    def masked(self, client: Client, network: Backbone) -> MaskedBackbone:
        """Return the network under the client's masks, which are 1 at first."""
        names = [name for name, _ in network.named_parameters()]
        masks = [
            nn.Parameter(mask, requires_grad=name != DIRECTION)
            for name, mask in zip(names, kept_masks(client, network), strict=True)
        ]
        return MaskedBackbone(network, masks, threshold=0.0)

    def received_model(self, client: Client, download: Weights) -> Backbone:
        """Return the received network, under the client's mask if it has one."""
        network = client.receive(download.tensors, self.build)
        if client.config.method_config.mask:
            load_state(network, self.masked(client, network).eval().effective())
        return network
