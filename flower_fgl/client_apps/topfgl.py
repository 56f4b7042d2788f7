"""Client half of TopFGL: a topology learner, and edges between nodes it finds alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.algorithms import topfgl
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.state import split_prefix
from flower_fgl.client_apps.runtime.training import load_state, refuse_non_finite
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    cross_entropy,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.topfgl import TopFGLSettings
from flower_fgl.nn import Backbone, GraphInput, state_shapes
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

    stacked = True
    fit = GroupClientApp.fit

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

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients that read less than their graph without new edges."""
        data = client.data.training
        reach = client.build_model().reach
        is_part = reach and data.field_of(reach, data.index) is not None
        if is_part and client.config.method_config.augmentations:
            return "it reads less than half of its graph until it adds edges"
        return ""

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Add edges if it is time, then train the networks and the learners."""
        # once a broadcast
        parts = {id(one): split_prefix(one.tensors, LEARNER) for one in downloads}
        networks, learners = zip(*(parts[id(one)] for one in downloads), strict=True)
        backbone = group.build_model(networks)
        learner = group.load(self.build_learner(group.clients[0]), learners)
        terms: list[dict[str, float]] = [{} for _ in group.clients]
        if self.is_time(group.clients[0], group.server_round or 0):
            self.add_edges(group, backbone, learner, terms)
        model = self.augmented(group, backbone)
        epochs = _LearnerEpochs(group, model, learner)
        losses = group.train(model, after_epoch=epochs)
        refuse_non_finite(learner.state_dict())
        epochs.optimizer.save()
        for client, found in zip(group.clients, terms, strict=True):
            found["added_edges"] = float(self.added(client).shape[1])
        state = dict(backbone.state_dict())
        state |= {LEARNER + name: t for name, t in learner.state_dict().items()}
        return replace(group.fit_of_weights(model, state, losses), terms=terms)

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

    def build(self, client: Client) -> topfgl.AugmentedNet:
        """Build the network, which reads the edges that the client added."""
        graph = client.data.training.inputs
        return topfgl.AugmentedNet(client.build_model(), graph, self.added(client))

    def augmented(self, group: Group, backbone: Backbone) -> topfgl.AugmentedNet:
        """Return the networks, which read the edges that the clients added."""
        rows = group.inputs.num_nodes // len(group)
        parts = [k * rows + self.added(c) for k, c in enumerate(group.clients)]
        return topfgl.AugmentedNet(backbone, group.inputs, torch.cat(parts, dim=1))

    @torch.no_grad()
    def add_edges(
        self,
        group: Group,
        backbone: Backbone,
        learner: topfgl.TopologyLearner,
        terms: Sequence[dict[str, float]],
    ) -> None:
        """Add edges where network and learner disagree; drop some if they are many."""
        settings: TopFGLSettings = group.config.method_config
        model = self.augmented(group, backbone).eval()
        logits = model(group.inputs)
        outputs = learner.eval()(structure_of(group, model), logits)
        rows = zip(
            group.clients,
            group.split_rows(outputs),
            group.split_rows(logits.argmax(dim=-1)),
            group.generators("edges"),
            terms,
            strict=True,
        )
        for client, points, predicted, generator, found in rows:
            graph, old = client.data.training.inputs, self.added(client)
            guess = points.argmax(dim=1)
            unsure = predicted != guess
            present = torch.cat([graph.edge_index, old, old.flip(0)], dim=1)
            new = topfgl.likely_edges(
                points, unsure, present, number=settings.neighbors
            )
            if settings.same_class == "pseudo":
                new = new[:, guess[new[0]] == guess[new[1]]]
            pairs = torch.cat([old, new], dim=1)
            noise = torch.rand(pairs.shape[1], generator=generator).to(pairs.device)
            most = graph.edge_index.shape[1] / 4  # half of the undirected pairs
            pairs = topfgl.drop_distant(pairs, points, most, noise)
            found["unsure_nodes"] = float(unsure.sum())
            client.state.set_group("edges", {"added": pairs} if pairs.shape[1] else {})

    def first_model(self, client: Client, download: Weights | None) -> Backbone | None:
        """Return the received network."""
        return None if download is None else self.received_model(client, download)

    def received_model(self, client: Client, download: Weights) -> Backbone:
        """Return the received network, which reads the edges that the client added."""
        model = self.build(client)
        load_state(model.backbone, split_prefix(download.tensors, LEARNER)[0])
        return model


def structure_of(group: Group, model: topfgl.AugmentedNet) -> GraphInput:
    """Return the graphs that the networks read, with h^T as features, computed once."""
    key = ("topfgl-encoding",)
    if key not in group.memo:
        graphs = [client.data.training.inputs for client in group.clients]
        group.memo[key] = group.pad(list(map(topfgl.structural_encoding, graphs)))
    return model.augmented.with_features(group.memo[key])


class _LearnerEpochs:
    """The learners' step after each epoch of the networks."""

    def __init__(
        self, group: Group, model: topfgl.AugmentedNet, learner: topfgl.TopologyLearner
    ) -> None:
        self._group, self._model, self._learner = group, model, learner
        self._structure = structure_of(group, model)
        self._number = 0
        self.optimizer = group.open_optimizer(
            "learner-optimizer", learner, group.config
        )

    def __call__(self) -> None:
        """Compute Z and take one step of the learners."""
        group, rows, self._number = self._group, self._group.rows, self._number + 1
        with torch.no_grad():
            logits = self._model.eval()(group.inputs)
        with group.drawing(f"learner {self._number}") as uniform:
            self._learner.train()
            for parameter in self._learner.parameters():
                parameter.grad = None
            out = self._learner(self._structure, logits, uniform)
            loss = rows.mean(cross_entropy(rows.pick(out), rows.labels))
            loss.sum().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
