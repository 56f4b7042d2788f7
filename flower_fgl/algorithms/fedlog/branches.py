"""Node classification by distances to prototypes, and its losses, FedLoG Eqs. (2)-(10)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from numpy.polynomial import chebyshev
from torch import Tensor, nn

from flower_fgl.nn.sparse import apply_function
from flower_fgl.nn.stacked import map_each, map_rows

__all__ = ["Branch", "PairLayer", "Points", "branch_loss", "class_means_of"]
__all__ += ["degree_weights", "distance_log_probs", "interpolate", "is_resolved"]
__all__ += ["mean_shift", "mix_log_probs", "node_norm", "place_points"]
__all__ += ["square_distances"]


class Points(NamedTuple):
    """Chebyshev points of one interval per row, all constant.

    ``at`` (n, K) are the points, where the caller evaluates its function; ``middle`` and
    ``half`` (n, 1) the middle of each interval, and half its length, positive.
    """

    at: Tensor
    middle: Tensor
    half: Tensor


def place_points(arguments: Tensor, count: int, *, least_half: float) -> Points:
    """Place K Chebyshev points in the range of each row of arguments (n, P), P at least 1.

    Intervals are at least twice as long as ``least_half``, around the middle of the
    range. A slope is a difference of values over the interval's length, so in a short
    interval it is mostly rounding error.
    """
    with torch.no_grad():
        low, high = arguments.aminmax(dim=1, keepdim=True)
        middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=least_half)
        nodes = torch.from_numpy(chebyshev.chebpts1(count)).to(arguments)
        return Points(middle + half * nodes, middle, half)


def interpolate(values: Tensor, arguments: Tensor, points: Points) -> Tensor:
    """Interpolate each row's function from its values at Chebyshev points: (n, P).

    Differentiable once in ``values`` (n, K) and ``arguments`` (n, P). The slope of the
    interpolating polynomial is computed exactly. Points and bounds of the intervals are
    constants: the function that they sample does not depend on them. Outside its
    interval, if only by rounding, an argument is extrapolated, so that its slope is
    right.

    A function that is analytic in the ellipse with foci at the interval's ends and half
    axes that add up to ρ half lengths has an error of the order ρ⁻ᴷ (Trefethen,
    "Approximation Theory and Approximation Practice", Theorem 8.2).
    """
    return apply_function(_Interpolation, values, arguments, points)


@torch.no_grad()
def is_resolved(values: Tensor, tolerance: float) -> bool:
    """Return whether K points suffice for values (n, K).

    Then the last two coefficients are at most a share ``tolerance`` of the largest
    coefficient of all rows. False if a value is not finite.
    """
    matrix, _ = _matrices(values.shape[1], values.dtype, values.device)
    sizes = (values @ matrix.T).abs()
    return bool(sizes[:, -2:].max() <= tolerance * sizes.max())  # NaN: False


class _Interpolation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, arguments: Tensor, points: Points) -> Tensor:
        matrix, derivative = _matrices(values.shape[1], values.dtype, values.device)
        basis = _basis((arguments - points.middle) / points.half, values.shape[1])
        coefficients = values @ matrix.T
        if ctx.needs_input_grad[1]:
            slopes = coefficients @ derivative.T / points.half
            both = torch.stack([coefficients, slopes], dim=1)
            out, slope = torch.bmm(both, basis).unbind(1)  # (n, 2, P)
            ctx.save_for_backward(basis, slope)
        else:
            out = torch.bmm(coefficients[:, None], basis).squeeze(1)
            ctx.save_for_backward(basis, None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        basis, slope = ctx.saved_tensors
        to_values = to_arguments = None
        if ctx.needs_input_grad[0]:
            matrix, _ = _matrices(basis.shape[1], basis.dtype, basis.device)
            to_values = torch.bmm(basis, grad[..., None]).squeeze(2) @ matrix
        if ctx.needs_input_grad[1]:
            to_arguments = grad * slope
        return to_values, to_arguments, None


def _basis(u: Tensor, count: int) -> Tensor:
    """Return ±T_0(u) … ±T_(K−1)(u) of each row: (n, K, P), with :func:`_signs`.

    So the recurrence of T_k is a sum: one pass over the rows for each k.
    """
    basis = u.new_empty((count, *u.shape))
    basis[0], basis[1] = 1, u
    for k in range(2, count):
        twice = 2 if k % 2 else -2
        torch.addcmul(basis[k - 2], u, basis[k - 1], value=twice, out=basis[k])
    return basis.transpose(0, 1)


def _signs(count: int) -> np.ndarray:
    """Return the signs +, +, −, −, +, +, … of :func:`_basis`."""
    signs: np.ndarray = 1.0 - 2 * (np.arange(count) // 2 % 2)
    return signs


@lru_cache(maxsize=32)
def _matrices(
    count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Map values at the K points to coefficients, with signs, and these to the slope's."""
    signs = _signs(count)
    matrix = np.linalg.inv(chebyshev.chebvander(chebyshev.chebpts1(count), count - 1))
    derivative = np.zeros((count, count))
    derivative[:-1] = chebyshev.chebder(np.eye(count))
    matrix, derivative = signs[:, None] * matrix, np.outer(signs, signs) * derivative
    first, second = (
        torch.from_numpy(m).to(device, dtype) for m in (matrix, derivative)
    )
    return first, second


MESSAGE_START = 1e-3
"""Xavier gain of MLP_trans's last map, so that initial updates of nodes are small."""

POINTS = {0.7: 6, 1.0: 8, 3.0: 12, 6.0: 20}
"""Number K of Chebyshev points by the largest change of a pre-activation of MLP_msg, half
the range of d_vj times the largest |weight| of d_vj: SiLU is analytic within π of the real
line. Beyond the last one the MLPs run once per pair."""
TRIES = 2
"""Numbers of points that are tried before the MLPs run once per pair."""
TAIL = 5e-6
"""Share of the largest Chebyshev coefficient that the last two may reach. The error is
about a fiftieth of it, that of float32; otherwise the MLPs run once per pair."""
SHORTEST = 0.5
"""Least change of a pre-activation over half an interval, see ``least_half``."""
TINY = 1e-6
"""Least weight of d_vj for which an interval is computed, so that it is finite."""


def square_distances(b: Tensor, *rows: Tensor) -> Tensor:
    """Return ``Σ_a ‖a_v − b_j‖²`` of all pairs (n, m) over one or more ``rows`` a (n, E).

    As ``Σ‖a‖² + M‖b‖² − 2(Σa)b`` of M rows, at least 0, by one product.
    """
    norms = len(rows) * b.square().sum(-1)[..., None, :]
    product = torch.addmm if b.dim() == 2 else torch.baddbmm
    out = product(norms, sum(rows[1:], rows[0]), b.mT, alpha=-2)
    for a in rows:
        out += a.square().sum(-1)[..., None]
    return out.clamp(min=0)


def mean_shift(h: Tensor, prototypes: Tensor, scalars: Tensor) -> Tensor:
    """Average ``(h_v − h_j)·s_vj`` over the P prototypes (P, E), FedLoG Eqs. (8) and (9).

    ``scalars`` (n, P) are s_vj = MLP_trans(m_vj). Returns t'_v (n, E) =
    ``h_v·mean_j s_vj − (1/P) Σ_j s_vj h_j``.
    """
    count = prototypes.shape[-2]
    return h * scalars.mean(-1, keepdim=True) - scalars @ prototypes / count


def class_means_of(prototypes: Tensor, num_classes: int) -> Tensor:
    """Average the prototypes (C·s, E) of each class, ``h̄_c`` (C, E) of FedLoG Eq. (2)."""
    *clients, _, width = prototypes.shape
    return prototypes.view(*clients, num_classes, -1, width).mean(-2)


def distance_log_probs(h: Tensor, means: Tensor) -> Tensor:
    """Return ``log softmax_c(−‖h'_v − h̄_c‖²)`` of h' (n, E), h̄ (C, E), FedLoG Eq. (2)."""
    return F.log_softmax(-square_distances(means, h), dim=-1)


def degree_weights(degree: Tensor, threshold: float) -> Tensor:
    """Compute the weight of the head branch from a node's degree, FedLoG Eq. (3).

    ``α_v = 1 / (1 + exp(−(deg(v) − (λ + 1))))``; ``degree`` (n,) counts neighbours
    without the node itself, ``threshold`` is λ. From degree λ + 18 on, float32 rounds to
    exactly 1: such nodes give the tail branch no gradient.
    """
    return torch.sigmoid(degree.float() - (threshold + 1))


def mix_log_probs(head: Tensor, tail: Tensor, alpha: Tensor) -> Tensor:
    """Return ``log(α p_H + (1 − α) p_T)`` from log p_H, log p_T (n, C), FedLoG Eq. (3)."""
    first, second = alpha.log()[..., None] + head, (1 - alpha).log()[..., None] + tail
    return torch.logaddexp(first, second)


class PairLayer(nn.Module):
    """Update nodes by messages from each prototype, FedLoG Eqs. (6)-(10).

    With stacked weights all representations have a first dimension of K clients.

    ``width`` is E. With ``neighbours_only`` messages are computed from ``[n_v ‖ ‖h_v −
    h_j‖²]``, as in the published code, instead of ``[h_v ‖ n_v ‖ d_vj]``.
    ``second_silu`` applies SiLU between the last two maps of MLP_trans.

    Notes
    -----
    1. The paper gives MLP_msg 2E inputs for the 2E + 1 numbers of Eq. (6); here 2E + 1.
    2. The first map of MLP_msg is linear and only d_vj depends on the pair. The part of
       h_v and n_v is computed once per node, and each pair adds a multiple of one column.
    3. So for one node ``MLP_trans(MLP_msg(·))`` is a smooth function of the number d_vj.
       The MLPs run at K Chebyshev points of ``[min_j d_vj, max_j d_vj]`` (6 with the
       weights that training gave on Cora) instead of once per prototype, and
       their results are interpolated to all prototypes. Outputs and gradients of weights
       are as close to float64 as with one run per pair; gradients of embeddings, to 2e-5
       of the largest. If the range of d_vj is too large for K points, the MLPs run once
       per pair.
    4. The paper's appendix prints MLP_trans as "Linear, SiLU, Linear, Linear". Two linear
       maps in a row are one, so by default there is a SiLU between them too.
       ``second_silu=False`` is the printed form.
    """

    def __init__(
        self, width: int, *, neighbours_only: bool = False, second_silu: bool = True
    ) -> None:
        super().__init__()
        self.neighbours_only = neighbours_only
        self.first = nn.Linear((1 if neighbours_only else 2) * width + 1, width)
        self.second = nn.Linear(width, width)
        self.trans = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        if second_silu:
            self.trans.append(nn.SiLU())
        self.scale = nn.Linear(width, 1, bias=False)
        nn.init.xavier_uniform_(self.scale.weight, gain=MESSAGE_START)

    def forward(self, h: Tensor, neighbours: Tensor, prototypes: Tensor) -> Tensor:
        """Return h'_v (n, E).

        ``neighbours`` is n_v (n, E), the mean embedding of the neighbours, zero without
        neighbours; ``prototypes`` are h_j (P, E).
        """
        if self.neighbours_only:
            own, distance = neighbours, square_distances(prototypes, h)
        else:
            own = torch.cat([h, neighbours], dim=-1)
            distance = square_distances(prototypes, h, neighbours)  # Eq. (7)
        weight, bias = self.first.weight[..., :-1], self.first.bias
        is_one = weight.dim() == 2
        start = (
            F.linear(own, weight, bias) if is_one else map_each(own, weight.mT, bias)
        )
        rows = distance.flatten(0, -2)
        for points in islice(self.points(rows), TRIES):
            at = points.at.view(*distance.shape[:-1], -1)
            values = self.pair_scalars(start, at).flatten(0, -2)
            if is_resolved(values, TAIL):
                scalars = interpolate(values, rows, points).view_as(distance)
                break
        else:
            scalars = self.pair_scalars(start, distance)
        return h + mean_shift(h, prototypes, scalars)

    def points(self, distance: Tensor) -> Iterator[Points]:
        """Place the MLPs' points in the range of d_vj (n, P): none, or ever more."""
        if not len(distance):
            return
        with torch.no_grad():
            ends = torch.stack(distance.aminmax(dim=1), dim=1)
            slope = self.first.weight[..., -1].abs().max()
            change = ends.diff(dim=1).max() / 2 * slope
            change, steepest = torch.stack([change, slope]).tolist()
        least = SHORTEST / max(steepest, TINY)
        for limit, count in POINTS.items():
            if change <= limit and 2 * count <= distance.shape[1]:  # NaN: none
                yield place_points(ends, count, least_half=least)

    def pair_scalars(self, start: Tensor, distance: Tensor) -> Tensor:
        """Return ``MLP_trans(MLP_msg([h_v ‖ n_v ‖ d_vj]))`` (n, P), FedLoG Eqs. (6), (8).

        ``start`` (n, E) is the first map of ``[h_v ‖ n_v]``, with bias; ``distance``
        (n, P) are d_vj, or other distances of node v.
        """
        slope = self.first.weight[..., None, None, :, -1]  # (1, 1, E) of each client
        m = torch.addcmul(start[..., None, :], distance[..., None], slope)
        m = m.flatten(-3, -2)
        for linear in (self.second, self.trans[0], self.trans[2]):
            m = map_rows(linear, _silu(m))  # (n·P, E)
        if len(self.trans) > 3:
            m = _silu(m)
        return map_rows(self.scale, m).view_as(distance)


def _silu(x: Tensor) -> Tensor:
    """Apply SiLU, in place if no gradient needs the input, to save cache."""
    return F.silu(x, inplace=not torch.is_grad_enabled())


class Branch(nn.Module):
    """The classifier of the head or the tail branch, θ^H or θ^T.

    Without ``updates`` nodes are only normalised. Other options: see :class:`PairLayer`.

    Notes
    -----
    1. Layer normalisation of h_v precedes two layers with separate weights. Both layers
       take n_v and the prototypes unchanged.
    2. In the published code Eqs. (6)-(10) have no effect: it adds to each node a value
       that was computed for other rows. ``updates=False`` is that variant.
    """

    def __init__(self, width: int, *, updates: bool = True, **options: bool) -> None:
        super().__init__()
        self.updates = updates
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(PairLayer(width, **options) for _ in range(2))

    def forward(
        self, h: Tensor, neighbours: Tensor, prototypes: Tensor, num_classes: int
    ) -> Tensor:
        """Return log p(c|v) (n, C), FedLoG Eq. (2).

        From h_v and n_v (n, E), and the embeddings (C·s, E) of the branch's learnable
        nodes, grouped by class.
        """
        weight, bias = self.norm.weight, self.norm.bias
        if weight.dim() == 1:
            h = self.norm(h)
        else:
            h = F.layer_norm(h, weight.shape[1:]) * weight[:, None] + bias[:, None]
        if self.updates:
            for layer in self.layers:
                h = layer(h, neighbours, prototypes)
        return distance_log_probs(h, class_means_of(prototypes, num_classes))


def branch_loss(
    head: Tensor,
    tail: Tensor,
    alpha: Tensor,
    labels: Tensor,
    *,
    is_mixture: bool = False,
    share: Tensor | None = None,
) -> Tensor:
    """Return the classification loss of both branches, FedLoG L_cls, L_g.

    ``mean_v [−α_v log p_H(y_v) − (1 − α_v) log p_T(y_v)]`` from ``head`` and ``tail`` (n,
    C), log p_H and log p_T, ``alpha`` (n,), the weight of the head branch, and classes
    ``labels`` (n,). If it ``is_mixture``, the logarithm of the mixture of Eq. (3), as
    printed. ``share`` (n,) is a node's weight in the mean, by default 1/n. For K clients
    all have a first dimension K, and the result is (K,).

    Notes
    -----
    1. The paper prints ``−log p(y_v)`` with p of Eq. (3), summed over nodes. The mean of
       the branches' weighted losses is an upper bound. It gives each branch a gradient in
       proportion to its weight, as in the published code.
    """
    if is_mixture:
        losses = _nll(mix_log_probs(head, tail, alpha), labels)
    else:
        losses = alpha * _nll(head, labels) + (1 - alpha) * _nll(tail, labels)
    return losses.mean(-1) if share is None else (losses * share).sum(-1)


def _nll(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the negative logarithm of each label's probability."""
    return -log_probs.gather(-1, labels[..., None]).squeeze(-1)


def node_norm(nodes: Sequence[Tensor], *, kind: Literal["fro", "sum"]) -> Tensor:
    """Return the penalty on the norm of the learnable nodes, FedLoG L_norm.

    Of X_k^H and X_k^T (C·s, d): half the Frobenius norm of each (``fro``), or the sum of
    the norms of all rows (``sum``).

    Notes
    -----
    1. The paper prints the sum, whose scale grows with C·s; the published code has half
       the Frobenius norm.
    """
    if kind == "sum":
        return torch.stack([x.norm(dim=-1).sum(-1) for x in nodes]).sum(0)
    return torch.stack([0.5 * x.flatten(-2).norm(dim=-1) for x in nodes]).sum(0)
