"""Loss and gradients of a small pseudo-graph in few calls: O-pFGL Eqs. (5), (10)-(13).

A step of the generator multiplies small matrices. Calls take most of its time, so that all
pairs of nodes are computed at once, and the derivatives are written out without autograd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.opfgl.alignment import ClassTargets
from flower_fgl.algorithms.opfgl.pairwise import EPSILON
from flower_fgl.methods.opfgl import OPFGLSettings

__all__ = ["THRESHOLD", "FewNodes"]

THRESHOLD = 0.01
"""δ, the least weight of an edge."""


class FewNodes:
    """The loss of the generator for s > 1 pseudo-nodes and a link predictor.

    ``links`` is a :class:`~flower_fgl.algorithms.opfgl.pseudo_graph.LinkPredictor`,
    ``depth`` is h.
    """

    def __init__(
        self,
        targets: ClassTargets,
        links: nn.Module,
        settings: OPFGLSettings,
        *,
        depth: int,
    ) -> None:
        self._targets, self._settings, self._depth = targets, settings, depth
        self._links = dict(links.named_parameters())
        s, like = len(targets.labels), targets.mean
        row, column = torch.ones(s, s).nonzero().T
        place = torch.arange(s * s)
        ends, degrees = torch.zeros(s * s, 2 * s), torch.zeros(s, s * s)
        ends[place, 2 * row] = ends[place, 2 * column + 1] = 1
        degrees[row, place] -= 0.5
        degrees[column, place] -= 0.5
        first, second = torch.triu_indices(s, s, 1)
        pair = torch.arange(len(first))
        halves, across = torch.zeros(len(first), s, s), torch.zeros(s, len(first))
        halves[pair, first, second] = halves[pair, second, first] = 0.5
        across[first, pair], across[second, pair] = 1, -1
        self._ends = ends.to(like)  # adds l_i and r_j of ordered pairs
        self._halves = halves.flatten(1).to(like)  # averages (i, j) and (j, i), i < j
        self._degrees = degrees.to(like)  # adds those of a node, times -1/2
        self._across = across.to(like)  # subtracts x_j from x_i
        self._loops = torch.eye(s).flatten().to(like)
        self._turned: Tensor | None = None
        self._similarity: Tensor | None = None

    @torch.inference_mode()
    def gradients(
        self, x: Tensor, *, of_links: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return alignment, smoothness and the gradients of the whole loss of X' (s, d).

        These are by the parameters of g_θ, in their order, or by X'. Between calls with
        ``of_links`` X' must not change, and between others g_θ.
        """
        links, size = self._links, len(x)
        first, second = links["first"], links["second.weight"]
        head = links["last.weight"][0]
        (scale, upper_scale), (shift, upper_shift) = links["scale"], links["shift"]
        if of_links:
            self._turned = None
        elif self._turned is None:
            self._turned = first.T.contiguous()
        # scores of the pairs, Eq. (10)
        turned = first.T if self._turned is None else self._turned
        pairs = self._ends @ (x @ turned).view(2 * size, -1)
        lower, *batch = _normalise(pairs, scale, shift)
        between = lower @ second.T
        upper, *upper_batch = _normalise(between, upper_scale, upper_shift)
        scores = torch.addmv(links["last.bias"], self._halves, upper @ head)
        sigmoid = scores.sigmoid()
        kept = sigmoid >= THRESHOLD
        weight = kept.to(x) if self._settings.links == "hard" else sigmoid * kept
        align, smooth, to_weight, to_x = self._losses(x, weight, needs_x=not of_links)
        to_scores = torch.ops.aten.sigmoid_backward(to_weight * kept, sigmoid)
        to_each = to_scores @ self._halves
        to_between, *of_upper = _denormalise(
            torch.outer(to_each, head), upper, between, upper_scale, upper_batch,
            of_links,
        )  # fmt: skip
        to_pairs, *of_lower = _denormalise(
            to_between @ second, lower, pairs, scale, batch, of_links
        )
        to_ends = (self._ends.T @ to_pairs).view(size, -1)
        if to_x is not None:
            return align, smooth, [to_x.addmm_(to_ends, first)]
        found = {
            "first": to_ends.T @ x,
            "scale": torch.stack([of_lower[0], of_upper[0]]),
            "shift": torch.stack([of_lower[1], of_upper[1]]),
            "second.weight": to_between.T @ lower,
            "last.weight": (to_each @ upper)[None],
            "last.bias": to_scores.sum(dim=0, keepdim=True),
        }
        return align, smooth, [found[name] for name in links]

    def _losses(
        self, x: Tensor, weight: Tensor, *, needs_x: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return Eqs. (11) and (12), and the whole gradients by A'_ij, i < j, and by X'."""
        size = len(x)
        looped = torch.addmv(self._loops, self._halves.T, weight, alpha=2)
        looped = looped.view(size, size)
        inverse = looped.sum(dim=1).rsqrt()
        root = inverse[:, None]
        normalised = looped * inverse * root
        hops = [x]
        for _ in range(self._depth):
            hops.append(normalised @ hops[-1])
        align, to_hops = self._targets.distance(torch.cat(hops, dim=1))
        smooth, to_weight, slopes = self._smoothness(x, weight, needs_x=needs_x)
        # derivatives; those by the hops are without their weight
        weighted = 2 * self._settings.alignment_weight
        grads = to_hops.chunk(self._depth + 1, dim=1)
        to_hop, to_normalised = grads[-1], torch.zeros_like(normalised)
        for h in range(self._depth, 0, -1):
            to_normalised.addmm_(to_hop, hops[h - 1].T, alpha=weighted)
            if h > 1 or needs_x:
                to_hop = torch.addmm(grads[h - 1], normalised, to_hop)  # symmetric
        # Ã_ij = r_i r_j (A + I)_ij with r = (row sum of A + I)^(−1/2)
        of_degree = self._degrees @ (to_normalised * normalised).view(-1)
        of_degree = (of_degree * inverse * inverse)[:, None]
        to_looped = torch.addcmul(of_degree, to_normalised * inverse, root)
        to_weight = torch.addmv(to_weight, self._halves, to_looped.view(-1), alpha=2)
        if not needs_x:
            return align, smooth, to_weight, None
        to_x = to_hop * weighted
        if slopes is not None:
            to_x.addmm_(*slopes)
        return align, smooth, to_weight, to_x

    def _smoothness(
        self, x: Tensor, weight: Tensor, *, needs_x: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return Eq. (12) and its weighted gradients by A'_ij, i < j, and by X'.

        The latter is a product of the two matrices, ``None`` if it is not needed or zero.
        """
        similarity = self._similarity
        if needs_x or similarity is None:
            difference = self._across.T @ x
            block = difference.square().mul_(-0.5).exp_()
            similarity = block.mean(dim=1)
        self._similarity = None if needs_x else similarity  # the caller changes X'
        total = weight.sum()
        if not float(total):
            return total, torch.zeros_like(weight), None
        value = weight.dot(similarity) / total
        factor = self._settings.signed_smoothness / total
        to_weight = (similarity - value).mul_(factor)
        if not needs_x:
            return value, to_weight, None
        slope = weight * factor / -x.shape[1]
        return value, to_weight, (self._across * slope, block.mul_(difference))


def _normalise(rows: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """Apply batch normalisation and ReLU to rows (s², h); add what the former saves."""
    out, *saved = torch.native_batch_norm(
        rows, scale, shift, None, None, True, 0.0, EPSILON
    )
    return out.relu_(), *saved


def _denormalise(
    grad: Tensor, after: Tensor, rows: Tensor, scale: Tensor, saved: Sequence[Tensor],
    needs_weights: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Turn the gradient by the ReLU into those by rows, scale and shift."""
    grad = torch.ops.aten.threshold_backward(grad, after, 0)
    wanted = [True, needs_weights, needs_weights]
    out: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        grad, rows, scale, None, None, *saved, True, EPSILON, wanted
    )
    return out
