"""Client half of FedPer: train the received body together with the client's own head.

Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019.
"""

from collections.abc import Mapping, Sequence

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.nn import Backbone
from flower_fgl.nn.state import classifier_state, encoder_state
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedPerClientApp"]


class FedPerClientApp(GroupClientApp):
    """Train body and head, upload the body; the heads start from the same weights."""

    stacked = True
    down = Weights
    up = Weights

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights of the body."""
        return encoder_state(client.shared(client.state_shapes()))

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Join the received body and each client's head, and train."""
        model = self.assemble(group, downloads)
        losses = self.train_parts(group, model)
        return group.fit_of_weights(model, encoder_state(model.state_dict()), losses)

    def assemble(self, group: Group, downloads: Sequence[Weights]) -> Backbone:
        """Combine the received body with each client's head, or with the initial one."""
        initial, kept = group.initial_state(), group.clients[0].local_names()
        states = [
            initial
            | classifier_state(own)
            | {name: tensor for name, tensor in own.items() if name in kept}
            | dict(download.tensors)
            for own, download in zip(group.stored(), downloads, strict=True)
        ]
        return group.build_model(states)

    def train_parts(self, group: Group, model: Backbone) -> list[float]:
        """Train body and head jointly; return the losses."""
        return group.train(model)

    def first_model(self, client: Client, download: Weights | None) -> Backbone | None:
        """Return the received body with the initial head."""
        return None if download is None else self.assemble(Group(client), [download])
