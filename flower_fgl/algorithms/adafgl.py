"""AdaFGL's second step: propagation by alike predictions, signed messages, and its network.

Li et al., "AdaFGL: A New Paradigm for Federated Node Classification with Topology
Heterogeneity", ICDE 2024.

===========  ==========================================================
symbol       here
===========  ==========================================================
Y            ``soft``, predictions of the federated model, constants
B            :func:`likeness` above ``ALIKE``, constant pairs of nodes
E            ``e``, logits of the message head
c(E)         cosine of the rows of ``unit``
R            β B + (1 − β) c(E), 0 on the diagonal
===========  ==========================================================
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.fedgta import propagate_labels
from flower_fgl.algorithms.own_network import NetworkSizes, sized_backbone
from flower_fgl.methods.adafgl import AdaFGLSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.sparse import Operator, computed_once

__all__ = ["AdaFGLNet", "Outputs", "adafgl_loss", "combine", "homophily_confidence"]
__all__ += ["likeness", "propagated", "propagated_linear", "propagation_matrix"]
__all__ += ["signed_messages", "signed_products"]

ALIKE = 0.999
"""Cosine of two predictions above which their nodes count as neighbours."""
STEPS = 10
"""Steps of the label propagation that measures the homophily."""
UNKNOWN = 0.5
"""Homophily of a client that cannot measure it."""


def likeness(probabilities: Tensor) -> Tensor:
    """Compute the cosine of the predictions (N, C) of all pairs: (N, N), 0 on the diagonal.

    Notes
    -----
    1. The published codes apply a second softmax to Y, which squeezes its values: two
       nodes with (.9, .1) and (.1, .9) then have .748 instead of .220, and nearly all
       pairs count as alike. Here it is the cosine of Y itself.
    """
    unit = F.normalize(probabilities, dim=1)
    cosine = unit @ unit.T
    own = torch.eye(len(cosine), dtype=torch.bool, device=cosine.device)
    return cosine.masked_fill(own, 0.0)


def propagation_matrix(edge_index: Tensor, alike: Tensor, *, alpha: float) -> Tensor:
    """Compute Ã = D^{-1/2} (α A + (1 − α) B + I) D^{-1/2}: (N, N), symmetric.

    A has the edges ``edge_index`` (2, E), each in both directions; B is ``alike`` (N, N),
    bool.
    """
    source, target = edge_index
    mixed = (1 - alpha) * alike
    mixed[target, source] += alpha
    mixed.fill_diagonal_(1.0)
    scale = mixed.sum(dim=1).rsqrt()  # at least 1 before, by the diagonal
    return scale[:, None] * mixed * scale


def propagated(matrix: Tensor, x: Tensor, *, steps: int) -> Tensor:
    """Return X̂ = [X ‖ ÃX ‖ … ‖ Ã^k X], of shape (N, (k + 1) d)."""
    rows = [x]
    for _ in range(steps):
        rows.append(matrix @ rows[-1])
    return torch.cat(rows, dim=1)


def propagated_linear(
    matrix: Tensor, graph: GraphInput, weight: Tensor, *, steps: int
) -> Tensor:
    """Compute X̂ Wᵀ (N, q) as Σ_i Ã^i (X W_iᵀ): features are mapped first, then propagated.

    This costs less than the product with X̂ where features are sparse and wide. ``matrix``
    is Ã (N, N), ``graph`` has the features X (N, d), and ``weight`` is
    W = [W_0 ‖ … ‖ W_k] of shape (q, (k + 1) d).
    """
    parts = torch.cat(weight.chunk(steps + 1, dim=1))  # ((k + 1) q, d)
    *others, out = graph.linear(None, parts).chunk(steps + 1, dim=1)
    for part in reversed(others):
        out = torch.addmm(part, matrix, out)
    return out


def homophily_confidence(
    operator: Operator,
    index: Tensor,
    labels: Tensor,
    order: Tensor,
    *,
    num_nodes: int,
    num_classes: int,
) -> float:
    """Measure how well labels spread along the edges: h in [0, 1].

    Half of the training nodes ``index`` (n,) keep their class ``labels`` (n,): the
    first ⌊n/2⌋ of the permutation ``order`` (n,). All other nodes start from 1/C. After
    ``STEPS`` repetitions of F ← ½ P F + ½ F⁰ with P, ``operator`` (N, N), h is the
    accuracy on the other half; ``UNKNOWN`` with fewer than two training nodes.

    Notes
    -----
    1. The nodes that keep their class are reset after each step; the published codes add
       their class instead.
    """
    half = len(index) // 2
    if not half:
        return UNKNOWN
    known, asked = order[:half], order[half:]
    start = torch.full((num_nodes, num_classes), 1 / num_classes, device=index.device)
    seeds = F.one_hot(labels[known], num_classes).to(start.dtype)
    start = start.index_copy(0, index[known], seeds)
    found = propagate_labels(operator, start, index[known], steps=STEPS)
    hits = found[index[asked]].argmax(dim=1) == labels[asked]
    return float(hits.float().mean())


BLOCK = 1 << 18
"""Pairs of nodes in memory at once: 256 Ki × 4 bytes fit into a core's cache."""
TINY = 1e-12


def signed_messages(alike: Tensor, e: Tensor, slope: Tensor, *, beta: float) -> Tensor:
    """Compute ½ (softmax(PReLU(S) E) − softmax(PReLU(−S) E) + E): logits (N, C).

    S has the entries of :func:`signed_products`. With its positive part S⁺ and its
    negative part S⁻, PReLU(S) E = S⁺E + a S⁻E and PReLU(−S) E = −S⁻E − a S⁺E. ``alike``
    (N, N) is B, bool or float (faster), symmetric and with a diagonal of 0; ``e`` (N,
    C) is E, and ``slope`` (1,) is a, below 0.
    """
    unit = F.normalize(e.softmax(dim=1), dim=1)
    positive, negative = signed_products(unit, e, alike, beta=beta)
    towards = (positive + slope * negative).softmax(dim=1)
    away = (-negative - slope * positive).softmax(dim=1)
    return (towards - away + e) / 2


def signed_products(
    unit: Tensor, e: Tensor, alike: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Multiply both parts of the signed relations S of all pairs with E: S⁺E and S⁻E.

    Entries of R above their mean m become (R − m)/(M − m), M the largest entry; the
    others become −(m − R)/m. The diagonal becomes 1. The rows of ``unit`` (N, C) have
    unit length and entries of at least 0. It and E have a gradient; others: see
    :func:`signed_messages`.

    Notes
    -----
    1. The published codes give −R/m to entries below the mean: the least alike pair gets
       0 and pairs just below the mean −1. Here it is the other way round.
    2. R and its gradient are computed in blocks: time N²C, memory of one block.
    3. Of several largest entries one has the gradient of M.
    """
    sums = unit.sum(dim=0)
    cosines = sums @ sums - (unit * unit).sum()  # without the diagonal
    mean = (beta * alike.sum(dtype=e.dtype) + (1 - beta) * cosines) / len(unit) ** 2
    above, below, largest = _Sums.apply(unit, e, mean, alike, beta)  # type: ignore[no-untyped-call]
    positive = above / (largest - mean).clamp(min=TINY) + e
    return positive, below / mean.clamp(min=TINY)


class _Sums(torch.autograd.Function):
    """max(R − m, 0) E and min(R − m, 0) E without their diagonals, and max R.

    Matrices with few columns stand transposed: products with them are several times faster.
    """

    @staticmethod
    def forward(
        ctx: Any, unit: Tensor, e: Tensor, mean: Tensor, alike: Tensor, beta: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = e.T.contiguous()
        above, below = torch.empty_like(wide), torch.empty_like(wide)
        largest, place = unit.new_zeros(()), 0
        for rows in _blocks(len(unit)):
            relation = _relation(unit, alike, beta, rows)
            peak = relation.max()
            if peak > largest:  # argmax takes long
                largest, place = peak, int(relation.argmax()) + rows.start * len(unit)
            relation = _clear_diagonal(relation.sub_(mean), rows)
            above[:, rows] = wide @ relation.clamp(min=0).T
            below[:, rows] = wide @ relation.clamp_(max=0).T
        ctx.save_for_backward(unit, e, mean, alike)
        ctx.beta, ctx.place = beta, divmod(place, len(unit))
        return above.T.contiguous(), below.T.contiguous(), largest

    @staticmethod
    def backward(
        ctx: Any, *outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        of_above, of_below, of_largest = outputs
        unit, e, mean, alike = ctx.saved_tensors
        wide, wide_above, wide_below = (
            matrix.T.contiguous() for matrix in (unit, of_above, of_below)
        )
        difference = of_above - of_below
        of_wide, of_e = torch.zeros_like(wide), torch.zeros_like(wide_above)
        of_mean = torch.zeros_like(mean)
        for rows in _blocks(len(unit)):
            relation = _relation(unit, alike, ctx.beta, rows).sub_(mean)
            relation = _clear_diagonal(relation, rows)
            is_above = torch.gt(relation, 0, out=torch.empty_like(relation))
            slope = of_below[rows] @ e.T  # torch.where takes far longer
            slope.addcmul_(difference[rows] @ e.T, is_above)
            slope = _clear_diagonal(slope, rows)
            of_mean -= slope.sum()
            of_wide[:, rows] += wide @ slope.T
            of_wide += wide[:, rows] @ slope
            of_e += wide_above[:, rows] @ relation.clamp(min=0)
            of_e += wide_below[:, rows] @ relation.clamp_(max=0)
        of_unit, of_e = of_wide.T.contiguous(), of_e.T.contiguous()
        row, column = ctx.place
        if row != column:
            of_unit[row] += of_largest * unit[column]
            of_unit[column] += of_largest * unit[row]
        return of_unit * (1 - ctx.beta), of_e, of_mean, None, None


def _blocks(number: int) -> Iterator[slice]:
    """Yield the rows of each block."""
    step = max(1, BLOCK // max(1, number))
    for start in range(0, number, step):
        yield slice(start, min(start + step, number))


def _relation(unit: Tensor, alike: Tensor, beta: float, rows: slice) -> Tensor:
    """Return some rows of R."""
    out = (unit[rows] * (1 - beta)) @ unit.T
    if beta:
        out.add_(alike[rows], alpha=beta)
    return _clear_diagonal(out, rows)


def _clear_diagonal(matrix: Tensor, rows: slice) -> Tensor:
    """Set the entries of nodes with themselves to 0, in place."""
    matrix[:, rows].fill_diagonal_(0.0)
    return matrix


class Outputs(NamedTuple):
    """Logits of the four heads, each of shape (N, C)."""

    smooth: Tensor
    """Of the homophily head."""
    raw: Tensor
    propagated: Tensor
    messages: Tensor
    """These three are those of the heterophily head."""


def adafgl_loss(out: Outputs, soft: Tensor, index: Tensor, labels: Tensor) -> Tensor:
    """Compute CE + MSE of the homophily head, and three CE of the heterophily head.

    ``soft`` (N, C) is Y; ``index`` and ``labels`` (n,) are training nodes and their
    classes. No parameter belongs to both heads, so that one loss trains them as two
    would.
    """
    entropies = [F.cross_entropy(logits[index], labels) for logits in out]
    return torch.stack(entropies).sum() + F.mse_loss(out.smooth, soft)


def combine(out: Outputs, soft: Tensor, confidence: Tensor) -> Tensor:
    """Mix both heads: h · (softmax + Y)/2 + (1 − h) · mean of three softmaxes.

    ``soft`` (N, C) is Y, and ``confidence`` (1,), in [0, 1], is h. Returns probabilities
    (N, C).

    Notes
    -----
    1. The published code uses the homophily head alone if h is at least .9, and else the
       other one alone. Here both are mixed, as in the paper.
    """
    smooth, *others = [logits.softmax(dim=1) for logits in out]
    hom = (smooth + soft) / 2
    het = torch.stack(others).mean(dim=0)
    return confidence * hom + (1 - confidence) * het


class _Constants(NamedTuple):
    """What the second step computes once for a graph."""

    soft: Tensor
    """Y."""
    alike: Tensor
    """B."""
    linear: Callable[[Tensor], Tensor]
    """Maps weights W to X̂ Wᵀ."""


class AdaFGLNet(Backbone):
    """The frozen federated model ``extractor``, and the heads of the second step.

    For N nodes it takes N² numbers of memory in each of about five tensors, once;
    training takes blocks of them. Matrices of a graph are computed at its first use: the
    state of the extractor and the graph must not change afterwards.
    """

    confidence: Tensor

    def __init__(self, settings: AdaFGLSettings, **sizes: Unpack[NetworkSizes]) -> None:
        nn.Module.__init__(self)
        self.readout, self.dropout = False, sizes["dropout"]
        self.alpha, self.beta = settings.alpha, settings.beta
        self.steps = settings.steps
        self.extractor = sized_backbone(sizes).requires_grad_(False)
        self.hidden_channels = self.extractor.hidden_channels
        width, own = settings.width, sizes["num_features"]
        wide, after = own * (settings.steps + 1), [width, width, sizes["num_outputs"]]
        self.smooth_head = _Head([wide, *after[1:]], self.dropout)
        self.raw_head = _Head([own, *after], self.dropout)
        self.wide_head = _Head([wide, *after], self.dropout)
        self.message_head = _Head([wide, *after], self.dropout)
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.register_buffer("confidence", torch.full((1,), UNKNOWN))
        self._known: dict[GraphInput, _Constants] = {}

    def _constants(self, graph: GraphInput) -> _Constants:
        """Return Y, X̂ and B of a graph, computed once."""

        def compute() -> _Constants:
            soft = self.extractor.eval()(graph).softmax(dim=1)
            alike = likeness(soft) > ALIKE
            matrix = propagation_matrix(graph.edge_index, alike, alpha=self.alpha)
            if self.maps_first(graph):
                linear = partial(propagated_linear, matrix, graph, steps=self.steps)
            else:
                x = graph.dense_features()
                linear = partial(F.linear, propagated(matrix, x, steps=self.steps))
            alike = alike.to(soft.dtype)  # adding bool takes longer
            return _Constants(soft, alike, linear)

        return computed_once(self._known, graph, compute)

    def maps_first(self, graph: GraphInput) -> bool:
        """Return whether mapping sparse features before propagation costs less."""
        if graph.x.layout != torch.sparse_csr:
            return False
        number, width = graph.x.shape
        wide = width * (self.steps + 1)
        mapped = graph.x.values().numel() * (self.steps + 1) + number**2 * self.steps
        return mapped < number * wide

    def soft(self, graph: GraphInput) -> Tensor:
        """Return Y."""
        return self._constants(graph).soft

    def outputs(self, graph: GraphInput) -> Outputs:
        """Return the logits of all heads."""
        found = self._constants(graph)
        # the first layers of three heads, which have the same input, are one product
        heads = (self.smooth_head, self.wide_head, self.message_head)
        weight = torch.cat([head.first.weight for head in heads])
        bias = torch.cat([head.first.bias for head in heads])
        smooth, wide, message = (found.linear(weight) + bias).chunk(len(heads), dim=1)
        first = self.raw_head.first
        raw = graph.linear(None, first.weight, first.bias)
        e = self.message_head(message)
        return Outputs(
            self.smooth_head(smooth),
            self.raw_head(raw),
            self.wide_head(wide),
            signed_messages(found.alike, e, self.slope, beta=self.beta),
        )

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the federated model's embeddings."""
        return self.extractor.embed_nodes(graph)

    def forward(self, graph: GraphInput) -> Tensor:
        """Return the logarithm of the mixed predictions, of shape (N, C)."""
        mixed = combine(self.outputs(graph), self.soft(graph), self.confidence)
        return mixed.clamp(min=TINY).log()


class _Head(nn.Sequential):
    """Linear layers with PReLU and dropout between them; the caller applies the first."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            linear = nn.Linear(before, after)
            nn.init.xavier_uniform_(linear.weight, gain=nn.init.calculate_gain("relu"))
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.PReLU(), nn.Dropout(dropout)]
        super().__init__(*layers[:-2])

    @property
    def first(self) -> nn.Linear:
        """The first layer."""
        layer = self[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, mapped: Tensor) -> Tensor:
        """Continue after the first layer."""
        for layer in list(self)[1:]:
            mapped = layer(mapped)
        return mapped
