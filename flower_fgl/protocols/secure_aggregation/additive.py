"""``AdditivePayload``, the base class of uploads that secure aggregation can sum."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from flower_fgl.protocols.base import Payload, Shapes

__all__ = ["AdditivePayload"]


class AdditivePayload(Payload):
    """Upload of which the server needs only the sum over clients.

    A method with such an upload supports secure aggregation: its row in ``METHODS`` has
    ``additive=True``, and its strategy overrides ``aggregate_sums``.
    """

    public_summands: ClassVar[frozenset[str] | None] = None
    """Summands that follow from the client's description, if all others are the upload's
    numbers times the weight. ``None``: they are not, so that ``upload-noise-model =
    "distributed"`` is not possible."""

    @abstractmethod
    def summands(self, weight: float) -> Mapping[str, Tensor]:
        """Return the numbers to be summed, finite and of any real type, by name.

        ``weight`` is the client's according to ``weight-by``. A weighted mean is the sum
        of weight times value divided by the sum of the weights; both are summands. Names
        and shapes are always those of :meth:`summand_shapes`; missing content is zero.
        """

    @classmethod
    @abstractmethod
    def summand_shapes(cls, spec: Any) -> Shapes:
        """Return names and shapes of the summands, given that of :meth:`from_record`."""
