"""Client half of O-pFGL: upload class statistics, train in two stages on the download.

Yan et al., "Toward Personalized Federated Node Classification in One-shot
Communication", arXiv 2411.11304.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
ỹ, H, w_dist           ``LocalKnowledge.soft``, ``class_homophily``, ``factor``
X_k^prop               ``propagated_features``
M_G                    result of :meth:`OPFGLClientApp.train_global`
M_k                    result of :meth:`OPFGLClientApp.train_personal`
γ_i                    ``node_weights``
β, γ_min, γ_max        ``opfgl.beta``, ``opfgl.gamma-min``, ``opfgl.gamma-max``
=====================  ==================================================
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.opfgl import distillation
from flower_fgl.algorithms.opfgl.class_statistics import (
    ClassStatistics,
    class_statistics,
    outside_shares,
    propagated_features,
)
from flower_fgl.algorithms.opfgl.labels import (
    LocalKnowledge,
    reliable_nodes,
    study_labels,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.training import Checks, make_optimizer, state_of
from flower_fgl.client_apps.stacked.group import (
    GraphLoss,
    Group,
    GroupClientApp,
    GroupFit,
    take_steps,
)
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.opfgl import VARIANTS, OPFGLSettings, Variant
from flower_fgl.nn import Backbone
from flower_fgl.nn.sparse import SparseOperator
from flower_fgl.protocols.base import Empty
from flower_fgl.protocols.opfgl import GraphDownload, LocalStatistics

__all__ = ["OPFGLClientApp"]

Client = AnyClient[OPFGLSettings]


class GlobalTraining:
    """Stage 1 of all clients of a backbone, O-pFGL Eq. (16): the same training, done once.

    M_G is trained on the pseudo-graph from the initial weights, which clients of a backbone
    share; dropout draws the same on all of them. Only the check at which a client stops
    depends on it. The training is continued when a client needs a later check.
    """

    def __init__(self, client: Client, graph: PseudoGraph) -> None:
        self._client, self._graph = client, graph
        self._model = client.build_model(initialise=True)
        self._loss = distillation.TargetLoss.of_classes(
            graph.as_input().to(client.device),
            graph.labels.to(client.device),
            client.data.num_classes,
        )
        rate = client.config.method_config.lr_global
        self._optimizer = make_optimizer(self._model, client.config, lr=rate)
        self._checks: list[tuple[dict[str, Tensor], float]] = []

    def is_of(self, client: Client, graph: PseudoGraph) -> bool:
        """Return whether a client trains the same network on the same pseudo-graph."""
        mine = self._client
        own, other = (vars(g).values() for g in (self._graph, graph))
        return (
            mine.config is client.config
            and (mine.model_name, mine.device) == (client.model_name, client.device)
            and (graph is self._graph or all(map(torch.equal, own, other)))
        )

    def check(self, number: int) -> tuple[dict[str, Tensor], float]:
        """Return the weights at a check, 0 for the first one, and the last loss."""
        config = self._client.config
        every = config.check_every or config.local_epochs
        while number >= len(self._checks):
            done = len(self._checks) * every
            seed = derive_seed(config.seed, 1, SERVER, f"stage-1 after {done} steps")
            with seeded(seed, self._client.device):
                steps = min(every, config.local_epochs - done)
                (loss,) = take_steps(self._model, self._loss, self._optimizer, steps)
            self._checks.append((state_of(self._model), loss))
        return self._checks[number]


class OPFGLClientApp(GroupClientApp):
    """Upload statistics; train a global model on the pseudo-graph, then a personalized one.

    Notes
    -----
    1. Both stages take at most ``local-epochs`` full-batch steps and keep the weights of
       the best check on the validation nodes, see ``check-every`` and ``patience``.
    2. With ``setting = "inductive"`` no reliable nodes are inferred. Statistics,
       distillation and training use only the graph of the training nodes.
    3. A client without training nodes keeps the model of stage 1.
    4. Stage 1 depends on a client only by the check at which it stops. Dropout, 0 by
       default, draws the same on all clients, so that a process trains stage 1 once.
    """

    down = GraphDownload
    up = LocalStatistics
    depends_on_download = False
    stacked = True
    group_action = "personalise"

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self._global: dict[str, GlobalTraining] = {}

    def download_spec(self, client: Client) -> tuple[int, int]:
        """Return the numbers of classes and features of a pseudo-graph."""
        graph = client.data.graph
        return graph.num_classes, graph.num_features

    def fit(self, client: Client, server_round: int, download: GraphDownload) -> Fit:
        """Compute the upload, without training."""
        return Fit(None, LocalStatistics(local_statistics(client)), loss=0.0)

    def fit_group(self, group: Group, downloads: Sequence[GraphDownload]) -> GroupFit:
        """Train both stages; PayloadError if a download contains no pseudo-graph."""
        if not all(len(download.graph.labels) for download in downloads):
            raise PayloadError("the download contains no pseudo-graph")
        clock = time.perf_counter()
        model, losses = self.train_global(group, downloads[0].graph)
        seconds = {"stage-1": time.perf_counter() - clock}
        client: Client = group.clients[0]
        if variant_of(client).personalises and client.data.training.index.numel():
            clock = time.perf_counter()
            model, losses = self.train_personal(group, model)
            seconds["stage-2"] = time.perf_counter() - clock
        return GroupFit(model, [Empty() for _ in losses], losses, seconds=seconds)

    def first_model(self, client: Client, download: GraphDownload | None) -> Backbone:
        """Return the model of stage 1, without a pseudo-graph an initial one."""
        if download is None or not len(download.graph.labels):
            return client.build_model(initialise=True)
        with torch.inference_mode(False):
            return self.train_global(Group(client, 1), download.graph)[0]

    def train_global(
        self, group: Group, graph: PseudoGraph
    ) -> tuple[Backbone, list[float]]:
        """Return M_G of each client, its best on the validation nodes, and the last losses.

        All clients have the same backbone and pseudo-graph.
        """
        first: Client = group.clients[0]
        training = self._global.get(first.model_name)
        if training is None or not training.is_of(first, graph):
            training = self._global[first.model_name] = GlobalTraining(first, graph)
        config = first.config
        every = config.check_every or config.local_epochs
        checks = [Checks(config.patience) for _ in group.clients]
        ends, losses = [group.initial_state()] * len(group), [float("nan")] * len(group)
        running = list(range(len(group)))
        for number in range(-(-config.local_epochs // every) if every else 0):
            state, loss = training.check(number)
            scores = group.validate(group.build_model(state))
            for place in list(running):
                ends[place], losses[place] = state, loss
                if checks[place].note(scores[place], partial(dict, state)):
                    running.remove(place)
            if not running:
                break
        kept = [one.kept or end for one, end in zip(checks, ends, strict=True)]
        return group.build_model(kept), losses

    def train_personal(
        self, group: Group, teacher: Backbone
    ) -> tuple[Backbone, list[float]]:
        """Train M_k on the clients' graphs, stage 2, Eqs. (17)-(19), and the last losses.

        Each is the best on the client's validation nodes.
        """
        teacher.eval()
        with torch.no_grad():
            target = F.log_softmax(teacher(group.inputs), dim=-1)
        rows = target.view(len(group), -1, group.num_classes)
        targets = {
            client.partition_id: personal_targets(client, row)
            for client, row in zip(group.clients, rows, strict=True)
        }

        def loss_of(some: Group) -> GraphLoss:
            mine = [targets[client.partition_id] for client in some.clients]
            least = torch.stack([one.least for one in mine])
            rows = some.pad([one.rows for one in mine])
            padded = distillation.SoftTargets(rows, least)
            return distillation.TargetLoss(some.inputs, padded)

        config = group.config
        model = teacher
        if variant_of(group.clients[0]).starts_anew:
            model = group.build_model(group.initial_state())
        return group.train_to_best(
            model, loss_of, lr=config.method_config.lr_personal, purpose="stage-2"
        )


def personal_targets(client: Client, log_probs: Tensor) -> distillation.SoftTargets:
    """Return a client's targets in stage 2, from log q of its nodes, or of more rows."""
    data, variant = client.data, variant_of(client)
    weight = None
    if variant.weighs_classes:
        counts = torch.bincount(data.training.labels, minlength=data.num_classes)
        weight = distillation.class_weights(counts)
    return distillation.soft_targets(
        data.training.index,
        data.training.labels,
        log_probs[: data.inputs[0].num_nodes],
        gamma=distillation_weights(client, variant),
        class_weight=weight,
    )


def variant_of(client: Client) -> Variant:
    """Return the variant named by the setting ``variant``."""
    return VARIANTS[client.config.method_config.variant]


def knowledge_of(client: Client) -> LocalKnowledge:
    """Return what is inferred from the client's labels, computed once per graph."""
    method_config, data = client.config.method_config, client.data
    key = ("opfgl", method_config.propagation_steps, method_config.propagation_share)
    return client.cached(
        key,
        lambda: study_labels(
            data.inputs[0],
            data.training.index,
            data.training.labels,
            data.graph.num_classes,
            steps=method_config.propagation_steps,
            share=method_config.propagation_share,
        ),
    )


def local_statistics(client: Client) -> ClassStatistics:
    """Compute the client's class statistics, Eqs. (5)-(8), on the CPU.

    With ``min-class-count`` m above 1, a class is left out if one node outside it has
    more than 1/m of the weight of all nodes outside it.
    """
    method_config, inputs = client.config.method_config, client.data.inputs[0]
    knowledge = knowledge_of(client)
    classes = own = knowledge.labels
    if variant_of(client).expands and client.config.setting != "inductive":
        inferred = reliable_nodes(
            knowledge.soft,
            knowledge.degree,
            own < 0,
            knowledge.class_homophily,
            min_confidence=method_config.reliable_confidence,
            min_degree=method_config.reliable_degree,
            num_classes_kept=method_config.reliable_classes,
        )
        classes = torch.where(own >= 0, own, inferred)
    # the cast holds: operators of graphs with constant edges are sparse
    operator = cast(SparseOperator, inputs.operator("normalised"))
    stats = class_statistics(
        propagated_features(operator, inputs.x, method_config.depth),
        classes,
        client.data.num_classes,
        is_labelled=own >= 0,
    )
    kept = torch.ones_like(stats.count, dtype=torch.bool)
    least = client.config.min_class_count
    if least > 1:
        shares = outside_shares(
            operator, classes, client.data.num_classes, method_config.depth
        )
        kept = shares * least <= 1 + 1e-4  # of float32
    rows = [part * kept[:, None] for part in (stats.mean, stats.variance)]
    counts = [part * kept for part in (stats.count, stats.labelled_count)]
    return ClassStatistics(*(part.cpu() for part in rows + counts))


def distillation_weights(client: Client, variant: Variant) -> Tensor | None:
    """Return γ (N,) of Eq. (19), a constant, or ``None`` without distillation."""
    method_config = client.config.method_config
    if variant.distill == "none":
        return None
    knowledge = knowledge_of(client)
    if variant.distill == "fixed":
        return torch.full_like(knowledge.soft[:, 0], method_config.beta)
    return distillation.node_weights(
        knowledge.soft,
        knowledge.factor,
        beta=method_config.beta,
        low=method_config.gamma_min,
        high=method_config.gamma_max,
    )
