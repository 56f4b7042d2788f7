"""Classification by the nearest class mean in an embedding space."""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.layers import bound

__all__ = ["FixedMeans", "NearestMean", "distance_logits", "held_out_loss"]
__all__ += ["logits_to_means"]

TAU = 0.1
"""τ: divisor that makes distances of unit vectors, at most 2, separate classes."""


def distance_logits(
    embedding: Tensor, support: Tensor, labels: Tensor, num_classes: int
) -> Tensor:
    """Compute −‖h_u − μ_c‖ / τ, μ_c the mean of a class's support: (N, C).

    Their softmax is that of prototypical networks (Snell et al., NeurIPS 2017, Eq. 2)
    with d the Euclidean distance; the largest logit belongs to the nearest mean. h is
    ``embedding`` (N, p), and ``support`` (n, p), at least one, has the classes ``labels``
    (n,). −inf for classes without support.

    Notes
    -----
    1. Snell et al. square the distance. The gradient of a square vanishes for close
       embeddings and grows for distant ones. The gradient of a distance has constant
       length; at distance 0, where it is undefined, it is 0.
    """
    return logits_to_means(embedding, *_means_of(support, labels, num_classes))


def _means_of(
    support: Tensor, labels: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return μ (C, p), and which classes have a mean (C,)."""
    classes = torch.bincount(labels, minlength=num_classes) > 0
    return class_means(support, labels, num_classes), classes


def logits_to_means(embedding: Tensor, means: Tensor, classes: Tensor) -> Tensor:
    """Compute −‖h_u − μ_c‖ / τ, (N, C), for means (C, p); −inf for classes without one."""
    # a formula with scalar products would cancel numerically for nearby embeddings
    direct = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(embedding, means, compute_mode=direct) / TAU
    return -distance.masked_fill(~classes, torch.inf)


def held_out_loss(embedding: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Classify each item by class means that do not contain it; average −log p.

    Each item h, a row of ``embedding`` (n, p), at least one, is once the query. The
    support of its class are the other items of the class, that of another class are all
    its items. Items that are the only one of their class are in the support only. If all
    are, no item can be held out, and every item is classified by all means. The mean of a
    class of n items without u is at distance ``n / (n − 1)`` times that of the mean with
    u from h_u.
    """
    logits = distance_logits(embedding, embedding, labels, num_classes)
    number = torch.bincount(labels, minlength=num_classes)[labels]
    has_others = number > 1
    if not bool(has_others.any()):
        return F.cross_entropy(logits, labels)
    factor = number / (number - 1).clamp(min=1)
    own = F.one_hot(labels, num_classes).bool()
    logits = torch.where(own, logits * factor[:, None], logits)
    return F.cross_entropy(logits[has_others], labels[has_others])


class FixedMeans(Backbone):
    """Classifier by constant class means: :class:`NearestMean` without training nodes.

    ``means`` (C, p) are those of the training nodes' embeddings by ``network``; ``classes``
    (C,), bool, are those with training nodes.
    """

    means: Tensor
    classes: Tensor

    def __init__(self, network: Backbone, means: Tensor, classes: Tensor) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.register_buffer("means", means)
        self.register_buffer("classes", classes)

    def forward(self, graph: GraphInput) -> Tensor:
        """Return −‖h − μ_c‖ / τ of all nodes, or graphs: (N, C)."""
        embedding = bound(self.network(graph), "l2")
        return logits_to_means(embedding, self.means, self.classes)


class NearestMean(Backbone):
    """Embed by a network's outputs of unit length; predict the nearest class mean.

    The means are those of the training nodes (or graphs) under the current weights,
    with gradient. For a selection of training graphs, such as a mini-batch, they are
    the means of the selection. The "classes" of ``network`` are the dimensions of the
    embedding. ``index`` and ``labels`` (n,) are the training items of ``inputs``,
    ascending; ``part`` is their receptive field, in place of the whole graph.

    Notes
    -----
    1. Its state is the network's state alone, under ``network.``.
    2. Without unit length the loss vanishes as embeddings grow, even for close classes;
       with squared distances it diverges under plain SGD at a rate of 0.1. With squared
       distances of unit vectors, not divided by τ, the training loss does not fall in 50
       rounds with few shots of Computers. Divided by τ = 0.1 it is below 0.01 after 20
       rounds there and on CS.
    """

    def __init__(
        self,
        network: Backbone,
        inputs: GraphInput,
        index: Tensor,
        labels: Tensor,
        num_classes: int,
        part: GraphInput | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.inputs, self.part = inputs, part
        self.index = index
        self.labels = labels
        self.num_classes = num_classes

    @property
    def reach(self) -> int | None:
        """The network's number of layers that read neighbours."""
        return None if self.part is None else self.network.reach

    def embed_training(self) -> Tensor:
        """Return h of the training items: (n, p)."""
        if self.part is not None:
            return bound(self.network(self.part), "l2")
        return bound(self.network(self.inputs)[self.index], "l2")

    def forward(self, graph: GraphInput) -> Tensor:
        """Return −‖h − μ_c‖ / τ of all nodes, or graphs: (N, C)."""
        embedding = bound(self.network(graph), "l2")
        labels = self.labels
        if self.part is not None and graph is self.part:
            support = embedding
        elif graph is self.inputs:
            support = embedding[self.index]
        elif graph.selected is not None:
            support = embedding
            labels = labels[torch.searchsorted(self.index, graph.selected)]
        else:
            support = self.embed_training()
        return distance_logits(embedding, support, labels, self.num_classes)

    @torch.no_grad()
    def fixed(self) -> FixedMeans:
        """Return the network with the means under the current weights."""
        means = _means_of(self.embed_training(), self.labels, self.num_classes)
        return FixedMeans(self.network, *means)
