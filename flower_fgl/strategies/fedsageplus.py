"""FedSage+'s server half: FedAvg, after the clients' generators judged each other.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS
2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import RecordDict

from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.fedsageplus import (
    GENERATE,
    JUDGE,
    FeatureGradient,
    GeneratorState,
    generator_shapes,
)
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.fedavg import FedAvg
from flower_fgl.strategies.rounds.round_log import RoundLog

__all__ = ["FedSagePlus", "turn_offsets"]

Read = TypeVar("Read", bound=Payload)


class FedSagePlus(FedAvg):
    """Let clients train generators of missing neighbours, then average their models.

    Notes
    -----
    1. The paper's client i meets every other client j in every step of its generator. Here
       ``peers`` clients judge a generator each round, in turn, so that all have done so
       after (K − 1)/``peers`` rounds; their gradients are averaged where the paper adds
       them up. Each gradient is of the weights that began the round, and is added to the
       local gradient of all steps of a round.
    2. Generator training is written down as round 0, phase ``generate``. A client that
       fails there, or loses its memory later, takes part in the rounds all the same, with
       its graph as it is; its log says so.
    """

    def prepare(self) -> None:
        """Build the initial model; train the generators unless the run goes on.

        Raises
        ------
        RunError
            If the clients' models differ, or too few trained a generator.
        """
        super().prepare()
        if self.config.method_config.gen_rounds and not self.is_resumed:
            self._round = RoundLog(0, is_scored=False, phase=GENERATE)
            self.generate()
            self._round.close(is_ok=True, min_replies=0)
            self.record_round()

    def generate(self) -> None:
        """Run the generators' rounds; in the last one every client mends its graphs.

        Raises
        ------
        RunError
            If fewer than ``min-replies`` clients trained their generator.
        """
        clients = self.federation.trainable
        nothing = FeatureGradient({})
        feedback = dict.fromkeys(clients, nothing)
        shapes = self.generator_shapes
        spec = (
            shapes,
            self.config.hidden_channels,
            self.config.method_config.max_neighbours,
        )
        for step in range(1, self.config.method_config.gen_rounds + 1):
            is_shown = step < self.config.method_config.gen_rounds
            answers = self.ask(step, GENERATE, feedback, brings_upload=is_shown)
            if len(answers) < self.config.min_replies:
                reasons = sorted({failure.reason for failure in self._round.failures})
                raise RunError(
                    f"{len(answers)} of {len(clients)} clients trained their generator in "
                    f"round {step} of {self.config.method_config.gen_rounds}, min-replies is "
                    f"{self.config.min_replies}. {'; '.join(reasons)}"
                )
            if is_shown:
                found = self.judge(step, self._read(answers, GeneratorState, spec))
                feedback = {pid: found.get(pid, nothing) for pid in clients}

    def judge(
        self, step: int, states: Mapping[int, GeneratorState]
    ) -> dict[int, FeatureGradient]:
        """Have other clients find gradients for the generators.

        Parameters
        ----------
        step : int
            Round of generator training, from 1.
        states : mapping of int to GeneratorState
            By the partition-id of whose generator it is.

        Returns
        -------
        dict of int to FeatureGradient
            Mean over the judges that answered; generators that none judged are missing.
        """
        clients = self.federation.trainable
        number = len(clients)
        found: dict[int, list[Mapping[str, Any]]] = {}
        for offset in turn_offsets(step, number, self.config.method_config.peers):
            author = {
                clients[(place + offset) % number]: pid
                for place, pid in enumerate(clients)
                if pid in states and len(states[pid].counts)
            }
            asked = {judge: states[pid] for judge, pid in sorted(author.items())}
            answers = self.ask(step, JUDGE, asked, brings_upload=True)
            read = self._read(answers, FeatureGradient, self.generator_shapes)
            for judge, gradient in read.items():
                if gradient.tensors:
                    found.setdefault(author[judge], []).append(gradient.tensors)
                else:
                    self.drop(judge, "it sent no gradient")
        return {
            pid: FeatureGradient(weighted_mean(each, [1.0] * len(each)))
            for pid, each in found.items()
        }

    @property
    def generator_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of fGen's weights."""
        return generator_shapes(
            self.config.method_config,
            in_channels=self.config.hidden_channels,
            num_features=self.federation.num_features,
        )

    def _read(
        self, answers: dict[int, RecordDict], kind: type[Read], spec: Any
    ) -> dict[int, Read]:
        """Check answers and give their memory back one by one; name the malformed."""
        read = {}
        for pid in list(answers):
            try:
                read[pid] = kind.from_record(answers.pop(pid), spec)
            except PayloadError as error:
                self.drop(pid, str(error))
        return read


def turn_offsets(step: int, num_clients: int, peers: int) -> Sequence[int]:
    """Say who judges whom: client k is judged by client (k + offset) mod K.

    Parameters
    ----------
    step : int
        Round of generator training, from 1.
    num_clients : int
        K.
    peers : int
        Judges of each generator a round; 0: all others.

    Returns
    -------
    sequence of int in [1, K)
        In turn over the rounds; empty for a client alone.
    """
    others = num_clients - 1
    asked = min(peers or others, others)
    return [1 + ((step - 1) * asked + turn) % others for turn in range(asked)]
