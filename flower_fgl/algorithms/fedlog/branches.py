"""Node classification by distances to prototypes, FedLoG Eqs. (2), (3), (6)-(10).

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

__all__ = [
    "Branch",
    "PairLayer",
    "class_means_of",
    "degree_weights",
    "distance_log_probs",
    "mean_shift",
    "mix_log_probs",
    "square_distances",
]

MESSAGE_START = 1e-3
"""Xavier gain of MLP_trans's last map, so that initial updates of nodes are small."""


def square_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ``‖a_v − b_j‖²`` of all pairs as ``‖a‖² + ‖b‖² − 2ab``.

    Parameters
    ----------
    a, b : Tensor of shape (n, E) and (m, E), float32
        Vectors.

    Returns
    -------
    Tensor of shape (n, m), float32
        Not negative.
    """
    cross = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * (a @ b.T)
    return cross.clamp(min=0)


def mean_shift(h: Tensor, prototypes: Tensor, scalars: Tensor) -> Tensor:
    """Average ``(h_v − h_j)·s_vj`` over the prototypes, FedLoG Eqs. (8) and (9).

    Parameters
    ----------
    h, prototypes : Tensor of shape (n, E) and (P, E), float32
        h_v and h_j.
    scalars : Tensor of shape (n, P), float32
        MLP_trans(m_vj).

    Returns
    -------
    Tensor of shape (n, E), float32
        t'_v = ``h_v·mean_j s_vj − (1/P) Σ_j s_vj h_j``.
    """
    return h * scalars.mean(1, keepdim=True) - scalars @ prototypes / len(prototypes)


def class_means_of(prototypes: Tensor, num_classes: int) -> Tensor:
    """Average the prototypes of each class, ``h̄_c`` of FedLoG Eq. (2).

    Parameters
    ----------
    prototypes : Tensor of shape (C·s, E), float32
        Grouped by class.
    num_classes : int
        C.

    Returns
    -------
    Tensor of shape (C, E), float32
    """
    return prototypes.view(num_classes, -1, prototypes.shape[1]).mean(1)


def distance_log_probs(h: Tensor, means: Tensor) -> Tensor:
    """Return ``log softmax_c(−‖h'_v − h̄_c‖²)``, FedLoG Eq. (2).

    Parameters
    ----------
    h, means : Tensor of shape (n, E) and (C, E), float32
        h'_v and h̄_c.

    Returns
    -------
    Tensor of shape (n, C), float32
    """
    return F.log_softmax(-square_distances(h, means), dim=1)


def degree_weights(degree: Tensor, threshold: float) -> Tensor:
    """Compute the weight of the head branch from a node's degree, FedLoG Eq. (3).

    ``α_v = 1 / (1 + exp(−(deg(v) − (λ + 1))))``.

    Parameters
    ----------
    degree : Tensor of shape (n,), int64
        Number of neighbours of each node, without the node itself.
    threshold : float
        λ.

    Returns
    -------
    Tensor of shape (n,), float32, in [0, 1]
        From degree λ + 18 on, float32 rounds to exactly 1: such nodes give the tail
        branch no gradient.
    """
    return torch.sigmoid(degree.float() - (threshold + 1))


def mix_log_probs(head: Tensor, tail: Tensor, alpha: Tensor) -> Tensor:
    """Return ``log(α p_H + (1 − α) p_T)``, FedLoG Eq. (3).

    Parameters
    ----------
    head, tail : Tensor of shape (n, C), float32
        log p_H and log p_T.
    alpha : Tensor of shape (n,), float32, in [0, 1]

    Returns
    -------
    Tensor of shape (n, C), float32
    """
    first, second = alpha.log()[:, None] + head, (1 - alpha).log()[:, None] + tail
    return torch.logaddexp(first, second)


class PairLayer(nn.Module):
    """Update nodes by messages from each prototype, FedLoG Eqs. (6)-(10).

    Parameters
    ----------
    width : int
        Embedding width E.
    neighbours_only : bool
        Compute messages from ``[n_v ‖ ‖h_v − h_j‖²]``, as in the published code,
        instead of ``[h_v ‖ n_v ‖ d_vj]``.

    Notes
    -----
    1. The paper gives MLP_msg 2E inputs for the 2E + 1 numbers of Eq. (6); here 2E + 1.
    2. The first map of MLP_msg is linear and only d_vj depends on the pair. The part of
       h_v and n_v is computed once per node, and each pair adds a multiple of one
       column.
    """

    def __init__(self, width: int, *, neighbours_only: bool = False) -> None:
        super().__init__()
        self.neighbours_only = neighbours_only
        self.first = nn.Linear((1 if neighbours_only else 2) * width + 1, width)
        self.second = nn.Linear(width, width)
        self.trans = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.scale = nn.Linear(width, 1, bias=False)
        nn.init.xavier_uniform_(self.scale.weight, gain=MESSAGE_START)

    def forward(self, h: Tensor, neighbours: Tensor, prototypes: Tensor) -> Tensor:
        """Return h'_v.

        Parameters
        ----------
        h, neighbours : Tensor of shape (n, E), float32
            h_v, and n_v, the mean embedding of the neighbours; zero without neighbours.
        prototypes : Tensor of shape (P, E), float32
            h_j.

        Returns
        -------
        Tensor of shape (n, E), float32
        """
        distance = square_distances(h, prototypes)
        if self.neighbours_only:
            own = neighbours
        else:
            distance = distance + square_distances(neighbours, prototypes)  # Eq. (7)
            own = torch.cat([h, neighbours], dim=1)
        weight = self.first.weight
        start = F.linear(own, weight[:, :-1], self.first.bias)
        m = torch.addcmul(start[:, None], distance[..., None], weight[:, -1])
        for linear in (self.second, self.trans[0], self.trans[2]):  # Eqs. (6), (8)
            m = linear(_silu(m))  # (n, P, E)
        scalars = self.scale(_silu(m)).squeeze(-1)
        return h + mean_shift(h, prototypes, scalars)


def _silu(x: Tensor) -> Tensor:
    """Apply SiLU, in place if no gradient needs the input, to save cache."""
    return F.silu(x, inplace=not torch.is_grad_enabled())


class Branch(nn.Module):
    """The classifier of the head or the tail branch, θ^H or θ^T.

    Parameters
    ----------
    width : int
        Embedding width E.
    updates : bool
        Update nodes by Eqs. (6)-(10); otherwise only normalise them.
    neighbours_only : bool
        See :class:`PairLayer`.

    Notes
    -----
    1. Layer normalisation of h_v precedes two layers with separate weights. Both layers
       take n_v and the prototypes unchanged.
    2. In the published code Eqs. (6)-(10) have no effect: it adds to each node a value
       that was computed for other rows. ``updates=False`` is that variant.
    """

    def __init__(
        self, width: int, *, updates: bool = True, neighbours_only: bool = False
    ) -> None:
        super().__init__()
        self.updates = updates
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            PairLayer(width, neighbours_only=neighbours_only) for _ in range(2)
        )

    def forward(
        self, h: Tensor, neighbours: Tensor, prototypes: Tensor, num_classes: int
    ) -> Tensor:
        """Return log p(c|v), FedLoG Eq. (2).

        Parameters
        ----------
        h, neighbours : Tensor of shape (n, E), float32
            h_v and n_v.
        prototypes : Tensor of shape (C·s, E), float32
            Embeddings of the branch's learnable nodes, grouped by class.
        num_classes : int
            C.

        Returns
        -------
        Tensor of shape (n, C), float32
        """
        h = self.norm(h)
        if self.updates:
            for layer in self.layers:
                h = layer(h, neighbours, prototypes)
        return distance_log_probs(h, class_means_of(prototypes, num_classes))
