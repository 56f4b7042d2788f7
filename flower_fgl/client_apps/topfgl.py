"""Client half of TopFGL: a topology learner, and edges between nodes it finds alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms import topfgl
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.state import part_of
from flower_fgl.client_apps.runtime.training import (
    load_state,
    make_optimizer,
    refuse_non_finite,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.topfgl import TopFGLSettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.nn.backbone import copy_network
from flower_fgl.protocols.fedavg import Weights

__all__ = ["TopFGLClientApp"]

Client = AnyClient[TopFGLSettings]

LEARNER = "learner."
"""Prefix of the learner's tensors in both directions."""


class TopFGLClientApp(FedAvgClientApp):
    """Train the network as in FedAvg, and the learner after each epoch; upload both.

    Notes
    -----
    1. The learner's loss reaches only the learner. It is the cross-entropy of its own
       logits on the training nodes; its input Z is computed without dropout. Its dropout
       has seeds of its own, so that the network trains as in FedAvg.
    2. The published code adds an edge only if both ends have the same **true label**, of
       all nodes, test nodes included: that uses test labels. Here predictions alone
       decide, so expect less than the published gain.
    3. Edges are added to the training graph only; other graphs of a setting, and a saved
       model, are evaluated as they are.
    4. The published code scores the mixture before local training. Here a client scores
       the model that it trained, as with every personalized method.
    """

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the network and of the learner."""
        learner = state_shapes(self.build_learner(client))
        named = {LEARNER + name: shape for name, shape in learner.items()}
        return {**client.state_shapes(), **named}

    def build_learner(self, client: Client) -> topfgl.TopologyLearner:
        """Build the learner on the client's device; its weights are overwritten."""
        config = client.config
        sizes = config.hidden_channels, config.dropout
        key = ("topfgl-learner", client.model_name, *sizes)

        def blank() -> topfgl.TopologyLearner:
            width = client.build_model().hidden_channels
            with seeded(0):
                learner = topfgl.TopologyLearner(
                    client.data.num_classes, width, config.dropout
                )
            return learner.to(client.device)

        return copy_network(client.cached(key, blank))

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Add edges if it is time, then train the network and the learner."""
        backbone, learner = client.build_model(), self.build_learner(client)
        names = client.state_shapes()
        load_state(backbone, {name: download.tensors[name] for name in names})
        load_state(learner, part_of(download.tensors, LEARNER))
        graph = client.data.training.inputs
        encoding = client.cached(
            ("topfgl-encoding",), lambda: topfgl.structural_encoding(graph)
        )
        terms: dict[str, float] = {}
        if self.is_time(client, server_round):
            self.add_edges(client, server_round, backbone, learner, encoding, terms)
        model = topfgl.AugmentedNet(backbone, graph, self.added(client))
        epochs = _LearnerEpochs(client, server_round, model, learner, encoding)
        loss = client.train(model, server_round, after_epoch=epochs)
        refuse_non_finite(learner.state_dict())
        client.keep_moments("learner-optimizer", learner, epochs.optimizer)
        terms["added_edges"] = float(self.added(client).shape[1])
        state = dict(backbone.state_dict())
        state |= {LEARNER + name: t for name, t in learner.state_dict().items()}
        return Fit(model, Weights(state), loss, terms=terms)

    def is_time(self, client: Client, server_round: int) -> bool:
        """Return whether the client adds edges in this round."""
        config = client.config
        times = config.method_config.augmentations
        period = config.rounds // (1 + times)
        is_inside = 1 < server_round < config.rounds
        return bool(times and is_inside and server_round % max(1, period) == 0)

    def added(self, client: Client) -> Tensor:
        """Return the pairs that the client has added so far."""
        found = client.state.group("edges").get("added")
        if found is None:
            found = torch.zeros(2, 0, dtype=torch.int64)
        return found.to(client.device)

    @torch.no_grad()
    def add_edges(
        self,
        client: Client,
        server_round: int,
        backbone: Backbone,
        learner: topfgl.TopologyLearner,
        encoding: Tensor,
        terms: dict[str, float],
    ) -> None:
        """Add edges where network and learner disagree; drop some if they are many."""
        settings, graph = client.config.method_config, client.data.training.inputs
        old = self.added(client)
        model = topfgl.AugmentedNet(backbone, graph, old).eval()
        logits = model(graph)
        points = learner.eval()(encoding, model.augmented, logits)
        guess = points.argmax(dim=1)
        unsure = logits.argmax(dim=1) != guess
        present = model.augmented.edge_index
        new = topfgl.likely_edges(points, unsure, present, number=settings.neighbors)
        if settings.same_class == "pseudo":
            new = new[:, guess[new[0]] == guess[new[1]]]
        pairs = torch.cat([old, new], dim=1)
        generator = client.generator(server_round, "edges")
        noise = torch.rand(pairs.shape[1], generator=generator).to(pairs.device)
        most = graph.edge_index.shape[1] / 4  # half of the undirected pairs
        pairs = topfgl.drop_distant(pairs, points, most, noise)
        terms["unsure_nodes"] = float(unsure.sum())
        client.state.set_group("edges", {"added": pairs} if pairs.shape[1] else {})

    def personal_model(
        self, client: Client, download: Weights | None
    ) -> Backbone | None:
        """Return the model trained last, or the received one before the first training."""
        saved = client.state.group("model")
        if saved:
            graph = client.data.training.inputs
            model = topfgl.AugmentedNet(client.build_model(), graph, self.added(client))
            load_state(model, saved)
            return model
        return None if download is None else self.received_model(client, download)

    def received_model(self, client: Client, download: Weights) -> Backbone:
        """Return the received network, which reads the edges that the client added."""
        backbone = client.build_model()
        names = client.state_shapes()
        load_state(backbone, {n: download.tensors[n] for n in names})
        return topfgl.AugmentedNet(
            backbone, client.data.training.inputs, self.added(client)
        )


@dataclass(eq=False)
class _LearnerEpochs:
    """The learner's step after each epoch of the network."""

    client: Client
    server_round: int
    model: topfgl.AugmentedNet
    learner: topfgl.TopologyLearner
    encoding: Tensor
    number: int = 0

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.learner, self.client.config)
        self.client.restore_moments("learner-optimizer", self.learner, self.optimizer)

    def __call__(self, _: float) -> None:
        """Compute Z and take one step of the learner."""
        client, self.number = self.client, self.number + 1
        data = client.data.training
        if not len(data.index):
            return
        with torch.no_grad():
            logits = self.model.eval()(data.inputs)
        seed = client.seed(self.server_round, f"learner {self.number}")
        with seeded(seed, client.device):
            self.learner.train()
            self.optimizer.zero_grad(set_to_none=True)
            out = self.learner(self.encoding, self.model.augmented, logits)
            loss = F.cross_entropy(out[data.index], data.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
