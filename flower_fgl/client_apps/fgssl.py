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

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedgen import divergence_terms
from flower_fgl.algorithms.prototypes.graph_views import union_pairs
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, Rows
from flower_fgl.methods.fgssl import FGSSLSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.backbone import RecordingBackbone, copy_network
from flower_fgl.nn.sparse import narrow_csr
from flower_fgl.nn.stacked import Ragged
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FGSSLClientApp", "edge_differences", "mask_columns", "node_contrast"]
__all__ += ["random_view"]


def node_contrast(
    embedding: Tensor, received: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Compute the contrast of nodes by class, FNSC.

    The mean over nodes i and over the nodes p of i's class, i itself included, of
    ``−log( e_ip / (e_ip + Σ_k e_ik) )`` with ``e_ij = e^{cos(z_i^m, z_j^g)/τ}``, where
    k runs over the nodes of other classes; (...), one number per client. z^m, with
    gradient, and z^g, constants, are (..., n, p) of the training nodes. Their classes
    ``labels`` (..., n) are at least two different ones of each client; −1 is padding.
    """
    own, other = F.normalize(embedding, dim=-1), F.normalize(received, dim=-1)
    similarity = own @ other.mT / tau
    is_real = labels >= 0
    is_same = (labels.unsqueeze(-1) == labels.unsqueeze(-2)) & is_real.unsqueeze(-1)
    is_other = ~is_same & is_real.unsqueeze(-2)
    others = similarity.masked_fill(~is_other, -torch.inf).logsumexp(-1, keepdim=True)
    losses = F.softplus(others - similarity) * is_same
    of_node = losses.sum(dim=-1) / is_same.sum(dim=-1).clamp(min=1)
    return of_node.sum(dim=-1) / is_real.sum(dim=-1)


def edge_differences(embedding: Tensor, pairs: Tensor) -> Tensor:
    """Compute |h_u − h_v| of edges ``pairs`` (2, E), each once: (E, p).

    h is ``embedding`` (N, p). The softmax over the p dimensions describes an edge, FGSD.
    """
    one, other = pairs
    return (embedding.index_select(0, one) - embedding.index_select(0, other)).abs()


def mask_columns(x: Tensor, kept: Tensor) -> Tensor:
    """Set the features of x (..., N, d), whose ``kept`` (..., d) is false, to 0.

    Masked entries of a sparse tensor, which is (N, d) or the block-diagonal (K·N, K·d),
    are left out.
    """
    if x.layout != torch.sparse_csr:
        return x * kept.view(*x.shape[:-2], 1, x.shape[-1]).to(x)
    columns, starts = x.col_indices(), x.crow_indices()
    stays = kept.flatten()[columns]
    before = torch.cat([starts.new_zeros(1), stays.to(starts.dtype).cumsum(0)])
    return narrow_csr(
        before[starts.long()], columns[stays], x.values()[stays], tuple(x.shape)
    )


def random_view(
    graph: GraphInput,
    pairs: Tensor,
    counts: Sequence[int],
    generators: Sequence[torch.Generator],
    *,
    edge_drop: float,
    feature_mask: float,
) -> GraphInput:
    """Draw a view of the clients' graphs with fewer edges and features.

    ``pairs`` (2, E) are their edges, each once, ``counts`` of each client; both directions
    are kept or dropped. ``edge_drop`` and ``feature_mask`` are the probabilities of an
    edge, and of a feature of all nodes, to be dropped.
    """
    edges, features = [], []
    for count, generator in zip(counts, generators, strict=True):
        edges.append(torch.rand(count, generator=generator))
        features.append(torch.rand(graph.num_features, generator=generator))
    left = pairs[:, (torch.cat(edges) >= edge_drop).to(pairs.device)]
    x = graph.x
    if feature_mask:
        x = mask_columns(x, (torch.stack(features) >= feature_mask).to(x.device))
    return graph.with_edges(torch.cat([left, left.flip(0)], dim=1)).with_features(x)


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

    stacked = True
    fit = GroupClientApp.fit
    records_embedding = True

    def stack_key(self, client: Client, download: Weights) -> bool:
        """Separate clients whose training nodes have one class: they draw no views."""
        labels = client.data.training.labels
        return len(labels) > 0 and bool((labels != labels[0]).any())

    def penalties(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> Callable[[], Tensor]:
        """Return a function for both weighted losses; ``model`` holds the download."""
        assert isinstance(model, RecordingBackbone)
        settings: FGSSLSettings = group.config.method_config
        inputs, rows, number = group.inputs, group.rows, len(group)
        received = copy_network(model.backbone).eval()
        size = inputs.num_nodes // number
        pairs = union_pairs(inputs.num_nodes, inputs.edge_index)
        client = pairs[0].div(size, rounding_mode="floor")
        of_pair = Rows(pairs[0], client, client, number)
        counts = of_pair.count.tolist()
        with torch.no_grad():
            edges = edge_differences(received.embed(inputs).flatten(0, -2), pairs)
        has_classes = self.stack_key(group.clients[0], downloads[0])
        generators = group.generators("views")
        padded = Ragged(rows.count.tolist(), group.device)
        labels = torch.full_like(padded.index, -1).flatten()
        labels[padded.slots] = rows.labels
        labels = labels.view_as(padded.index)

        def penalty() -> Tensor:
            out = model.embedding.new_zeros(number)
            if settings.structure_weight and pairs.shape[1]:
                own = edge_differences(model.embedding.flatten(0, -2), pairs)
                terms = divergence_terms(own, edges, tau=settings.structure_tau)
                out = out + settings.structure_weight * of_pair.mean(terms.sum(dim=1))
            if settings.contrast_weight and has_classes:
                rates = (
                    (settings.global_edge_drop, settings.global_feature_mask),
                    (settings.local_edge_drop, settings.local_feature_mask),
                )
                weak, strong = (
                    random_view(
                        inputs, pairs, counts, generators, edge_drop=e, feature_mask=f
                    )
                    for e, f in rates
                )
                with torch.no_grad():
                    target = rows.pick(received.embed(weak))[padded.index]
                z = rows.pick(model.backbone.embed(strong))[padded.index]
                near = node_contrast(z, target, labels, tau=settings.tau)
                out = out + settings.contrast_weight * near
            return out

        return penalty
