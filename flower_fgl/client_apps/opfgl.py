"""Client half of O-pFGL: upload class statistics, train in two stages on the download.

Yan et al., "Toward Personalized Federated Node Classification in One-shot
Communication", arXiv 2411.11304.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
ỹ, H, w_dist           ``LocalKnowledge.soft``, ``class_homophily``, ``factor``
X_k^prop               ``propagated_features``
M_G                    result of :meth:`OPFGLClientApp.train_global`
M_k                    ``Fit.model`` of :meth:`OPFGLClientApp.personalise`
γ_i                    ``node_weights``
β, γ_min, γ_max        ``opfgl.beta``, ``opfgl.gamma-min``, ``opfgl.gamma-max``
=====================  ==================================================

===============================================  ===========================
algorithm, client                                function
===============================================  ===========================
label propagation, Eqs. (2)-(4)                  ``study_labels``
reliable nodes, Eq. (7)                          ``reliable_nodes``
statistics, Eqs. (5), (6), (8)                   ``class_statistics``
stage 1, Eq. (16)                                ``train_global``
stage 2, Eqs. (17)-(19)                          ``train_personal``
===============================================  ===========================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.opfgl.class_statistics import (
    ClassStatistics,
    class_statistics,
    outside_shares,
    propagated_features,
)
from flower_fgl.algorithms.opfgl.distillation import (
    class_weights,
    distillation_loss,
    node_weights,
)
from flower_fgl.algorithms.opfgl.labels import reliable_nodes
from flower_fgl.algorithms.opfgl.local_statistics import (
    LocalKnowledge,
    pseudo_input,
    study_labels,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.training import (
    load_state,
    make_optimizer,
    state_of,
    train_and_check,
)
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.opfgl import VARIANTS, OPFGLSettings, Variant
from flower_fgl.nn import Backbone
from flower_fgl.nn.sparse import SparseOperator
from flower_fgl.protocols.base import Empty
from flower_fgl.protocols.opfgl import MIN_COUNT, GraphDownload, LocalStatistics

__all__ = ["OPFGLClientApp"]

Client = AnyClient[OPFGLSettings]


class OPFGLClientApp(FglClientApp):
    """Upload statistics; train a global model on the pseudo-graph, then a personalized one.

    Notes
    -----
    1. Both stages take at most ``local-epochs`` full-batch steps and keep the weights of
       the best check on the validation nodes, see ``check-every`` and ``patience``.
    2. With ``setting = "inductive"`` no reliable nodes are inferred. Statistics,
       distillation and training use only the graph of the training nodes.
    3. A client without training nodes keeps the model of stage 1.
    """

    down = GraphDownload
    up = LocalStatistics
    depends_on_download = False

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.train("personalise")(partial(self.handle_fit, fit=self.personalise))

    def download_spec(self, client: Client) -> tuple[int, int]:
        """Return the numbers of classes and features of a pseudo-graph."""
        graph = client.data.graph
        return graph.num_classes, graph.num_features

    def fit(self, client: Client, server_round: int, download: GraphDownload) -> Fit:
        """Compute the upload, without training."""
        return Fit(None, LocalStatistics(local_statistics(client)), loss=0.0)

    def personalise(
        self, client: Client, server_round: int, download: GraphDownload
    ) -> Fit:
        """Train both stages; PayloadError if the download contains no pseudo-graph."""
        if not len(download.graph.labels):
            raise PayloadError("the download contains no pseudo-graph")
        clock = time.perf_counter()
        model, loss = self.train_global(client, download.graph)
        seconds = {"stage-1": time.perf_counter() - clock}
        if variant_of(client).personalises and client.data.training.index.numel():
            clock = time.perf_counter()
            model, loss = self.train_personal(client, model)
            seconds["stage-2"] = time.perf_counter() - clock
        return Fit(model, Empty(), loss, seconds)

    def first_model(self, client: Client, download: GraphDownload | None) -> Backbone:
        """Return the model of stage 1, without a pseudo-graph an initial one."""
        if download is None or not len(download.graph.labels):
            return client.build_model(initialise=True)
        with torch.inference_mode(False):
            return self.train_global(client, download.graph)[0]

    def train_global(
        self, client: Client, graph: PseudoGraph
    ) -> tuple[Backbone, float]:
        """Train M_G on the pseudo-graph, stage 1, Eq. (16); return it and the last loss.

        It is the best on the client's validation nodes. All clients of one backbone start
        from the same weights.
        """
        model = client.build_model(initialise=True)
        inputs = pseudo_input(graph).to(client.device)
        labels = graph.labels.to(client.device)
        return model, self._run_stage(
            client,
            model,
            lambda: F.cross_entropy(model(inputs), labels),
            lr=client.config.method_config.lr_global,
            purpose="stage-1",
        )

    def train_personal(
        self, client: Client, teacher: Backbone
    ) -> tuple[Backbone, float]:
        """Train M_k on the client's graph, stage 2, Eqs. (17)-(19); return it and its loss.

        It is the best on the client's validation nodes.
        """
        method_config, variant = client.config.method_config, variant_of(client)
        model = client.build_model(initialise=True)
        if not variant.starts_anew:
            load_state(model, state_of(teacher))
        data = client.data.training
        classes = client.data.num_classes
        weight = None
        if variant.weighs_classes:
            counts = torch.bincount(data.labels, minlength=classes)
            weight = class_weights(counts)
        teacher.eval()
        with torch.no_grad():
            target = F.log_softmax(teacher(data.inputs), dim=1)
        gamma = distillation_weights(client, variant)

        def loss() -> Tensor:
            logits = model(data.inputs)
            value = F.cross_entropy(logits[data.index], data.labels, weight)
            if gamma is not None:
                value = value + distillation_loss(logits, target, gamma)
            return value

        return model, self._run_stage(
            client, model, loss, lr=method_config.lr_personal, purpose="stage-2"
        )

    def _run_stage(
        self,
        client: Client,
        model: Backbone,
        loss: Callable[[], Tensor],
        *,
        lr: float,
        purpose: str,
    ) -> float:
        """Minimise a loss with a fresh optimizer; return its last value."""
        config = client.config
        optimizer = make_optimizer(model, config, lr=lr)

        def train(steps: int) -> float:
            model.train()
            value = torch.zeros(())
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                value = loss()
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return float(value.detach())

        with seeded(client.seed(1, purpose), client.device):
            return train_and_check(
                model,
                train,
                lambda: client.validate(model),
                epochs=config.local_epochs,
                check_every=config.check_every or config.local_epochs,
                patience=config.patience,
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
        min_count=MIN_COUNT,
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
    return node_weights(
        knowledge.soft,
        knowledge.factor,
        beta=method_config.beta,
        low=method_config.gamma_min,
        high=method_config.gamma_max,
    )
