"""FedAvg's server half, which FedProx shares.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flower_fgl.checkpoints import Snapshot
from flower_fgl.errors import RunError
from flower_fgl.nn import build_model, state_shapes
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.seeds import SERVER, derive_seed, seeded
from flower_fgl.strategies.averaging import mean_of_sums, weighted_mean
from flower_fgl.strategies.base import FglStrategy, Upload
from flower_fgl.strategies.rounds import RoundLog

__all__ = ["FedAvg"]


class FedAvg(FglStrategy):
    """Average the clients' weights, Algorithm 1.

    Notes
    -----
    1. With ``finetune-epochs`` > 0 one more exchange follows the last round: every client
       trains the final model further on its own graph and keeps the epoch that is best
       on its validation nodes. It is reported as ``finetuned`` and never takes part in
       the choice of the best round.
    """

    down = Weights
    up: ClassVar[type[Payload]] = Weights

    def prepare(self) -> None:
        """Build the initial model; all clients must have its architecture."""
        models = {client.model for client in self.federation.clients.values()}
        if len(models) > 1:
            raise RunError(
                f"{self.config.method} averages weights, so all clients need one model, "
                f"got {sorted(models)}. Use a single name in model, or a method that "
                "allows several."
            )
        config = self.config
        with seeded(derive_seed(config.seed, 0, SERVER, "init")), torch.no_grad():
            model = build_model(
                models.pop(),
                in_channels=self.federation.num_features,
                hidden_channels=config.hidden_channels,
                num_classes=self.federation.num_classes,
                num_layers=config.num_layers,
                dropout=config.dropout,
                readout=config.classifies_graphs,
            )
        self.weights = Weights(
            {name: tensor.detach() for name, tensor in model.state_dict().items()}
        )
        self.shapes = state_shapes(model)
        self.width = model.hidden_channels

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Send the aggregated weights."""
        return self.weights

    def upload_spec(self, partition_id: int) -> Mapping[str, tuple[int, ...]]:
        """Expect the names and shapes of the aggregated weights."""
        return self.shapes

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Replace the weights by the weighted mean of the uploads."""
        self.weights = Weights(
            weighted_mean(
                [upload.payload.tensors for upload in uploads.values()],
                [upload.num_examples for upload in uploads.values()],
            )
        )

    def aggregate_sums(
        self,
        server_round: int,
        sums: Mapping[str, Tensor],
        weights: Mapping[int, float],
    ) -> None:
        """Replace the weights by ``Σ n_k θ_k / Σ n_k``.

        Raises
        ------
        PayloadError
            If Σ n_k is not what the clients said of themselves before round 1.
        """
        self.weights = Weights(mean_of_sums(sums, sum(weights.values()), self.shapes))

    def global_state(self) -> Mapping[str, Tensor]:
        """Return the aggregated weights."""
        return self.weights.tensors

    def server_state(self) -> Snapshot:
        """Keep the aggregated weights."""
        return Snapshot(self.weights.tensors)

    def load_server_state(self, state: Snapshot) -> None:
        """Take the weights back; names and shapes must be the model's."""
        found = {name: tuple(tensor.shape) for name, tensor in state.tensors.items()}
        if found != self.shapes:
            raise ValueError(f"weights of shapes {found}, expected {self.shapes}")
        self.weights = Weights({name: state.tensors[name] for name in self.shapes})

    def finish(self) -> None:
        """Fine-tune at every client if asked to."""
        if not self.config.hyper.finetune_epochs:
            return
        number = self.config.rounds + 1
        self._round = RoundLog(number, phase="finetune")
        able = self.federation.trainable
        messages = self.train_messages(number, able, action="finetune", is_scored=True)
        uploads = self.read_uploads(self._by_partition(self.exchange(messages)))
        # whoever could not fine-tune scores what it has: all clients are in the table
        rest = self.evaluate_messages(number, is_local=True, is_global=False)
        self.evaluate(number, rest)
        self._round.close(is_ok=bool(uploads), min_replies=self.config.min_replies)
        self.record_round()
