"""Client half that uploads a description of the trained model beside its weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.nn import Backbone
from flower_fgl.protocols.base import Payload
from flower_fgl.protocols.fedavg import DescribedWeights, Weights

__all__ = ["DescribingClientApp"]


class DescribingClientApp(FedAvgClientApp):
    """Train as in FedAvg, then describe the model in evaluation mode."""

    up: ClassVar[type[Payload]] = DescribedWeights

    @abstractmethod
    def describe(
        self, client: Client, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return the description, and the logits of the training graph if it has them."""

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train, then describe the result without dropout and gradient."""
        result = super().fit(client, server_round, download)
        assert result.model is not None  # of FedAvg's fit
        with torch.no_grad():
            described, logits = self.describe(client, result.model.eval())
        upload = self.up(  # type: ignore[call-arg]
            result.upload.tensors,  # type: ignore[attr-defined]
            {name: tensor.float().cpu() for name, tensor in described.items()},
        )
        return replace(result, upload=upload, logits=logits)
