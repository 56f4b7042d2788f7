"""Server half of pFedFSL: mix for each client the models that perform well on its data."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, numpy_generator, seeded
from flower_fgl.methods.pfedfsl import PFedFSLSettings
from flower_fgl.nn import state_shapes
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.weights import CandidateModels, ScoredModel
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.fedavg import draw_model

__all__ = ["PFedFSL", "mixing_weights"]


def mixing_weights(losses: Tensor, tau: float = 1.0) -> Tensor:
    """Weight models by their losses (1 + m,) on a client's data, ``softmax(−loss / τ)``."""
    return torch.softmax(-losses / tau, dim=0)


class PFedFSL(FglStrategy):
    """Send each client a mixture of its own and q other models, and new candidates.

    Notes
    -----
    1. In every round new candidates are drawn uniformly from the last uploads of the
       other clients. Before the first upload there are none.
    2. The client's own model is in the mixture, with its own loss. A mixture of the
       candidates alone would lose the client's training of the round.
    3. The mixture uses each candidate as it was when the client evaluated it.
    4. A round's log has the clients' mean weight of their own model (``own_weight``) and
       of the heaviest candidate (``heaviest_candidate``). Both are 1 / (1 + m) if all m
       candidates count alike.
    """

    config: RunConfig[PFedFSLSettings]
    down = CandidateModels
    up = ScoredModel
    kept = ("models", "starts")

    def prepare(self) -> None:
        """Build the initial model, the same for all clients."""
        config, federation = self.config, self.federation
        width = config.hidden_channels
        with seeded(derive_seed(config.seed, 0, SERVER, "init")), torch.no_grad():
            model = draw_model(config, federation, num_outputs=width)
        self.initial = dict(model.state_dict())
        self.shapes = state_shapes(model)
        self.models: dict[int, Mapping[str, Tensor]] = {}
        self.starts: dict[int, Mapping[str, Tensor]] = {}

    def candidates(self, server_round: int, partition_id: int) -> list[int]:
        """Draw the clients whose models a client evaluates in a round, ascending."""
        peers = [pid for pid in sorted(self.models) if pid != partition_id]
        number = min(self.config.method_config.candidates, len(peers))
        generator = numpy_generator(
            self.config.seed, server_round, partition_id, "candidates"
        )
        return sorted(int(p) for p in generator.choice(peers, number, replace=False))

    def download(self, server_round: int, partition_id: int) -> CandidateModels:
        """Return the client's mixture (at first the initial model) and its candidates."""
        start = self.starts.get(partition_id, self.initial)
        drawn = self.candidates(server_round, partition_id)
        models = [start, *(self.models[pid] for pid in drawn)]
        return CandidateModels(
            {name: torch.stack([m[name] for m in models]) for name in self.shapes}
        )

    def upload_spec(self, partition_id: int) -> tuple[Shapes, tuple[int]]:
        """Return the shapes of the model and of its and the candidates' losses."""
        sent = self.candidates(self.loop.log.number, partition_id)
        return self.shapes, (1 + len(sent),)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Mix a new start for each client that replied."""
        own, heaviest = [], []
        for pid, upload in uploads.items():
            drawn = self.candidates(server_round, pid)
            models = [upload.payload.tensors, *(self.models[p] for p in drawn)]
            tau: float = self.config.method_config.tau
            weights = mixing_weights(upload.payload.losses, tau)
            if drawn:
                own.append(float(weights[0]))
                heaviest.append(float(weights[1:].max()))
            self.starts[pid] = weighted_mean(models, weights.tolist())
        if own:
            self.log(
                own_weight=sum(own) / len(own),
                heaviest_candidate=sum(heaviest) / len(heaviest),
            )
        self.models |= {pid: upload.payload.tensors for pid, upload in uploads.items()}
