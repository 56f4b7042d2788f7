"""Weights of items by their difficulty, and the virtual adversarial loss: FLIT and FLIT+.

Zhu, Luo and White, "Federated learning of molecular properties with graph neural networks
in a heterogeneous setting", Patterns 2022, as its published code computes them.

===========  ==========================================================
symbol       here
===========  ==========================================================
ℓ, ℓ^g       :func:`item_losses` of the network in training, and of the received one
v, v^g       :func:`virtual_loss` of both
φ            ``difficulty(ℓ, ℓ^g) + λ · difficulty(v, v^g)``
D            :func:`running_mean` of φ over the steps of a round
ω            :func:`item_weights`
u            output of the input layer, which :func:`shifted_output` shifts
===========  ==========================================================
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch.func import functional_call

from flower_fgl.algorithms.fedgen import divergence_terms
from flower_fgl.core.regression import number_losses
from flower_fgl.core.targets import CLASSES, LABELS, TargetKind
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.topology import Direction, Messages, Ways

__all__ = ["difficulty", "item_losses", "item_weights", "output_distance"]
__all__ += ["running_mean", "shift_shapes", "shifted_output", "virtual_loss"]

SMALL, SMALL_NORM = 1e-7, 1e-8
"""Numbers of the published code that keep quotients and powers finite."""
KEPT, XI, EPSILON = 0.8, 1e-3, 2.5
"""Share of D that a step keeps; lengths of the random shift and of the worst one."""
EDGE_LAYERS = ("edges", "edges_back")
"""Layers of GINE that map the features of edges, in the order of its ways."""

Output = Callable[[Sequence[Tensor]], Tensor]
"""Takes shifts, or none, and returns the outputs (b, C) of a step's items."""


def item_losses(
    output: Tensor,
    labels: Tensor,
    *,
    kind: TargetKind,
    loss: str = "mse",
    delta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss ℓ (b, T), 0 where unknown, and which entries (b, T) are known.

    ``output`` (b, C) are logits of classes, and ``labels`` (b,) classes, T = 1; or both are
    (b, T), of labels 1 and 0 or of standardised numbers, NaN where unknown. ``loss`` and
    Huber's ``delta`` are the settings of losses of numbers.
    """
    if kind == CLASSES:
        found = F.cross_entropy(output, labels, reduction="none")[:, None]
        return found, torch.ones_like(found, dtype=torch.bool)
    is_known, wanted = ~labels.isnan(), labels.nan_to_num()
    if kind == LABELS:
        found = F.binary_cross_entropy_with_logits(output, wanted, reduction="none")
    else:
        found = number_losses(output, wanted, loss=loss, delta=delta)
    return found * is_known, is_known


def difficulty(own: Tensor, received: Tensor) -> Tensor:
    """Compute ``ℓ + max(0, ℓ − ℓ^g)``; ``received`` is a constant of the same shape."""
    return own + (own - received.detach()).relu()


def running_mean(before: Tensor, phi: Tensor, is_known: Tensor) -> Tensor:
    """Return D after a step, without gradient: ``.8 D + .2 mean φ``, at first mean φ.

    ``before`` (T,) is NaN for a target without a known entry so far; ``phi`` and
    ``is_known`` are (b, T). A target without a known entry in the step keeps its D.
    """
    count = is_known.sum(dim=0)
    mean = (phi.detach() * is_known).sum(dim=0) / count.clamp(min=1)
    mixed = torch.where(before.isnan(), mean, KEPT * before + (1 - KEPT) * mean)
    return torch.where(count > 0, mixed, before)


def item_weights(phi: Tensor, mean: Tensor, *, gamma: float) -> Tensor:
    """Compute ``ω = (1 − e^{−φ/(D + 1e-7)} + 1e-7)^γ``.

    ``phi`` is (b, T) and ``mean`` D, of shape (T,). With γ = 0 all weights are 1.

    Notes
    -----
    1. The gradient of the loss ω·ℓ flows through ω, as in the published code.
    """
    scaled = phi / (mean.nan_to_num() + SMALL)
    return (-torch.expm1(-scaled) + SMALL) ** gamma


def output_distance(fixed: Tensor, moved: Tensor, *, kind: TargetKind) -> Tensor:
    """Compute how far outputs moved: (b, T) of labels and numbers, (b, 1) of classes.

    It is the squared error of numbers, the KL divergence KL(fixed ‖ moved) of classes, and
    of labels the binary cross-entropy with the sigmoid of ``fixed`` as label. ``fixed``
    and ``moved`` have the shape (b, C) or (b, T).
    """
    if kind == CLASSES:
        return divergence_terms(moved, fixed).sum(1, keepdim=True)
    if kind == LABELS:
        wanted = fixed.sigmoid()
        return F.binary_cross_entropy_with_logits(moved, wanted, reduction="none")
    return F.mse_loss(moved, fixed, reduction="none")


def virtual_loss(
    output: Output, noise: Sequence[Tensor], *, kind: TargetKind
) -> Tensor:
    """Compute v (b, T), how far a shift of u in the worst direction moves the outputs.

    The direction g is the gradient of :func:`output_distance` at a random shift, scaled to
    rows of length 1; v is the distance between f(u + ε g) and f(u). The gradient flows
    through f(u + ε g) alone. ``output`` is f, without random numbers, and the rows of
    ``noise`` are scaled to the length ξ.
    """
    with torch.no_grad():
        fixed = output(())
    with torch.enable_grad():
        shifts = [(XI * _unit_rows(part)).requires_grad_() for part in noise]
        moved = output_distance(fixed, output(shifts), kind=kind).sum()
        slopes = torch.autograd.grad(moved, shifts, materialize_grads=True)
    worst = [EPSILON * _unit_rows(slope) for slope in slopes]
    return output_distance(fixed, output(worst), kind=kind)


def _unit_rows(rows: Tensor) -> Tensor:
    """Scale rows to length 1; rows of zeros stay zero."""
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / (norm + SMALL_NORM)


def shift_shapes(model: Backbone, graph: GraphInput) -> list[tuple[int, int]]:
    """Return the shapes of the shifts that :func:`shifted_output` takes.

    These are (N, p) for the output of the input layer, or (N, d) for the features of a
    backbone without one, then (M, p) for each way of GINE's M messages.
    """
    encoder: Any = model.encoder
    if not _has_input_layer(encoder, graph):
        return [(graph.num_nodes, graph.num_features)]
    width = model.hidden_channels
    shapes = [(graph.num_nodes, width)]
    if EDGE_LAYERS[0] in encoder:
        ways = graph.ways(model.edge_direction)
        shapes += [(len(way.x), width) for way in ways if way is not None]
    return shapes


def shifted_output(
    model: Backbone, graph: GraphInput, shifts: Sequence[Tensor]
) -> Tensor:
    """Return the outputs with ``shifts`` of :func:`shift_shapes`, or without any.

    Notes
    -----
    1. GINE maps the features of edges anew in each layer. All layers add one shift to
       what they map them to.
    """
    if not shifts:
        return model(graph)  # type: ignore[no-any-return]
    encoder: Any = model.encoder
    first, *edges = shifts
    if not _has_input_layer(encoder, graph):
        return model(graph.with_features(graph.dense_features() + first))  # type: ignore[no-any-return]
    ways, changed = [], {}
    for shift, name, way in zip(
        edges, EDGE_LAYERS, graph.ways(model.edge_direction) if edges else (),
        strict=False,
    ):  # fmt: skip
        assert way is not None
        ways.append(Messages(way.index, torch.cat([way.x, shift], dim=1)))
        own = torch.eye(shift.shape[1], dtype=shift.dtype, device=shift.device)
        for number, layer in enumerate(encoder[name]):
            wider = torch.cat([layer.weight, own], dim=1)  # W_e x + shift
            changed[f"encoder.{name}.{number}.weight"] = wider
    shifted = ShiftedInput(graph, first, Ways(*ways) if ways else None)
    return functional_call(model, changed, (shifted,))  # type: ignore[no-any-return]


def _has_input_layer(encoder: Any, graph: GraphInput) -> bool:
    """Return whether the encoder has an input layer, or one per kind of typed nodes."""
    if not isinstance(encoder, torch.nn.ModuleDict):
        return False
    return "input" in encoder or ("types" in encoder and graph.num_features > 0)


class ShiftedInput(GraphInput):
    """A graph whose map of features is shifted by (N, p), with other messages if given."""

    def __init__(self, graph: GraphInput, shift: Tensor, own_ways: Ways | None) -> None:
        vars(self).update(vars(graph))  # with its operators
        self.shift, self.own_ways = shift, own_ways

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map representations; shift the map of the features."""
        out = super().linear(h, weight, bias)
        return out if h is not None else out + self.shift

    def ways(self, direction: Direction) -> Ways:
        """Return the messages with shifts."""
        return super().ways(direction) if self.own_ways is None else self.own_ways
