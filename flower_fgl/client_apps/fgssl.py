"""Client half of FGSSL: FedAvg with two losses against the received model.

Huang et al., "Federated Graph Semantic and Structural Learning", IJCAI 2023.

===========  ==========================================================
symbol       argument
===========  ==========================================================
z^m          ``embedding``, of the model in training on its view
z^g          ``received``, of the received model on its view
τ            ``tau``
===========  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedgen import mean_divergence
from flower_fgl.algorithms.prototypes.graph_views import union_pairs
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fgssl import FGSSLSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.backbone import RecordingBackbone, copy_network
from flower_fgl.nn.sparse import narrow_csr
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FGSSLClientApp", "edge_differences", "mask_columns", "node_contrast"]
__all__ += ["random_view"]


def node_contrast(
    embedding: Tensor, received: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Compute the contrast of nodes by class, FNSC.

    The mean over nodes i and over the nodes p of i's class, i itself included, of
    ``−log( e_ip / (e_ip + Σ_k e_ik) )`` with ``e_ij = e^{cos(z_i^m, z_j^g)/τ}``, where
    k runs over the nodes of other classes. z^m, with gradient, and z^g, constants, are
    (n, p) of the training nodes; their classes ``labels`` (n,) are at least two
    different ones.
    """
    similarity = F.normalize(embedding, dim=1) @ F.normalize(received, dim=1).T / tau
    is_same = labels[:, None] == labels
    others = similarity.masked_fill(is_same, -torch.inf).logsumexp(dim=1, keepdim=True)
    losses = F.softplus(others - similarity) * is_same
    return (losses.sum(dim=1) / is_same.sum(dim=1)).mean()


def edge_differences(embedding: Tensor, pairs: Tensor) -> Tensor:
    """Compute |h_u − h_v| of edges ``pairs`` (2, E), each once: (E, p).

    h is ``embedding`` (N, p). The softmax over the p dimensions describes an edge, FGSD.
    """
    one, other = pairs
    return (embedding.index_select(0, one) - embedding.index_select(0, other)).abs()


def mask_columns(x: Tensor, kept: Tensor) -> Tensor:
    """Set the features of x (N, d), whose ``kept`` (d,) is false, to 0, in the layout of x.

    Masked entries of a sparse tensor are left out.
    """
    if x.layout != torch.sparse_csr:
        return x * kept
    columns, starts = x.col_indices(), x.crow_indices()
    stays = kept[columns]
    before = torch.cat([starts.new_zeros(1), stays.to(starts.dtype).cumsum(0)])
    return narrow_csr(
        before[starts.long()], columns[stays], x.values()[stays], tuple(x.shape)
    )


def random_view(
    graph: GraphInput,
    pairs: Tensor,
    generator: torch.Generator,
    *,
    edge_drop: float,
    feature_mask: float,
) -> GraphInput:
    """Draw a view of a graph with fewer edges and features.

    ``pairs`` (2, E) are its edges, each once; both directions are kept or dropped.
    ``edge_drop`` and ``feature_mask`` are the probabilities of an edge, and of a feature of
    all nodes, to be dropped.
    """
    edges = torch.rand(pairs.shape[1], generator=generator) >= edge_drop
    features = torch.rand(graph.num_features, generator=generator) >= feature_mask
    left = pairs[:, edges.to(pairs.device)]
    both = torch.cat([left, left.flip(0)], dim=1)
    x = graph.x
    if feature_mask:
        x = mask_columns(x, features.to(x.device))
    return graph.with_edges(both).with_features(x)


Client = AnyClient[FGSSLSettings]


class FGSSLClientApp(FedAvgClientApp):
    """Contrast the nodes of two views, and keep the edges of the received model.

    Notes
    -----
    1. The embeddings are the backbone's, and the training nodes are contrasted: only
       their classes are known.
    2. Each step draws both views anew. The received model reads its view without dropout.
    3. The distillation compares the edges of the whole graph.
    4. The benchmark OpenFGL computes the contrast and drops it; here it trains the
       encoder. A client of one class has no contrast.
    5. With mini-batches, every step still contrasts all training nodes and distils all
       edges.
    6. Fine-tuning trains the cross-entropy alone, and starts with fresh moments of the
       optimizer.
    """

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train from the received weights with both losses."""
        model = RecordingBackbone(client.receive(download.tensors))
        terms = self.received_terms(client, server_round, model)
        loss = client.train(model, server_round, penalty=terms)
        return Fit(model.backbone, Weights(model.backbone.state_dict()), loss)

    def received_terms(
        self, client: Client, server_round: int, model: RecordingBackbone
    ) -> Callable[[], Tensor]:
        """Return a function for both weighted losses; ``model`` holds the download."""
        settings, data = client.config.method_config, client.data.training
        graph, index, labels = data.inputs, data.index, data.labels
        received = copy_network(model.backbone).eval()
        pairs = union_pairs(graph.num_nodes, graph.edge_index)
        with torch.no_grad():
            edges = edge_differences(received.embed(graph), pairs)
        has_classes = len(labels) > 0 and bool((labels != labels[0]).any())
        generator = client.generator(server_round, "views")

        def terms() -> Tensor:
            out = model.embedding.new_zeros(())
            if settings.structure_weight and pairs.shape[1]:
                own = edge_differences(model.embedding, pairs)
                kept = mean_divergence(own, edges, tau=settings.structure_tau)
                out = out + settings.structure_weight * kept
            if settings.contrast_weight and has_classes:
                rates = (
                    (settings.global_edge_drop, settings.global_feature_mask),
                    (settings.local_edge_drop, settings.local_feature_mask),
                )
                weak, strong = (
                    random_view(graph, pairs, generator, edge_drop=e, feature_mask=f)
                    for e, f in rates
                )
                with torch.no_grad():
                    target = received.embed(weak)[index]
                z = model.backbone.embed(strong)[index]
                near = node_contrast(z, target, labels, tau=settings.tau)
                out = out + settings.contrast_weight * near
            return out

        return terms
