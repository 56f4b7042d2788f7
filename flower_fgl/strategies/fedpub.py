"""Server half of FED-PUB: a separate weighted average for each client.

Baek et al., "Personalized Subgraph Federated Learning", ICML 2023.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
o_i                    ``embeddings[i]``
a_ij                   ``client_attention(...)[i, j]``
w_i                    ``FedPub.personal[i]``
τ                      ``fed-pub.tau``
=====================  ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.model_spec import read_model
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedpub import EmbeddedWeights
from flower_fgl.runs.checkpoints import Snapshot
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, common_model

__all__ = ["FedPub", "client_attention", "mix_states"]


def client_attention(embeddings: Tensor, *, tau: float) -> Tensor:
    """Compute a_ij = e^{τ·cos(o_i, o_j)} / Σ_l e^{τ·cos(o_i, o_l)}, Baek et al., Eq. (4).

    Parameters
    ----------
    embeddings : Tensor of shape (K, p), float
        o_i; a zero row has similarity 0 to every row, itself included.
    tau : float, at least 0
        0 gives the plain mean; with large values each client keeps its own weights.

    Returns
    -------
    Tensor of shape (K, K)
        Each row sums to 1.
    """
    unit = F.normalize(embeddings, dim=1)
    return (tau * (unit @ unit.T)).softmax(dim=1)


def mix_states(
    states: Sequence[Mapping[str, Tensor]], attention: Tensor
) -> list[dict[str, Tensor]]:
    """Compute w_i = Σ_j a_ij θ_j for every client, Baek et al., Eq. (3).

    Parameters
    ----------
    states : sequence of mapping of str to Tensor, float32
        θ_j, with equal names and shapes.
    attention : Tensor of shape (K, K), float32
        a_ij.

    Returns
    -------
    list of dict of str to Tensor
        w_i, length K.
    """
    mixed: list[dict[str, Tensor]] = [{} for _ in states]
    for name in states[0]:
        rows = torch.stack([state[name] for state in states])  # (K, …)
        made = torch.tensordot(attention, rows, dims=1)
        for state, tensor in zip(mixed, made, strict=True):
            state[name] = tensor
    return mixed


class FedPub(FedAvg):
    """Average weights of clients whose models give similar outputs on a random graph.

    Notes
    -----
    1. In the paper the server keeps the random graph. Here each client draws it from the
       run's seed, which saves sending the 4·500·d bytes of the graph.
    2. A client that was not in the last round starts from the average of that round's
       uploads, weighted by ``weight-by``.
    3. There is no global model: that average is never evaluated.
    """

    down = Weights
    up = EmbeddedWeights

    def prepare(self) -> None:
        """Build the initial model."""
        super().prepare()
        named = read_model(common_model(self.config, self.federation)).hidden_channels
        self.width = named or self.config.hidden_channels
        self.personal: dict[int, Weights] = {}

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Return w_i, or the average for a client that was not in the last round."""
        return self.personal.get(partition_id, self.weights)

    def upload_spec(self, partition_id: int) -> tuple[Shapes, int]:  # type: ignore[override]
        """Return the shapes of the weights and the width of the embedding."""
        return self.shapes, self.width

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Mix the uploads for each client by the similarity of their embeddings."""
        super().aggregate(server_round, uploads)
        payloads = [upload.payload for upload in uploads.values()]
        attention = client_attention(
            torch.stack([payload.embedding for payload in payloads]),
            tau=self.config.method_config.tau,
        )
        mixed = mix_states([payload.tensors for payload in payloads], attention)
        self.personal = dict(zip(uploads, map(Weights, mixed), strict=True))

    def global_state(self) -> None:
        """Return ``None``: every client has its own model."""

    def server_state(self) -> Snapshot:
        """Return the average and every w_i."""
        parts = {
            f"client-{pid}": Snapshot(w.tensors) for pid, w in self.personal.items()
        }
        clients = Snapshot(values={"clients": list(self.personal)})
        return Snapshot.join(
            {"mean": super().server_state(), "order": clients, **parts}
        )

    def load_server_state(self, state: Snapshot) -> None:
        """Restore the average and every w_i."""
        super().load_server_state(state.part("mean"))
        self.personal = {
            pid: Weights(state.part(f"client-{pid}").tensors)
            for pid in state.part("order").values["clients"]
        }

    def finish(self) -> None:
        """Do nothing: the clients' models are already personalized."""
