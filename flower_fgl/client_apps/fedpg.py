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
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.prototypes import attention, hop_neighbors, hop_prototypes
from flower_fgl.algorithms.prototypes.similar_graphs import similar_pairs
from flower_fgl.client_apps.fedproto import PrototypeClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.fedpg import FedPGSettings
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["FedPGClientApp"]

Client = AnyClient[FedPGSettings]

ROUNDING = 1e-4
"""Relative error of a sum of weights in float32 that still counts as equal."""
MOST_STACKED_PAIRS = 1 << 24
"""Pairs of a stack up to which the neighbours of all clients are drawn at once."""


class FedPGClientApp(GroupClientApp, PrototypeClientApp):
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

    stacked = True

    def download_spec(self, client: Client) -> tuple[int, int, int]:
        """Return (C, L + 1, p): at most one prototype of each class and hop."""
        config = client.config
        hops = config.method_config.hops + 1
        return client.data.num_classes, hops, config.hidden_channels

    def starts_alone(self, client: Client) -> bool:
        """Return whether ``fedpg.init`` is ``own``."""
        return bool(client.config.method_config.init == "own")

    def stack_key(self, client: Client, download: Prototypes) -> bool:
        """Separate clients without prototypes: they take no step on the attention."""
        return bool(download.present.any())

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients whose attention is an MLP."""
        settings = client.config.method_config
        is_mlp = settings.attention and has_mlp(client)
        return "the attention fedpg.scorer = mlp has no stacked form" if is_mlp else ""

    def fit_group(self, group: Group, downloads: Sequence[Prototypes]) -> GroupFit:
        """Train by Eq. (6), annotate, and compute prototypes by Eq. (2)."""
        settings: FedPGSettings = group.config.method_config
        scorer = open_scorer(group) if settings.attention else None
        own = group.build_own(own_weights=self.starts_alone(group.clients[0]))
        model = RecordingBackbone(own, scorer)
        penalty = self.penalty(group, model, scorer, downloads)
        losses = group.train(model, penalty=penalty)
        model.eval()
        assert group.server_round is not None
        rounds = [group.server_round] * len(group)
        with torch.no_grad():
            logits = model(group.inputs)
            annotation = self.annotation(group, logits)
            embedding = model.embedding
            average = average_of(
                group, rounds, annotation, lambda: embedding, is_retrained=True
            )
            unit = attention.UnitRows(embedding)
            weights = average.weights(unit, scorer)
            values = average.combine(unit, weights)
        classes = group.split_rows(annotation.float())
        for client, own_classes in zip(group.clients, classes, strict=True):
            client.state.set_group("annotation", {"classes": own_classes})
        terms: list[dict[str, float]] = []
        counts, least = average.counts, group.config.min_class_count
        if scorer is not None:
            group.keep("scorer", scorer.state_dict())
            if least <= 1:  # it can be of a single node
                around = average.around
                places = average.clients_of(around.centre)
                apart = attention.deviations_from_uniform(
                    weights, around, places, len(group)
                )
                terms = [{"attention-deviation": value} for value in apart.tolist()]
        # the server knows the run's seed and could undo noise drawn from it
        values = hop_prototypes.add_noise(values, share=settings.noise_dims)
        if least > 1:
            kept = average.largest_shares(weights) * least <= 1 + ROUNDING
            values, counts = values * kept[..., None], counts * kept
        values = values.cpu().view(len(group), *values.shape[-3:])
        counts = counts.cpu().view(len(group), *counts.shape[-2:])
        uploads = [LocalPrototypes(*one) for one in zip(values, counts, strict=True)]
        records = partial(LocalPrototypes.stacked_records, values, counts)
        return GroupFit(model.backbone, uploads, losses, records, terms, logits)

    def annotation(self, group: Group, logits: Tensor | None) -> Tensor:
        """Return the class of each row: of training items the label, else predicted, or −1.

        The shape is (N,), or (K, n) for a stack, whose padding has −1.
        """
        rows, settings = group.rows, group.config.method_config
        if logits is not None and settings.annotation == "train+pseudo":
            found = hop_neighbors.annotate(
                logits.flatten(0, -2),
                rows.index,
                rows.labels,
                min_confidence=settings.pseudo_conf_min,
            ).view(logits.shape[:-1])
            return found if group.real is None else found.masked_fill_(~group.real, -1)
        found = group.fill(-1)
        found.view(-1)[rows.index] = rows.labels
        return found

    def penalty(
        self,
        group: Group,
        model: RecordingBackbone,
        scorer: attention.Scorer | None,
        downloads: Sequence[Prototypes],
    ) -> Callable[[], Tensor] | None:
        """Return μ·L_proto of Eq. (6★); ``None`` if μ is 0 or there are no prototypes."""
        settings: FedPGSettings = group.config.method_config
        assert group.server_round is not None
        mu = settings.mu
        if settings.mu_warmup:
            mu *= min(1.0, group.server_round / settings.mu_warmup)
        if mu == 0 or not any(bool(one.present.any()) for one in downloads):
            return None
        saved = group.stored("annotation")
        annotation = self.annotation(group, None)
        if any(saved):
            known = group.split_rows(annotation)
            parts = zip(saved, known, strict=True)
            annotation = group.join_rows(
                [old["classes"].long() if old else new for old, new in parts]
            )
        drawn_in = [int(one.state.values.get("round", 0)) for one in group.clients]
        inputs = group.inputs
        average = average_of(group, drawn_in, annotation, lambda: model.at_rest(inputs))
        current = current_rows(group, model)
        shape = average.counts.shape
        target = torch.stack([one.values for one in downloads]).to(group.device)
        target = target.view(*shape, -1)
        present = torch.stack([one.present for one in downloads]).to(group.device)
        present = present.view(shape)
        if settings.proto_loss == "node-mse":
            return lambda: (
                mu
                * hop_prototypes.node_distance(
                    current(), target, present, average.hops, annotation
                )
            )
        both = present & (average.counts > 0)
        is_mean = settings.proto_reduction == "mean"
        return lambda: (
            mu
            * hop_prototypes.prototype_distance(
                average(current(), scorer), target, both, is_mean=is_mean
            )
        )


def current_rows(group: Group, model: RecordingBackbone) -> Callable[[], Tensor]:
    """Return a function that returns the current embeddings of all items."""
    inputs, config = group.inputs, group.config
    is_whole = len(group.rows.index) == inputs.num_graphs
    if inputs.batch is None or (is_whole and not config.batch_size):
        return lambda: model.embedding
    # A step may embed only a part of the graphs: a mini-batch, or those with a label.
    # The others keep their last embedding, at first without dropout, without gradient.
    table = model.at_rest(inputs)

    def current() -> Tensor:
        nonlocal table
        rows = model.embedding
        if model.items is None:
            return rows
        out = table.index_copy(0, model.items, rows)
        table = out.detach()
        return out

    return current


def has_mlp(client: Client) -> bool:
    """Return whether the attention a_k is an MLP."""
    # an earlier version had the MLP only, and a resumed client continues with it
    is_old = "scorer/hidden.weight" in client.state.tensors
    return client.config.method_config.scorer == "mlp" or is_old


def open_scorer(group: Group) -> attention.Scorer:
    """Return the attention a_k of each client as trained so far."""
    first = group.clients[0]
    kind = attention.NeighbourScorer if has_mlp(first) else attention.AdditiveScorer
    with seeded(first.seed(0, "scorer")):
        scorer: attention.Scorer = kind(first.config.hidden_channels)
    initial = scorer.state_dict()
    tensors = group.join([state or initial for state in group.stored("scorer")])
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition(".")
        module = scorer.get_submodule(owner)
        module._parameters[key] = nn.Parameter(tensor.detach().clone())
    return scorer


def rings_of(client: Client) -> list[hop_neighbors.Pairs]:
    """Return the pairs of each hop, computed once per graph."""
    method_config, inputs = client.config.method_config, client.data.inputs[0]
    key = ("rings", method_config.hops, method_config.hop_mode)
    return client.cached(
        key,
        lambda: hop_neighbors.ring_pairs(
            inputs.edge_index,
            inputs.num_nodes,
            method_config.hops,
            mode=method_config.hop_mode,
        ),
    )


def average_of(
    group: Group,
    drawn_in: Sequence[int],
    annotation: Tensor,
    embed: Callable[[], Tensor],
    *,
    is_retrained: bool = False,
) -> hop_prototypes.HopAverage:
    """Return the average over the neighbours that enter the prototypes of a round."""
    settings, memo = group.config.method_config, group.memo
    key = ("average", group.config.seed, *drawn_in)
    # The next training uses the neighbours of the client's last upload, so they are
    # cached; a new process draws the same ones again from the seed.
    kept = memo.get(("average",))
    # Neighbours of graphs depend on the embeddings. The cached ones may come from a copy
    # of the client that was trained only to be evaluated.
    has_graphs = group.inputs.batch is not None
    is_stale = is_retrained and has_graphs
    if kept and not is_stale and kept[0] == key and torch.equal(kept[1], annotation):
        found: hop_prototypes.HopAverage = kept[2]
        return found
    if has_graphs:
        pairs = similar_pairs(
            embed(),
            annotation,
            hops=settings.hops,
            rho=settings.rho,
            decay=settings.rho_decay,
            limit=settings.neighbor_limit,
            same_class=settings.neighbor_filter == "same-class",
            mode=settings.hop_mode,
            is_ranked=settings.graph_similarity == "quantile",
        )
    else:
        pairs = draw_pairs(group, drawn_in, annotation)
    made = hop_prototypes.HopAverage(pairs, annotation, group.num_classes)
    memo[("average",)] = (key, annotation, made)
    return made


def draw_pairs(
    group: Group, drawn_in: Sequence[int], annotation: Tensor
) -> list[hop_neighbors.Pairs]:
    """Draw the neighbours of each client's nodes, numbered by flattened rows."""
    settings, width = group.config.method_config, annotation.shape[-1]
    rounds = zip(group.clients, drawn_in, strict=True)
    generators = [client.generator(number, "neighbours") for client, number in rounds]
    select = partial(
        hop_neighbors.select_pairs,
        same_class=settings.neighbor_filter == "same-class",
        limit=settings.neighbor_limit,
        mode=settings.hop_mode,
    )
    if group.real is None:
        rings = rings_of(group.clients[0])
        return select(rings, annotation, generator=generators[0])
    key = ("rings", settings.hops, settings.hop_mode)
    if key not in group.memo:
        group.memo[key] = stacked_rings(group, annotation.numel())
    if group.memo[key] is not None:
        return select(group.memo[key], annotation.flatten(), generator=generators)
    parts = zip(group.clients, group.split_rows(annotation), generators, strict=True)
    drawn = [select(rings_of(c), own, generator=one) for c, own, one in parts]
    return shifted(drawn, width)


def stacked_rings(group: Group, num_rows: int) -> list[hop_neighbors.Pairs] | None:
    """Return the pairs of each hop of all clients; ``None`` if they are too many."""
    settings = group.config.method_config
    rings = hop_neighbors.ring_pairs(
        group.inputs.edge_index,
        num_rows,
        settings.hops,
        mode=settings.hop_mode,
        most_pairs=MOST_STACKED_PAIRS,
    )
    number = sum(len(pairs.centre) for pairs in rings)
    is_listed = all(pairs.unlisted is None for pairs in rings)
    return rings if is_listed and number <= MOST_STACKED_PAIRS else None


def shifted(
    parts: Sequence[Sequence[hop_neighbors.Pairs]], width: int
) -> list[hop_neighbors.Pairs]:
    """Join each hop of all clients; client k has the rows from k · ``width``."""
    return [
        hop_neighbors.Pairs(
            torch.cat([one.centre + k * width for k, one in enumerate(hop)]),
            torch.cat([one.neighbour + k * width for k, one in enumerate(hop)]),
        )
        for hop in zip(*parts, strict=True)
    ]
