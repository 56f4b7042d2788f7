"""Equations and module of FedSpray: an encoder without edges, and structure proxies.

Fu et al., "Federated Graph Learning with Structure Proxy Alignment", KDD 2024.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.fedgen import mean_divergence
from flower_fgl.nn import GraphInput

__all__ = ["PROXIES", "NodeProxies", "SprayEncoder", "combine_proxies", "encoder_loss"]
__all__ += ["node_proxies", "reliable_nodes"]

PROXIES = "proxies"
"""Name of the class proxies in the state of the encoder."""

CLASS_START, NODE_START = 0.01, 0.1
"""Initial class proxy of class c: this times c. Initial proxy of a training node."""


class SprayEncoder(nn.Module):
    """The shared part: an encoder of features, two classifiers, and class proxies π.

    The classifiers of e, the output of :meth:`hidden`, are κ_1 with a node's proxy and κ_2
    alone.
    """

    proxies: Tensor

    def __init__(self, num_features: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(num_features, width)
        self.with_proxy = nn.Linear(width, num_classes)
        self.alone = nn.Linear(width, num_classes)
        start = CLASS_START * torch.arange(num_classes)[:, None].expand(-1, width)
        self.register_buffer(PROXIES, start.clone())

    def hidden(self, graph: GraphInput) -> Tensor:
        """Return e of every node, of shape (N, q); edges have no effect."""
        return graph.linear(None, self.encoder.weight, self.encoder.bias).relu()


class NodeProxies(nn.Module):
    """The learned proxies of a client's training nodes, of shape (n, q)."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((number, width), NODE_START))


def node_proxies(soft: Tensor, classes: Tensor, index: Tensor, own: Tensor) -> Tensor:
    """Return every node's proxy (N, q): Σ_c p_c π_c, and the own one of training nodes.

    ``soft`` (N, C) is p, the softmax of κ_2; ``classes`` (C, q) are π. ``index`` (n,) are
    training nodes, and ``own`` (n, q) their proxies.
    """
    return (soft @ classes).index_copy(0, index, own)


def reliable_nodes(soft: Tensor, index: Tensor, *, confidence: float) -> Tensor:
    """Return the nodes (m,) that are distilled: training nodes, and those with a high p.

    ``soft`` and ``index`` are as in :func:`node_proxies`; the largest p must exceed
    ``confidence``. The result is sorted.
    """
    found = (soft.amax(dim=1) > confidence).index_fill(0, index, value=True)
    return found.nonzero()[:, 0]


def encoder_loss(
    alone: Tensor, with_proxy: Tensor, labels: Tensor, network: Tensor
) -> Tensor:
    """Compute CE(κ_2) + KL(GNN ‖ κ_1) of the training nodes.

    ``alone`` and ``with_proxy`` (n, C) are the logits of κ_2 on e and of κ_1 on e plus
    proxy, ``network`` (n, C) those of the graph network, constants; ``labels`` (n,) are
    classes.
    """
    return F.cross_entropy(alone, labels) + mean_divergence(with_proxy, network)


def combine_proxies(
    old: Tensor, values: Tensor, counts: Tensor, sizes: Tensor
) -> Tensor:
    """Average the class proxies, weighted by the share of the class in each client: (C, q).

    ``old`` (C, q) is π of the round before, kept by classes that no client uploads;
    ``values`` (K, C, q) are the uploads, ``counts`` (K, C) n_i^c, 0 marks a missing
    proxy, and ``sizes`` (K,) n_i, the training nodes of each client.
    """
    shares = counts / sizes.clamp(min=1)[:, None]
    total = shares.sum(dim=0)
    mean = torch.einsum("kc,kcq->cq", shares, values)
    mean = mean / total.where(total > 0, 1.0)[:, None]
    return torch.where(total[:, None] > 0, mean, old)
