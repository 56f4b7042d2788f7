"""FedSage+'s server half: generator training across clients, then FedAvg."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.protocols.base import Empty, Shapes
from flower_fgl.protocols.fedsageplus import (
    GENERATE,
    JUDGE,
    FeatureGradient,
    GeneratorState,
    generator_shapes,
)
from flower_fgl.strategies.aggregation import weighted_mean
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedSagePlus", "turn_offsets"]


log = logging.getLogger(__name__)


class FedSagePlus(FedAvg):
    """Let clients train generators of missing neighbours, then average their models.

    Notes
    -----
    1. In the paper every other client j evaluates client i's generator in every step. Here
       ``peers`` clients evaluate a generator each round, in turn, so that all have done so
       after (K − 1)/``peers`` rounds. Their gradients are averaged; the paper sums them.
       Each gradient is taken at the weights that began the round and added to the local
       gradient of all steps of a round.
    2. Generator training is recorded as round 0, phase ``generate``. A client that fails
       there, or loses its state later, still takes part in the rounds, with its graph
       unmended; its log says so.
    3. A client that once sends no reply within ``round-timeout`` gets no further message
       in this phase. Otherwise it could delay round 1 by ``round-timeout`` in each
       exchange, 19 times by default. A client that answers with an error is asked again.
    4. An empty gradient means that the generator gives no finite one. The client that
       trains it fails if two judges or more say so, and none sends a gradient: a single
       judge may lie. With ``upload-noise`` a client sends zeros with noise instead, and
       an empty gradient is a failure of the client that sent it.
    """

    config: RunConfig[FedSagePlusSettings]

    def prepare(self) -> None:
        """Build the initial model; train the generators unless the run is resumed."""
        super().prepare()
        if self.config.method_config.gen_rounds and not self.is_resumed:
            with self.phase(GENERATE, 0, min_replies=0):
                self.generate()

    def generate(self) -> None:
        """Run the rounds of generator training; in the last one clients mend their graphs.

        A RunError says that fewer than ``min-replies`` clients trained their generator.
        """
        clients, settings = self.federation.trainable, self.config.method_config
        nothing = FeatureGradient({})
        found: dict[int, FeatureGradient] = {}
        for step in range(1, settings.gen_rounds + 1):
            is_shown = step < settings.gen_rounds
            feedback = {pid: found.get(pid, nothing) for pid in self.responsive}
            states: dict[int, Any] = self.messenger.query(
                step,
                GENERATE,
                feedback,
                # in the last round clients only mend their graphs
                GeneratorState if is_shown else Empty,
                self.state_spec,
                brings_upload=is_shown,
            )
            if len(states) < self.config.min_replies:
                reasons = sorted({failure.reason for failure in self.loop.log.failures})
                raise RunError(
                    f"{len(states)} of {len(clients)} clients trained their generator "
                    f"in round {step} of {settings.gen_rounds}, "
                    f"min-replies is {self.config.min_replies}. {'; '.join(reasons)}"
                )
            if is_shown:
                found = self.judge(step, states)

    def state_spec(self, partition_id: int) -> tuple[Shapes, int, int, int]:
        """Return what the generator that a client shows is checked against."""
        return (
            self.generator_shapes,
            self.config.hidden_channels,
            self.config.method_config.max_neighbours,
            self.federation.clients[partition_id].num_nodes,
        )

    def check_gradient(self, _: int, gradient: FeatureGradient) -> FeatureGradient:
        """Refuse an empty gradient if uploads are noised."""
        if not gradient.tensors and self.config.upload_noise:
            raise PayloadError("it sent no gradient")
        return gradient

    def judge(
        self, step: int, states: Mapping[int, GeneratorState]
    ) -> dict[int, FeatureGradient]:
        """Return the mean gradient of other clients for each generator, if there is any."""
        clients = self.federation.trainable
        number = len(clients)
        found: dict[int, list[Mapping[str, Any]]] = {}
        empty: dict[int, list[int]] = {}
        offsets = turn_offsets(step, number, self.config.method_config.peers)
        # a client answers every number once, so each exchange has its own
        first = 1 + (step - 1) * len(offsets)
        for exchange, offset in enumerate(offsets, start=first):
            responsive = self.responsive
            turns = {
                clients[(place + offset) % number]: pid
                for place, pid in enumerate(clients)
                if pid in responsive and pid in states and len(states[pid].counts)
            }
            author = {j: pid for j, pid in turns.items() if j in responsive}
            asked = {judge: states[pid] for judge, pid in sorted(author.items())}
            sent = self.messenger.query(
                exchange,
                JUDGE,
                asked,
                FeatureGradient,
                lambda _: self.generator_shapes,
                brings_upload=True,
            )
            read = self.messenger.read_each(sent, self.check_gradient)
            for judge, gradient in read.items():
                if gradient.tensors:
                    found.setdefault(author[judge], []).append(gradient.tensors)
                else:
                    empty.setdefault(author[judge], []).append(judge)
        for pid, judges in empty.items():
            named = " and ".join(f"client {judge}" for judge in sorted(judges))
            reason = f"its generator gives no finite gradient at {named}"
            if len(judges) > 1 and pid not in found:
                self.messenger.drop(pid, reason)
            else:
                log.warning("Client %d stays, although %s.", pid, reason)
        return {
            pid: FeatureGradient(weighted_mean(each, [1.0] * len(each)))
            for pid, each in found.items()
        }

    @property
    def responsive(self) -> list[int]:
        """Partition-ids of the clients that were never silent in this phase, ascending."""
        failures = self.loop.log.failures
        silent = {failure.partition_id for failure in failures if failure.is_silent}
        return [pid for pid in self.federation.trainable if pid not in silent]

    @cached_property
    def generator_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of fGen's weights."""
        return generator_shapes(
            self.config.method_config,
            in_channels=self.config.hidden_channels,
            num_features=self.federation.num_features,
        )


def turn_offsets(step: int, num_clients: int, peers: int) -> Sequence[int]:
    """Return the offsets in [1, K) such that client (k + offset) mod K evaluates client k.

    They rotate over the rounds of generator training, from 1; there are none for a single
    client. ``peers`` evaluate each generator in a round, 0: all others.
    """
    others = num_clients - 1
    asked = min(peers or others, others)
    return [1 + ((step - 1) * asked + turn) % others for turn in range(asked)]
