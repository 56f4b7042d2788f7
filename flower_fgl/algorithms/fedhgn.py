"""Alignment of the coefficients of relations, FedHGN.

Fu and King, "FedHGN: A Federated Framework for Heterogeneous Graph Neural Networks", IJCAI
2023.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["alignment"]


def alignment(own: Tensor, others: Tensor) -> Tensor:
    """Return ``A = Σ_l Σ_r min_r' ‖a_r^l − a_r'^l‖²``, the alignment of FedHGN.

    Parameters
    ----------
    own : Tensor of shape (L, R, B), float32
        Coefficients of the client's relations in each layer, with gradient.
    others : Tensor of shape (L, M, B), float32
        Those of other clients, constant; M is at least 1.

    Returns
    -------
    Tensor of shape ()

    Notes
    -----
    1. The published code compares with zeros in the first round, and one layer too many;
       here a client without others has no term.
    """
    distance = (own[:, :, None] - others[:, None]).square().sum(dim=-1)
    return distance.amin(dim=2).sum()
