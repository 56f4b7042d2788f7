"""Client half of FedPG: exchange multi-hop prototypes instead of weights.

Wu et al., "Federated Prototype Graph Learning", arXiv 2504.09493.

===============================  ==================================================
symbol                           argument or attribute
===============================  ==================================================
f_k, g_k                         ``RecordingBackbone.embed``, ``.head``
a_k                              ``Scorer``, kept in the client's state
S_c^k                            ``annotation == c``
N_c^h(v)                         ``Pairs`` of hop h with centre v
P_{c,h}^k                        ``HopAverage(...)(embedding)[c, h]``
Ṗ_{c,h}^k                        ``download.values[c, h]``
μ                                ``fedpg.mu``
===============================  ==================================================

===============================================  ===========================
Algorithm 1, client                              function
===============================================  ===========================
train by Eq. (6)                                 ``FedPGClientApp.penalty``
annotate unlabelled nodes                        ``annotate``
prototypes by Eq. (2)                            ``HopAverage``
===============================================  ===========================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.attention import (
    AdditiveScorer,
    Scorer,
    UnitRows,
    deviation_from_uniform,
)
from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs, annotate, select_pairs
from flower_fgl.algorithms.prototypes.hop_prototypes import (
    HopAverage,
    add_noise,
    node_distance,
    prototype_distance,
)
from flower_fgl.algorithms.prototypes.mlp_attention import NeighbourScorer
from flower_fgl.algorithms.prototypes.rings import ring_pairs
from flower_fgl.algorithms.prototypes.similar_graphs import similar_pairs
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedproto import PrototypeClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import load_state
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedpg import FedPGSettings
from flower_fgl.nn.embedding_recorder import RecordingBackbone
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["FedPGClientApp"]

Client = AnyClient[FedPGSettings]

ROUNDING = 1e-4
"""Relative error of a sum of weights in float32 that still counts as equal."""


class FedPGClientApp(PrototypeClientApp):
    """Train the client's model so that its prototypes stay near the personalized ones.

    Notes
    -----
    1. Prototypes are computed and uploaded once a round, after the last epoch. The printed
       algorithm indents this into the loop over epochs.
    2. During an epoch the classes of unlabelled nodes are those from the end of the
       client's last round. The same holds for the neighbours drawn for nodes with many.
    3. Labels of validation and test nodes are never used; the published code uses
       validation labels in the prototypes.
    4. In graph classification, graphs replace nodes, and the client's training graphs are
       the whole data. Training graphs without label are annotated by prediction, as
       Algorithm 1 does with unlabelled nodes. Validation and test graphs enter no
       prototype, not even unlabelled: a client does not train on them, unlike on the
       unlabelled nodes of its graph. The paper says nothing about either.
    5. Similar graphs are searched once a round, after the last epoch; the next round trains
       with them. The paper has a "construction step after obtaining the encoded
       representations", without saying how often.
    6. With mini-batches of graphs, or graphs without label, prototypes combine the
       embeddings of the step with the last known ones of the other graphs. No gradient
       flows through the latter.
    7. With ``min-class-count`` = m, a prototype is uploaded only if no single node has more
       than 1/m of its weight. Then at least m distinct nodes stand behind it.
    8. The attention has no weight decay: its gradient is small, and decay would keep all
       neighbours' weights equal. The term ``attention-deviation`` is the distance from
       equal weights.
    """

    def num_hops(self, client: Client) -> int:
        """Return L + 1."""
        return int(client.config.method_config.hops) + 1

    def starts_alone(self, client: Client) -> bool:
        """Return whether ``fedpg.init`` is ``own``."""
        return bool(client.config.method_config.init == "own")

    def fit(self, client: Client, server_round: int, download: Prototypes) -> Fit:
        """Train by Eq. (6), annotate, and compute prototypes by Eq. (2)."""
        method_config = client.config.method_config
        scorer = open_scorer(client) if method_config.attention else None
        model = RecordingBackbone(self.personal_model(client, download), scorer)
        penalty = self.penalty(client, server_round, model, scorer, download)
        loss = client.train(model, server_round, penalty=penalty)
        model.eval()
        with torch.no_grad():
            logits = model(client.data.inputs[0])
            annotation = self.annotation(client, logits)
            embedding = model.embedding
            average = average_of(
                client, server_round, annotation, lambda: embedding, is_retrained=True
            )
            unit = UnitRows(embedding)
            weights = average.weights(unit, scorer)
            values = average.combine(unit, weights)
        client.state.set_group("annotation", {"classes": annotation.float()})
        terms = {}
        counts, least = average.counts, client.config.min_class_count
        if scorer is not None:
            client.state.set_group("scorer", scorer.state_dict())
            if least <= 1:  # it can be of a single node
                apart = deviation_from_uniform(weights, average.around)
                terms["attention-deviation"] = apart
        # the server knows the run's seed and could undo noise drawn from it
        values = add_noise(values, share=method_config.noise_dims)
        if least > 1:
            kept = average.largest_shares(weights) * least <= 1 + ROUNDING
            values, counts = values * kept[..., None], counts * kept
        upload = LocalPrototypes(values.cpu(), counts.cpu())
        return Fit(model.backbone, upload, loss, terms=terms, logits=logits)

    def annotation(self, client: Client, logits: Tensor | None) -> Tensor:
        """Return classes (N,): labels of training items, else predictions, else −1."""
        data, method_config = client.data.training, client.config.method_config
        if logits is not None and method_config.annotation == "train+pseudo":
            return annotate(
                logits,
                data.index,
                data.labels,
                min_confidence=method_config.pseudo_conf_min,
            )
        size = len(client.data.labels[0])
        annotation = torch.full((size,), -1, device=client.device)
        annotation[data.index] = data.labels
        return annotation

    def penalty(
        self,
        client: Client,
        server_round: int,
        model: RecordingBackbone,
        scorer: Scorer | None,
        download: Prototypes,
    ) -> Callable[[], Tensor] | None:
        """Return μ·L_proto of Eq. (6★); ``None`` if μ is 0 or there are no prototypes."""
        method_config = client.config.method_config
        mu = method_config.mu
        if method_config.mu_warmup:
            mu *= min(1.0, server_round / method_config.mu_warmup)
        if mu == 0 or not download.present.any():
            return None
        saved = client.state.group("annotation")
        if saved:
            annotation = saved["classes"].long().to(client.device)
        else:
            annotation = self.annotation(client, None)
        drawn_in = int(client.state.values.get("round", 0))
        inputs = client.data.inputs[0]
        average = average_of(
            client, drawn_in, annotation, lambda: model.at_rest(inputs)
        )
        current = current_rows(client, model)
        target = download.values.to(client.device)
        present = download.present.to(client.device)
        if method_config.proto_loss == "node-mse":
            return lambda: (
                mu * node_distance(current(), target, present, average.hops, annotation)
            )
        both = present & (average.counts > 0)
        is_mean = method_config.proto_reduction == "mean"
        return lambda: (
            mu
            * prototype_distance(
                average(current(), scorer), target, both, is_mean=is_mean
            )
        )


def current_rows(client: Client, model: RecordingBackbone) -> Callable[[], Tensor]:
    """Return a function that returns the current embeddings of all items."""
    training, config = client.data.training, client.config
    is_whole = len(training.index) == training.inputs.num_graphs
    if training.inputs.batch is None or (is_whole and not config.batch_size):
        return lambda: model.embedding
    # A step may embed only a part of the graphs: a mini-batch, or those with a label.
    # The others keep their last embedding, at first without dropout, without gradient.
    table = model.at_rest(training.inputs)

    def current() -> Tensor:
        nonlocal table
        rows = model.embedding
        if model.items is None:
            return rows
        out = table.index_copy(0, model.items, rows)
        table = out.detach()
        return out

    return current


def open_scorer(client: Client) -> Scorer:
    """Return the client's attention a_k as trained so far."""
    saved = client.state.group("scorer")
    # an earlier version had the MLP only, and a resumed client continues with it
    is_mlp = client.config.method_config.scorer == "mlp" or "hidden.weight" in saved
    kind = NeighbourScorer if is_mlp else AdditiveScorer
    with seeded(client.seed(0, "scorer")):
        scorer: Scorer = kind(client.config.hidden_channels)
    load_state(scorer, saved)
    return scorer.to(client.device)


def rings_of(client: Client) -> list[Pairs]:
    """Return the pairs of each hop, computed once per graph."""
    method_config, inputs = client.config.method_config, client.data.inputs[0]
    key = ("rings", method_config.hops, method_config.hop_mode)
    return client.cached(
        key,
        lambda: ring_pairs(
            inputs.edge_index,
            inputs.num_nodes,
            method_config.hops,
            mode=method_config.hop_mode,
        ),
    )


def average_of(
    client: Client,
    server_round: int,
    annotation: Tensor,
    embed: Callable[[], Tensor],
    *,
    is_retrained: bool = False,
) -> HopAverage:
    """Return the average over the neighbours that enter the prototypes of a round."""
    method_config, memo = client.config.method_config, client.data.memo
    key = ("average", client.config.seed, server_round)
    # The next training uses the neighbours of the client's last upload, so they are
    # cached; a new process draws the same ones again from the seed.
    kept = memo.get(("average",))
    # Neighbours of graphs depend on the embeddings. The cached ones may come from a copy
    # of the client that was trained only to be evaluated.
    has_graphs = client.data.training.inputs.batch is not None
    is_stale = is_retrained and has_graphs
    if kept and not is_stale and kept[0] == key and torch.equal(kept[1], annotation):
        found: HopAverage = kept[2]
        return found
    same_class = method_config.neighbor_filter == "same-class"
    if has_graphs:
        pairs = similar_pairs(
            embed(),
            annotation,
            hops=method_config.hops,
            rho=method_config.rho,
            decay=method_config.rho_decay,
            limit=method_config.neighbor_limit,
            same_class=same_class,
            mode=method_config.hop_mode,
            is_ranked=method_config.graph_similarity == "quantile",
        )
    else:
        pairs = select_pairs(
            rings_of(client),
            annotation,
            same_class=same_class,
            limit=method_config.neighbor_limit,
            generator=client.generator(server_round, "neighbours"),
            mode=method_config.hop_mode,
        )
    made = HopAverage(pairs, annotation, client.data.num_classes)
    memo[("average",)] = (key, annotation, made)
    return made
