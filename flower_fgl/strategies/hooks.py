"""The hooks that a method's server half overrides, with their defaults."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from flwr.serverapp.strategy import Strategy
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.sampling import num_sampled
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.protocols.base import Payload
from flower_fgl.runs.checkpoints import Checkpoints, Snapshot
from flower_fgl.strategies.federation import Federation

__all__ = ["Recorder", "ServerHooks", "Upload"]


class Recorder(Protocol):
    """The writer of the run folder, as a strategy uses it."""

    def describe_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add one line per client before round 1."""

    def append_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add one line per client."""

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Add the line of a round."""

    def append_release(self, row: Mapping[str, Any]) -> None:
        """Add the line of an exchange that asks for noisy uploads."""


@dataclass(frozen=True)
class Upload:
    """A checked upload of one client.

    Parameters
    ----------
    payload : Payload
        Its content.
    num_examples : float
        The client's weight by the setting ``weight-by``.
    """

    payload: Any
    num_examples: float


class ServerHooks(Strategy):
    """The hooks of a server half, and the attributes they read.

    A method sets ``down`` and ``up``, overrides :meth:`prepare`, :meth:`download`,
    :meth:`upload_spec` and :meth:`aggregate`, and others where it differs.

    Parameters
    ----------
    config : RunConfig
        Checked settings.
    recorder : Recorder, optional
        Writer of the run folder.
    checkpoints : Checkpoints, optional
        Where the run's state is written, and the checkpoint it resumes from.
    """

    down: ClassVar[type[Payload]]
    up: ClassVar[type[Payload]]
    scores_uploads: ClassVar[bool] = True
    """Whether the reply that carries an upload also carries the client's scores."""

    federation: Federation
    """The clients; known from :meth:`prepare` on."""

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.checkpoints = checkpoints

    def prepare(self) -> None:
        """Build the server's state; ``self.federation`` is known.

        Runs again when a run resumes, before :meth:`load_server_state`. Exchanges that
        clients need only once are then skipped (``self.is_resumed``).
        """

    @abstractmethod
    def download(self, server_round: int, partition_id: int) -> Payload:
        """Return the payload that a client receives before it trains."""

    def scoring_download(self, server_round: int, partition_id: int) -> Payload:
        """Return the payload from which an untrained client is evaluated."""
        return self.download(server_round, partition_id)

    def upload_spec(self, partition_id: int) -> Any:
        """Return the specification that :meth:`Payload.from_record` checks against."""
        return None

    @abstractmethod
    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Aggregate the uploads of a round, keyed by partition-id, ascending."""

    def num_replies(self, uploads: Mapping[int, Upload]) -> int:
        """Count the uploads that ``min-replies`` compares: by default one a client."""
        return len(uploads)

    def complete_round(self, server_round: int) -> bool:
        """Run further exchanges of a round, after the aggregation and before the scores.

        Returns
        -------
        bool
            Whether the round counts; by default it does.
        """
        return True

    def aggregate_sums(
        self,
        server_round: int,
        sums: Mapping[str, Tensor],
        weights: Mapping[int, float],
    ) -> None:
        """Aggregate the sums of secure aggregation, instead of :meth:`aggregate`.

        A method whose ``up`` is an :class:`AdditivePayload` overrides it.

        Parameters
        ----------
        server_round : int
            Round, from 1.
        sums : mapping of str to Tensor, float64
            Sums of the clients' :meth:`AdditivePayload.summands`.
        weights : mapping of int to float
            Weight (``weight-by``) of each client in the sums, by partition-id.

        Raises
        ------
        PayloadError
            If the sums are impossible; the round fails then.
        """
        raise NotImplementedError(f"{type(self).__name__} needs more than sums.")

    def global_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model, ``None`` if the method has none."""
        return None

    def finish(self) -> None:
        """Run after the last round, e.g. one more exchange."""

    def server_state(self) -> Snapshot:
        """Return the state that :meth:`aggregate` leaves for the following rounds."""
        return Snapshot()

    def load_server_state(self, state: Snapshot) -> None:
        """Restore what :meth:`server_state` returned; called after :meth:`prepare`.

        Raises
        ------
        KeyError, ValueError, RuntimeError
            If the state does not fit.
        """

    def sample(self, server_round: int) -> list[int]:
        """Sample the clients that train: all available, unless the settings say fewer."""
        able = self.available(server_round)
        if self.config.participation == 1 and not self.config.participants:
            return able
        count = max(1, num_sampled(self.config, len(self.federation.trainable)))
        if count >= len(able):
            return able
        generator = numpy_generator(self.config.seed, server_round, SERVER, "sample")
        return sorted(int(p) for p in generator.choice(able, count, replace=False))

    def available(self, server_round: int) -> list[int]:
        """Return the trainable clients that a round may sample, by partition-id."""
        return self.federation.trainable

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.resumed is not None
