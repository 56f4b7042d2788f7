"""Server half that averages the models separately for each client.

A method says how alike two clients are, and how that becomes a weight. The rule is in
:mod:`flower_fgl.algorithms.personal_mix`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from flower_fgl.algorithms import personal_mix
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.personalmix import PersonalMixSettings
from flower_fgl.protocols.base import Payload, Shapes
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["PersonalMix"]

MOST_IN_TABLE = 50
"""Clients in a round up to which the run folder holds the matrix of their mixtures."""


class PersonalMix(FedAvg):
    """Send each client its own weighted mean of the last round's models.

    A method overrides :meth:`similarity` and :meth:`attention`, and where needed
    :meth:`parts` and :meth:`mixes`.

    Notes
    -----
    1. Uploads are sorted by partition-id, so that the order of replies has no effect.
    2. A client that was not in the last mix starts from the average of that round's
       uploads, weighted by ``weight-by``; with ``absent = "last"`` from its own last
       mixture, if it has one.
    3. There is no global model: that average is never evaluated.
    4. An upload with a number that is not finite is refused when it is read. A client
       whose numbers are so large that its similarities are not finite is named and left
       out.
    5. By default an upload is :class:`~flower_fgl.protocols.fedavg.DescribedWeights`
       with the tensors of :meth:`descriptor_shapes`.
    """

    up: ClassVar[type[Payload]] = DescribedWeights
    has_global = False
    kept = ("personal",)

    def prepare(self) -> None:
        """Build the initial model."""
        super().prepare()
        self.personal: dict[int, Mapping[str, Tensor]] = {}

    def descriptor_shapes(self) -> Shapes:
        """Return names and shapes of a client's description, by default none."""
        return {}

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and of the description."""
        if self.up is Weights:
            return self.shapes
        return self.shapes, self.descriptor_shapes()

    @abstractmethod
    def similarity(self, uploads: Sequence[Any]) -> Tensor:
        """Return S of shape (K, K) or (B, K, K) of the payloads of K clients."""

    @abstractmethod
    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the weights a, of the shape of ``similarity``; each row sums to 1."""

    def parts(self) -> Mapping[str, Sequence[personal_mix.Part]] | None:
        """Return which block averages which part of a parameter; ``None``: the first."""
        return None

    def mixes(self, server_round: int) -> bool:
        """Return whether this round personalizes; else all clients get the mean."""
        return True

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Return w_i, or the average for a client that was not in the last mix."""
        own = self.personal.get(partition_id)
        return self.weights if own is None else Weights(own)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Mix the uploads for each client."""
        super().aggregate(server_round, uploads)
        if not self.mixes(server_round):
            self.personal = {}
            return
        found = list(uploads.values())
        payloads = [upload.payload for upload in found]
        similarity = self.similarity(payloads)
        if not similarity.isfinite().all():
            raise PayloadError("a similarity of two clients is not finite")
        attention = self.attention(similarity, found)
        states = [payload.tensors for payload in payloads]
        mixed = personal_mix.mix_states(states, attention.float(), self.parts())
        made = dict(zip(uploads, mixed, strict=True))
        settings: PersonalMixSettings = self.config.method_config
        kept = self.personal if settings.absent == "last" else {}
        self.personal = {**kept, **made}
        self.log(**personal_mix.mix_numbers(attention, similarity))
        if len(uploads) <= MOST_IN_TABLE:
            self.loop.log.tables["mixture"] = personal_mix.mixture_table(
                list(uploads), attention
            )

    def to_blame(self, uploads: Mapping[int, Upload]) -> dict[int, str]:
        """Return the clients that have no finite similarity, not even to themselves."""
        try:
            found = self.similarity([upload.payload for upload in uploads.values()])
        except Exception:  # it may be what failed
            return super().to_blame(uploads)
        rows = found.isfinite().any(dim=-1)
        is_fine = rows.all(dim=0) if rows.dim() == 2 else rows
        broken = [pid for pid, fine in zip(uploads, is_fine, strict=True) if not fine]
        if not broken:
            return super().to_blame(uploads)
        return dict.fromkeys(broken, "none of its similarities is finite")
