"""Server half of DENSE: distil the clients' models into one, in a single round."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.methods.dense import DenseSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.distiller import Distiller
from flower_fgl.strategies.fedavg import FedAvg, common_model, draw_model

__all__ = ["Dense"]


class Dense(FedAvg):
    """Collect the trained models, distil them, and let every client fine-tune.

    Notes
    -----
    1. The single round has two exchanges. The first sends the initial weights and collects
       the trained ones; the second sends the distilled model and returns scores.
    2. The backbones have no BatchNorm, so the generator's term on its statistics is left
       out.
    3. The student starts from the mean of the clients' weights.
    4. The server runs on its CPU. The pool of generated nodes takes 4·E·b·d bytes for E
       epochs and batches of b nodes.
    """

    config: RunConfig[DenseSettings]
    scores_uploads = False
    distiller: ClassVar[type[Distiller]] = Distiller

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Average the models, then distil them into the average."""
        super().aggregate(server_round, uploads)
        self.contributors = list(uploads)
        states = [upload.payload.tensors for upload in uploads.values()]
        student, *models = (
            self.network_of(state) for state in (self.weights.tensors, *states)
        )
        seed = self.config.seed
        distiller = self.distiller(
            models,
            student,
            (self.federation.num_features, self.federation.num_classes),
            self.config.method_config,
            generator=torch_generator(seed, server_round, SERVER, "generated"),
            seed=derive_seed(seed, server_round, SERVER, "distillation"),
        )
        self.log(**distiller.run())
        state = {n: t.detach().contiguous() for n, t in student.state_dict().items()}
        self.weights = Weights(state)

    def network_of(self, state: Mapping[str, Tensor]) -> Backbone:
        """Build the backbone with some weights."""
        with seeded(0):  # the weights are overwritten
            name = common_model(self.config, self.federation)
            network = draw_model(self.config, self.federation, name)
        network.load_state_dict({n: torch.as_tensor(t) for n, t in state.items()})
        return network

    def complete_round(self, server_round: int) -> bool:
        """Send the distilled model; clients fine-tune it and reply with scores."""
        # the model of the upload is not the one to score
        return self.train_again(server_round, self.contributors, "finetune")

    def finish(self) -> None:
        """Do nothing: the clients have fine-tuned."""
