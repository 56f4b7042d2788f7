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

from collections.abc import Callable, Sequence

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp
from flower_fgl.methods.moon import MoonSettings
from flower_fgl.nn import Backbone
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["MoonClientApp", "model_contrast", "towards_received"]


def towards_received(received: Tensor, previous: Tensor) -> Tensor:
    """Return ẑ_glob − ẑ_prev of the unit embeddings (..., p) of both fixed models."""
    return F.normalize(received, dim=-1) - F.normalize(previous, dim=-1)


def model_contrast(embedding: Tensor, towards: Tensor, *, tau: float) -> Tensor:
    """Compute each row of the model-contrastive loss, Li et al. 2021, Eq. (3).

    ``−log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )`` of
    z, ``embedding`` (t, p), with gradient, and the constant ``towards`` (t, p) of
    :func:`towards_received`. (t,), at least 0; log 2 if z is equally similar to both.
    """
    # cos(z, g) − cos(z, p) = ẑ·(ĝ − p̂): one product that needs a gradient, not two
    nearer = (F.normalize(embedding, dim=1) * towards).sum(dim=1)
    return F.softplus(-nearer / tau)


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

    stacked = True
    fit = GroupClientApp.fit
    records_embedding = True

    def stack_key(self, client: Client, download: Weights) -> bool:
        """Separate clients in their first round: they have no previous model."""
        return client.state.has_group("model")

    def penalties(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> Callable[[], Tensor] | None:
        """Return a function for μ times the contrastive term of the last embedding."""
        assert isinstance(model, RecordingBackbone)
        settings: MoonSettings = group.config.method_config
        if not settings.mu or not self.stack_key(group.clients[0], downloads[0]):
            return None
        inputs = group.inputs
        are_some = settings.nodes == "train" and inputs.pairs is None
        rows = group.rows if are_some else group.all_rows
        previous = RecordingBackbone(group.build_model(group.stored()))
        fixed = towards_received(model.at_rest(inputs), previous.at_rest(inputs))
        towards = rows.pick(fixed)

        def term() -> Tensor:
            z, now = rows.embedded(model)
            direction = towards if now is rows else now.pick(fixed)
            loss = model_contrast(z, direction, tau=settings.tau)
            return float(settings.mu) * now.mean(loss)

        return term
