"""Server half of TopFGL: average the clients by the likeness of their learners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms import topfgl
from flower_fgl.algorithms.personal_mix import linear_weights
from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.methods.topfgl import TopFGLSettings
from flower_fgl.nn import Backbone
from flower_fgl.nn.backbone import copy_network
from flower_fgl.nn.stacked import SharedInput, can_stack, stack_model
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import draw_model
from flower_fgl.strategies.personal_mix import PersonalMix

__all__ = ["TopFGL"]


class TopFGL(PersonalMix):
    """Run all learners on one random graph, and compare their outputs by linear CKA.

    Notes
    -----
    1. The random graph holds no client's data: the server draws the same one in every
       round, from the run's seed.
    2. The first rounds, a share ``warmup`` of all, average by ``weight-by``.
    """

    config: RunConfig[TopFGLSettings]
    up = Weights

    def build(self, model: str) -> nn.Module:
        """Draw the network as FedAvg does, then the learner."""
        drawn: Backbone = draw_model(self.config, self.federation, model)
        drawn.learner = topfgl.TopologyLearner(
            self.federation.num_classes, drawn.hidden_channels, self.config.dropout
        )
        self.network = copy_network(drawn)  # its weights are overwritten
        return drawn

    def mixes(self, server_round: int) -> bool:
        """Return whether the warm-up is over."""
        settings = self.config.method_config
        if settings.warmup == 1:
            return False
        # a product like .55 · 100 is a little above the whole number
        first: int = math.ceil(round(settings.warmup * self.config.rounds, 9))
        return server_round >= first

    @torch.no_grad()
    def similarity(self, uploads: Sequence[Weights]) -> Tensor:
        """Return the CKA of the learners' outputs."""
        generator = torch_generator(self.config.seed, 0, SERVER, "probe")
        probe = topfgl.probe_graph(self.federation.num_features, generator)
        structure = probe.with_features(topfgl.structural_encoding(probe))
        states = [payload.tensors for payload in uploads]
        if can_stack(self.network):
            network = stack_model(self.network, states, len(states), torch.rand_like)
            network.eval()
            logits = network(SharedInput(probe))
            outputs = network.get_submodule("learner")(SharedInput(structure), logits)
            return topfgl.linear_cka(outputs)
        network, found = self.network.eval(), []
        for state in states:
            network.load_state_dict(dict(state))
            learner = network.get_submodule("learner")
            found.append(learner(structure, network(probe)))
        return topfgl.linear_cka(torch.stack(found))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return weights in proportion to the CKA."""
        return linear_weights(similarity, similarity.new_ones(len(uploads)))
