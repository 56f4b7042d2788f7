"""Client half of FedKD: an own teacher and the shared student learn from each other."""

from typing import Any

from torch import Tensor

from flower_fgl.algorithms import fedkd
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state, refuse_non_finite
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.fedkd import FedKDSettings
from flower_fgl.nn import Backbone, build_model, state_shapes
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.weights import FactoredWeights

__all__ = ["FedKDClientApp"]

Client = AnyClient[FedKDSettings]

MOST = 10.0
"""Largest norm of a gradient, of teacher, student and W^h each, as in the published
code."""


class FedKDClientApp(FglClientApp):
    """Train teacher and student together, upload the student, keep the teacher.

    Notes
    -----
    1. The teachers of one backbone start from the same weights, W^h of all clients too.
    2. A client scores its teacher.
    """

    down = FactoredWeights
    up = FactoredWeights

    def student(self, client: Client) -> Backbone:
        """Build the student; its weights are overwritten."""
        config, data = client.config, client.data
        student = build_model(
            config.method_config.student,
            in_channels=data.graph.num_features,
            hidden_channels=config.hidden_channels,
            num_outputs=data.num_classes,
            num_layers=config.num_layers,
            dropout=config.dropout,
            readout=config.graph_readout,
            initialise=False,
        )
        return client.settle(student)

    def download_spec(self, client: Client) -> Shapes:
        """Return the shapes of the student's weights."""
        key = ("student", client.config.method_config.student)
        return client.cached(key, lambda: state_shapes(self.student(client)))

    def pair(self, client: Client, download: FactoredWeights) -> fedkd.MutualPair:
        """Join the client's teacher and W^h with the received student."""
        teacher = client.own_model()
        student = self.student(client)
        load_state(student, download.tensors)
        with seeded(derive_seed(client.config.seed, 0, SERVER, "projection")):
            pair = fedkd.MutualPair(teacher, student).to(client.device)
        load_state(pair.projection, client.state.group("projection"))
        pair.clipped = [pair.teacher, pair.student, pair.projection], MOST
        return pair

    def fit(self, client: Client, server_round: int, download: FactoredWeights) -> Fit:
        """Train both for ``local-epochs`` and send the student in factors."""
        config, pair = client.config, self.pair(client, download)
        classes = client.data.num_classes
        terms: dict[str, Tensor] = {}

        def data_loss(rows: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            z, other, h, mapped = pair.split(rows, classes)
            loss, parts = fedkd.mutual_loss(z, other, h, mapped, labels)
            terms.update(parts)
            return loss

        loss = client.train(pair, server_round, data_loss=data_loss)
        client.state.set_group("projection", pair.projection.state_dict())
        refuse_non_finite(pair.student.state_dict())
        settings = config.method_config
        energy = fedkd.energy_threshold(
            server_round,
            config.rounds,
            start=settings.energy_start,
            end=settings.energy_end,
        )
        upload = FactoredWeights(fedkd.compress(pair.student.state_dict(), energy))
        numbers = {name: float(term) for name, term in terms.items()}
        return Fit(pair.teacher, upload, loss, terms=numbers)

    def personal_model(self, client: Client, download: Any) -> Backbone:
        """Return the teacher trained last, or the initial one."""
        return client.own_model()
