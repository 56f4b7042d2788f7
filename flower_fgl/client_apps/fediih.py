"""Client half of FedIIH: train the network of factors and summarise each factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from flower_fgl.algorithms.fediih import FedIIHNet
from flower_fgl.client_apps.fedavg import DescribingClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.nn import Backbone

__all__ = ["FedIIHClientApp"]


class FedIIHClientApp(DescribingClientApp):
    """Train by the cross-entropy; upload the weights and the mean of each factor.

    Notes
    -----
    1. The published code also trains prior vectors by a variational loss. That loss never
       reaches the weights there, and the vectors change nothing else, so both are left
       out, with the prior means in the download.
    2. In the published code mean and log-variance come from two stacks without
       parameters, which differ by dropout noise only. Here the summary is computed
       without dropout, so both are one vector, which is sent once.
    """

    stacked = True

    def build(self, client: Client) -> FedIIHNet:
        """Build FedIIH's network."""
        return client.build_own(FedIIHNet)

    def describe(
        self, group: Group, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return the mean of each factor, and the logits."""
        network, graph = cast(FedIIHNet, model), group.inputs
        h = network.embed(graph)
        mean = network.summary(h, graph, group.real)
        return {"mean": mean.view(len(group), *mean.shape[-2:])}, network.head(h, graph)
