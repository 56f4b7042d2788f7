"""Client half of methods whose clients share some layers and keep the others."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.nn.models import hidden_names
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.fedavg import Weights

__all__ = ["HiddenLayersClientApp", "PartlySharedClientApp"]


class PartlySharedClientApp(GroupClientApp):
    """Train all layers, upload the shared ones, keep the others.

    The kept layers of all clients start from the same weights, drawn from the seed.
    """

    down: ClassVar[type[Payload]] = Weights
    up: ClassVar[type[Payload]] = Weights

    @abstractmethod
    def shared_names(self, client: Client) -> Collection[str]:
        """Return the names of the shared tensors in the state of the network."""

    def initial_model(self, client: Client) -> Backbone:
        """Build the network with initial weights."""
        return client.build_model(initialise=True)

    def state_shapes(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the state of the network of :meth:`build`."""
        key = ("network shapes", type(self), client.model_name)
        return client.cached(key, lambda: state_shapes(self.build(client)))

    def download_spec(self, client: Client) -> Any:
        """Return the shapes of the shared tensors."""
        names = self.shared_names(client)
        shapes = self.state_shapes(client)
        return {name: shape for name, shape in shapes.items() if name in names}

    def assemble(self, group: Group, downloads: Sequence[Any]) -> Backbone:
        """Join the received layers and each client's own, or the initial ones."""
        client, own, initial = group.clients[0], group.stored(), dict[str, Tensor]()
        if not all(own):  # drawing them takes several times as long as building
            initial = self.initial_model(client).state_dict()
        pairs = zip(own, downloads, strict=True)
        states = [{**(kept or initial), **one.tensors} for kept, one in pairs]
        return group.load(self.build(client), states)

    def shared_state(self, client: Client, model: Backbone) -> dict[str, Tensor]:
        """Return the shared tensors of the network."""
        names = self.shared_names(client)
        return {n: t.detach() for n, t in model.state_dict().items() if n in names}

    def fit_group(self, group: Group, downloads: Sequence[Any]) -> GroupFit:
        """Join the layers, and train."""
        model = self.assemble(group, downloads)
        losses = self.train_parts(group, model)
        shared = self.shared_state(group.clients[0], model)
        return group.fit_of_weights(model, shared, losses)

    def train_parts(self, group: Group, model: Backbone) -> list[float]:
        """Train all layers for ``local-epochs``; return the losses."""
        return group.train(model)

    def first_model(self, client: Client, download: Any) -> Backbone | None:
        """Return the received layers, joined with the initial ones."""
        return None if download is None else self.assemble(Group(client), [download])


class HiddenLayersClientApp(PartlySharedClientApp):
    """Share the layers of a backbone between its input layer and its head."""

    def shared_names(self, client: Client) -> Collection[str]:
        """Return the names of these layers."""
        return hidden_names(
            client.model_name,
            hidden_channels=client.config.hidden_channels,
            num_layers=client.config.num_layers,
            readout=client.config.classifies_graphs,
        )
