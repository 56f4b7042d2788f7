"""What FedPANO computes: a personal model, a generator of nodes, and what is shared.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.own_network import SplitNet
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.layers import RepNorm, bound
from flower_fgl.nn.models import build_model
from flower_fgl.nn.sparse import SparseOperator
from flower_fgl.nn.stacked import Descent, linear_each
from flower_fgl.nn.topology import Topology

__all__ = ["NodeGenerator", "PersonalNet", "SharedParts", "StackedPersonalNet"]
__all__ += ["build_encoder", "descend_distance", "entropy_slope"]
__all__ += ["gaussian_copies", "mean_distance", "mean_rows", "spread", "synthesise"]


def build_encoder(name: str, **sizes: Any) -> Backbone:
    """Build a backbone without classifier, for :meth:`Backbone.represent`.

    Parameters and errors are those of :func:`~flower_fgl.nn.build_model`, without
    ``num_classes``. All layers of layered backbones have width ``hidden_channels``.
    """
    # with a linear head all layers belong to the encoder
    encoder = build_model(name, num_outputs=1, has_linear_head=True, **sizes)
    encoder.classifier = nn.Identity()
    return encoder


class PersonalNet(SplitNet):
    """A graph network θ^g and a linear classifier of selected classes, not copied.

    ``classes`` (c,), int64, are the predicted classes, in the order of the classifier's
    outputs; a classifier may also have all C. Representations are normalised by
    ``rep_norm``, see :func:`~flower_fgl.nn.normalize.bound`.
    """

    classes: Tensor
    rep_norm: RepNorm

    def __init__(
        self,
        encoder: Backbone,
        classifier: nn.Linear,
        classes: Tensor,
        num_classes: int,
        rep_norm: RepNorm,
    ) -> None:
        super().__init__(encoder, classifier)
        self.register_buffer("classes", classes)
        self.num_classes, self.rep_norm = num_classes, rep_norm

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the normalised representation of each node: (N, H)."""
        return bound(super().embed_nodes(graph), self.rep_norm)

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes: logits (N, C), -inf for classes not in ``classes``."""
        own: Tensor = self.classifier(h)
        if own.shape[1] != len(self.classes):
            own = own.index_select(1, self.classes)
        logits = own.new_full((len(own), self.num_classes), -math.inf)
        return logits.index_copy(1, self.classes, own)


class StackedPersonalNet(PersonalNet):
    """The networks of K clients, with classifiers of all C classes.

    ``classes`` (K, C), bool, are those that each client predicts.
    """

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes: logits (K, n, C), -inf for classes that a client has not."""
        classifier = cast(nn.Linear, self.classifier)
        every = graph.linear(h, classifier.weight, classifier.bias)
        return every.masked_fill(~self.classes[:, None], -math.inf)


TINY = 1e-12
"""Added to squared lengths, because a square root has no gradient at 0."""


class NodeGenerator(nn.Sequential):
    """The generator φ: two linear layers, with ReLU and Tanh; 3·H² + 2·H parameters.

    With weights of K clients, (K, H, 2H) and (K, H, H), the input is (K, n, m, 2H).
    """

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh()
        )

    def forward(self, context: Tensor) -> Tensor:
        """Generate nodes (..., H) from contexts (..., 2H)."""
        first, second = cast(nn.Linear, self[0]), cast(nn.Linear, self[2])
        if first.weight.dim() == 2:
            out: Tensor = super().forward(context)  # type: ignore[no-untyped-call]
            return out
        h = linear_each(context.flatten(1, 2), first.weight, first.bias).relu_()
        h = linear_each(h, second.weight, second.bias).tanh_()
        return h.view(*context.shape[:-1], -1)


def synthesise(
    generator: nn.Module, nodes: Tensor, around: Tensor, noise: Tensor
) -> Tensor:
    """Generate synthetic nodes, ``φ([h_u ‖ mean_{v∈N(u)} h_v] + ε)``, FedPANO Eq. (6).

    φ maps 2H to H numbers between -1 and 1. ``nodes`` (n, H) are h_u of the training
    nodes, ``around`` (n, H) means over their neighbours, zero without neighbours, and
    ``noise`` (n, m, 2H) is ε, independent for each of the m copies; it is overwritten by
    φ's inputs. The result ĥ is (n, m, H). For K clients all have one more dimension K.

    Notes
    -----
    1. The paper's ``a ‖ b + ε`` is ambiguous. Here the noise covers the generator's whole
       input; noise with zeros in the first half is added to the neighbours' mean only.
    """
    out: Tensor = generator(contexts(nodes, around, noise))
    return out


def contexts(nodes: Tensor, around: Tensor, noise: Tensor) -> Tensor:
    """Turn ``noise`` into the inputs of φ, see :func:`synthesise`."""
    return noise.add_(torch.cat([nodes, around], dim=-1)[..., None, :])


def gaussian_copies(nodes: Tensor, noise: Tensor) -> Tensor:
    """Generate synthetic nodes (n, m, H) without a generator, ``h_u + ε``, FedPANO-nG."""
    return nodes[..., None, :] + noise


def mean_distance(
    nodes: Tensor, synthetic: Tensor, share: Tensor | None = None
) -> Tensor:
    """Return the mean distance of synthetic nodes to their origin, FedPANO Eq. (7).

    ``1/n Σ_u 1/m Σ_j ‖h_u − ĥ_{u,j}‖``, not squared, of h_u (n, H), constant, and ĥ (n,
    m, H). For K clients both have one more dimension K; ``share`` (K, n) is then the
    weight of each node, 1/n or 0 for padding, and the result is (K,).
    """
    squares = (synthetic - nodes[..., None, :]).square().sum(dim=-1)
    each = (squares + TINY).sqrt()
    return each.mean() if share is None else (each.mean(dim=-1) * share).sum(dim=-1)


def descend_distance(
    generator: NodeGenerator,
    nodes: Tensor,
    around: Tensor,
    noise: Tensor,
    share: Tensor,
    descent: Descent,
) -> Tensor:
    """Take a step of SGD on φ of K clients by :func:`mean_distance`, written out, in place.

    The arguments are those of :func:`synthesise` and :func:`mean_distance`. Returns the
    distance before the step, (K,).
    """
    first, second = cast(nn.Linear, generator[0]), cast(nn.Linear, generator[2])
    clients, size, copies, _ = noise.shape
    rows = contexts(nodes, around, noise).flatten(1, 2)
    hidden = linear_each(rows, first.weight, first.bias).relu_()
    made = linear_each(hidden, second.weight, second.bias).tanh_()
    apart = made.view(clients, size, copies, -1) - nodes[:, :, None]
    length = (apart.square().sum(dim=-1, keepdim=True) + TINY).sqrt()
    weight = share[:, :, None, None] / copies
    slope = apart.mul_(weight / length).view_as(made)
    slope = torch.ops.aten.tanh_backward(slope, made)
    back = torch.bmm(slope, second.weight)
    descent.step(second.weight, second.bias, slope, hidden)
    back = torch.ops.aten.threshold_backward(back, hidden, 0)
    descent.step(first.weight, first.bias, back, rows)
    return (length * weight).sum(dim=(1, 2, 3))


def entropy_slope(
    logits: Tensor, labels: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross-entropies of each client, and its derivative.

    ``logits`` are (K, n, C), ``labels`` and the ``weight`` of each row (K, n). The sum is
    (K,), the derivative by the logits (K, n, C).
    """
    chance, label = logits.log_softmax(dim=-1), labels[..., None]
    loss = -(chance.gather(-1, label).squeeze(-1) * weight).sum(dim=1)
    one = chance.new_full((1, 1, 1), -1.0).expand(label.shape)
    slope = chance.exp_().scatter_add_(-1, label, one)
    return loss, slope.mul_(weight[..., None])


def spread(synthetic: Tensor, share: Tensor | None = None) -> Tensor:
    """Return the mean distance of two synthetic nodes ĥ (n, m, H) of one training node.

    A generator that copies h_u and ignores the noise minimises Eq. (7). The spread is
    then 0. It is computed from the first two of each node, and 0 if m is 1. K clients and
    ``share`` are as in :func:`mean_distance`.
    """
    if synthetic.shape[-2] == 1:
        return synthetic.new_zeros(synthetic.shape[:-3])
    apart = synthetic[..., 0, :] - synthetic[..., 1, :]
    distance: Tensor = torch.linalg.vector_norm(apart, dim=-1)
    return distance.mean() if share is None else (distance * share).sum(dim=-1)


def mean_rows(edge_index: Tensor, nodes: Tensor, num_nodes: int) -> SparseOperator:
    """Build the rows (n, N) of ``D⁻¹ A`` that belong to distinct nodes (n,).

    The row of a node without neighbours is zero.
    """
    topology = Topology(edge_index, None, num_nodes, torch.get_default_dtype())
    whole = cast(SparseOperator, topology.operator("mean"))
    return SparseOperator(select_rows(whole.matrix, nodes))


class SharedParts(nn.Module):
    """θ^g, θ^s and φ, as far as a variant sends them; the server initialises them once.

    Sizes are those of :func:`~flower_fgl.algorithms.fedpano.build_encoder`, C is
    that of all clients, and ``method_config`` determines which parts exist. Without
    ``initialise`` the caller must load the encoder's parameters. Parameters: P_g = 2dH +
    H + (L − 1)(2H² + H) for GraphSAGE, P_s = HC + C, P_φ = 3H² + 2H.
    """

    def __init__(
        self,
        model: str,
        *,
        num_classes: int,
        method_config: FedPANOSettings,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.encoder: Backbone = build_encoder(model, **sizes)
        width = self.encoder.hidden_channels
        self.classifier: nn.Linear | None = None
        self.generator: NodeGenerator | None = None
        if method_config.use_shared_classifier:
            self.classifier = nn.Linear(width, num_classes)
        if method_config.sends_generator:
            self.generator = NodeGenerator(width)
