"""The aggregated model of the best validation round, and what a file says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.strategies.federation import Federation

__all__ = ["BestModel", "describe_model"]


@dataclass
class BestModel:
    """The best aggregated model so far.

    Parameters
    ----------
    score : tuple of int and float, or None
        Validation nodes and accuracy, see :meth:`RoundLog.validation`; ``None`` before
        any round with both a score and an aggregated model.
    state : dict of str to Tensor
        Its weights.
    server_round : int
        Its round.
    """

    score: tuple[int, float] | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    server_round: int = 0

    def offer(
        self,
        server_round: int,
        score: tuple[int, float] | None,
        state: Mapping[str, Tensor] | None,
    ) -> None:
        """Keep a copy of a round's model if none was better.

        As in the summary, rounds that scored fewer validation nodes do not compete.

        Parameters
        ----------
        server_round : int
            The round.
        score : tuple of int and float, or None
            Its validation score; ``None`` without one.
        state : mapping of str to Tensor, or None
            The aggregated model; ``None`` if the method has none.
        """
        if state is None or score is None:
            return
        if self.score is None or score >= self.score:
            self.score = score
            self.state = {k: v.clone() for k, v in state.items()}
            self.server_round = server_round


def describe_model(
    config: RunConfig, federation: Federation, server_round: int
) -> ModelCard:
    """Describe an aggregated model of a run.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.
    federation : Federation
        Its clients.
    server_round : int
        The round that the model is of.

    Returns
    -------
    ModelCard
    """
    scales = {client.scale for client in federation.clients.values()}
    is_lost = "columns" in scales or len(scales) > 1  # each client has its own
    return ModelCard(
        method=config.method,
        model=next(iter(federation.clients.values())).model,
        num_features=federation.num_features,
        hidden_channels=config.hidden_channels,
        num_layers=config.num_layers,
        class_names=federation.class_names,
        classifies_graphs=config.classifies_graphs,
        scaling="lost" if is_lost else scales.pop(),
        round=server_round,
    )
