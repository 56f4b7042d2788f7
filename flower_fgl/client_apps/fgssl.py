"""Client half of FGSSL: FedAvg with two losses against the received model.

Huang et al., "Federated Graph Semantic and Structural Learning", IJCAI 2023.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flower_fgl.algorithms.fgssl import edge_differences, node_contrast, random_view
from flower_fgl.algorithms.prototypes.graph_views import union_pairs
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.distillation import distillation
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.methods.fgssl import FGSSLSettings
from flower_fgl.nn.backbone import RecordingBackbone, copy_network
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FGSSLClientApp"]

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
                kept = distillation(own, edges, tau=settings.structure_tau)
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
