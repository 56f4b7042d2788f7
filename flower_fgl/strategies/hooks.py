"""What a method's server half overrides: everything else is the same for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from flwr.serverapp.strategy import Strategy
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.core.settings_validation import num_sampled
from flower_fgl.protocols.base import Payload
from flower_fgl.runs.checkpoints import Checkpoints, Snapshot
from flower_fgl.strategies.federation import Federation

__all__ = ["Recorder", "ServerHooks", "Upload"]


class Recorder(Protocol):
    """Where a strategy writes what happened: the run folder."""

    def append_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add one line per client."""

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Add the line of a round."""

    def append_release(self, row: Mapping[str, Any]) -> None:
        """Add the line of an exchange that asks for noisy uploads."""


@dataclass(frozen=True)
class Upload:
    """What one client sent up.

    Parameters
    ----------
    payload : Payload
        Checked content.
    num_examples : float
        What ``weight-by`` makes the client weigh.
    """

    payload: Any
    num_examples: float


class ServerHooks(Strategy):
    """The hooks of a server half and what they may read.

    A method sets ``down`` and ``up`` and overrides :meth:`prepare`, :meth:`download`,
    :meth:`upload_spec` and :meth:`aggregate`, and others where it differs.

    Parameters
    ----------
    config : RunConfig
        Checked settings.
    recorder : Recorder, optional
        The run folder's writer.
    checkpoints : Checkpoints, optional
        Where the run's state is kept, and where it goes on from.
    """

    down: ClassVar[type[Payload]]
    up: ClassVar[type[Payload]]
    scores_uploads: ClassVar[bool] = True
    """Whether the reply that brings an upload brings the client's scores as well."""

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.checkpoints = checkpoints
        self.federation: Federation

    def prepare(self) -> None:
        """Build the server's state; ``self.federation`` is known.

        Runs again when a run is resumed, before :meth:`load_server_state`; exchanges
        that clients need but once are left out then (``self.is_resumed``).
        """

    @abstractmethod
    def download(self, server_round: int, partition_id: int) -> Payload:
        """Return what a client gets before it trains."""

    def scoring_download(self, server_round: int, partition_id: int) -> Payload:
        """Return what a client that never trained scores; by default :meth:`download`."""
        return self.download(server_round, partition_id)

    def upload_spec(self, partition_id: int) -> Any:
        """Return what :meth:`Payload.from_record` checks the upload against."""
        return None

    @abstractmethod
    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Take in the uploads of a round, keyed by partition-id, ascending."""

    def num_replies(self, uploads: Mapping[int, Upload]) -> int:
        """Count the uploads of a round as ``min-replies`` does: one a client."""
        return len(uploads)

    def complete_round(self, server_round: int) -> bool:
        """Run after the aggregation of a round, before the scores.

        For further exchanges of the round.

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
        """Take in what secure aggregation gives, instead of :meth:`aggregate`.

        A method with an :class:`AdditivePayload` as ``up`` overrides it.

        Parameters
        ----------
        server_round : int
            Round, from 1.
        sums : mapping of str to Tensor, float64
            Sums of the clients' :meth:`AdditivePayload.summands`.
        weights : mapping of int to float
            Who is in the sums, by partition-id, and what ``weight-by`` makes each weigh.

        Raises
        ------
        PayloadError
            If the sums cannot be; the round fails then.
        """
        raise NotImplementedError(f"{type(self).__name__} needs more than sums.")

    def global_state(self) -> Mapping[str, Tensor] | None:
        """Return the aggregated model, ``None`` if the method has none."""
        return None

    def finish(self) -> None:
        """Run after the last round, e.g. one more exchange."""

    def server_state(self) -> Snapshot:
        """Return all that :meth:`aggregate` leaves behind for the rounds to come."""
        return Snapshot()

    def load_server_state(self, state: Snapshot) -> None:
        """Take back what :meth:`server_state` returned, after :meth:`prepare`.

        Raises
        ------
        KeyError, ValueError, RuntimeError
            If it does not fit.
        """

    def sample(self, server_round: int) -> list[int]:
        """Draw the clients that train, ``participation`` or ``participants`` of them."""
        able = self.federation.trainable
        count = max(1, num_sampled(self.config, len(able)))
        if count >= len(able):
            return able
        generator = numpy_generator(self.config.seed, server_round, SERVER, "sample")
        return sorted(int(p) for p in generator.choice(able, count, replace=False))

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.resumed is not None
