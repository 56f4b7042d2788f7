"""What a method says so that its uploads can be summed without being seen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flower_fgl.protocols.base import Payload, Shapes

__all__ = ["AdditivePayload"]


class AdditivePayload(Payload):
    """An upload of which the server needs only the sum over the clients.

    A method whose upload is one gets secure aggregation: its row in ``METHODS`` says
    ``additive=True``, and its strategy overrides ``aggregate_sums``.
    """

    @abstractmethod
    def summands(self, weight: float) -> Mapping[str, Tensor]:
        """Return what is summed.

        Parameters
        ----------
        weight : float
            What ``weight-by`` makes the client weigh. A weighted mean is the sum of
            weight times value over the sum of the weights: both are summands.

        Returns
        -------
        mapping of str to Tensor
            Finite numbers of any real type, with the names and shapes of
            :meth:`summand_shapes` whatever the client has: zeros stand for nothing.
        """

    @classmethod
    @abstractmethod
    def summand_shapes(cls, spec: Any) -> Shapes:
        """Return names and shapes of the summands.

        Parameters
        ----------
        spec : object
            What :meth:`Payload.from_record` gets.
        """
