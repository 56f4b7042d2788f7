"""Client half of FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor

from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import DataLoss, load_state, state_of
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    RowsLoss,
    why_checked_alone,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.score_names import is_better
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.nn.stacked import split_state
from flower_fgl.protocols.base import LARGEST, Empty, Payload
from flower_fgl.protocols.fedavg import DescribedWeights, Weights

__all__ = ["DescribingClientApp", "FedAvgClientApp"]


class FedAvgClientApp(GroupClientApp):
    """Train the received weights on the client's own data and upload them."""

    stacked = True
    group_action = "finetune"
    records_embedding: ClassVar[bool] = False
    """Whether ``penalties`` gets a :class:`RecordingBackbone`; then ``fit`` is that of
    :class:`GroupClientApp`."""
    down: ClassVar[type[Payload]] = Weights
    up: ClassVar[type[Payload]] = Weights

    def download_spec(self, client: Client) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the exchanged weights of the network of :meth:`build`."""
        key = ("exchanged", type(self), client.model_name, client.config.method_config)
        return client.shared(
            client.cached(key, lambda: state_shapes(self.build(client)))
        )

    def penalty(
        self, client: Client, model: Backbone, download: Weights
    ) -> Callable[[], Tensor] | None:
        """Return a term to add to the cross-entropy, by default :meth:`penalties`."""
        if type(self).penalties is FedAvgClientApp.penalties:
            return None
        terms = self.penalties(Group(client), model, [download])
        return terms and (lambda: terms().sum())

    def data_loss(
        self, client: Client, model: Backbone, download: Weights
    ) -> DataLoss | None:
        """Return what replaces the cross-entropy, by default :meth:`data_losses`."""
        if type(self).data_losses is FedAvgClientApp.data_losses:
            return None
        group = Group(client)
        return group.of_step(self.data_losses(group, model, [download]))

    def penalties(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> Callable[[], Tensor] | None:
        """Return a term per client to add to the cross-entropy, by default ``None``.

        ``model`` holds the received weights here and in :meth:`data_losses`. A class that
        sets ``stacked`` overrides these and not the hooks of one client.
        """
        return None

    def data_losses(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> RowsLoss | None:
        """Return what replaces the cross-entropy of each client, by default ``None``."""
        return None

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train for ``local-epochs`` from the received weights."""
        model = client.receive(download.tensors, self.build)
        loss = client.train(
            model,
            server_round,
            data_loss=self.data_loss(client, model, download),
            penalty=self.penalty(client, model, download),
        )
        return Fit(model, Weights(client.shared(model.state_dict())), loss)

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train many clients; :meth:`fit` trains one, with the loss of its hooks."""
        model = group.receive(downloads, self.build)
        network = RecordingBackbone(model) if self.records_embedding else model
        losses = group.train(
            network,
            data_loss=self.data_losses(group, network, downloads),
            penalty=self.penalties(group, network, downloads),
        )
        return group.fit_of_weights(model, model.state_dict(), losses)

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients that ``check-every`` stops one by one."""
        own, plain = type(self), FedAvgClientApp
        losses = own.penalties, own.data_losses
        if client.config.check_every and losses != (plain.penalties, plain.data_losses):
            return "check-every stops clients whose loss is not the cross-entropy alone"
        return why_checked_alone(client.config)

    def first_model(self, client: Client, download: Weights | None) -> Backbone | None:
        """Return the received model."""
        if download is None:
            return None
        return client.receive(download.tensors, self.build)

    def acts_in_stacks(self, config: RunConfig) -> bool:
        """Return whether clients are fine-tuned together, which needs ``check-every``."""
        return bool(config.check_every) and not why_checked_alone(config)

    def act_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Fine-tune clients, each of which ``check-every`` stops."""
        settings: FedAvgSettings = group.config.method_config
        model = group.receive(downloads, self.build)
        losses = group.train(model, epochs=settings.finetune_epochs)
        return GroupFit(model, [Empty()] * len(group), losses)

    def act(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Fine-tune one client, see :meth:`finetune`."""
        return self.finetune(client, server_round, download)

    def finetune(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Fine-tune the final global weights; keep the epoch best on validation nodes.

        The result stays with the client. In a tie the earlier epoch is kept; epoch 0, the
        received weights, is a candidate. Without validation nodes the last epoch is kept.
        ``check-every`` replaces these rules by its own.
        """
        model = client.receive(download.tensors, self.build)
        train = partial(client.train, model, server_round)
        return Fit(model, Empty(), self.keep_best_epoch(client, model, train))

    def keep_best_epoch(
        self, client: Client, model: Backbone, train: Callable[..., float]
    ) -> float:
        """Train for ``finetune-epochs`` as :meth:`finetune` says; return the loss.

        ``train`` takes ``epochs`` and ``after_epoch``, see :meth:`Client.train`. If
        training diverges, the loss is that of the last epoch before.
        """
        settings: FedAvgSettings = client.config.method_config
        epochs = settings.finetune_epochs
        if client.config.check_every:
            return train(epochs=epochs)
        best_score, best_state = _validation(client, model), state_of(model)
        losses: list[float] = []

        def keep_best(loss: float) -> None:
            nonlocal best_score, best_state
            if abs(loss) <= LARGEST or not losses:
                losses.append(loss)
            value = _validation(client, model)
            # all scores are NaN without validation nodes; then keep the last epoch
            is_unknown = math.isnan(value) and math.isnan(best_score)
            if is_unknown or is_better(client.config.main_score, value, best_score):
                best_score, best_state = value, state_of(model)

        train(epochs=epochs, after_epoch=keep_best)
        load_state(model, best_state)
        return losses[-1]


class DescribingClientApp(FedAvgClientApp):
    """Train as in FedAvg, then describe the models in evaluation mode."""

    fit = GroupClientApp.fit
    up: ClassVar[type[DescribedWeights]] = DescribedWeights

    @abstractmethod
    def describe(
        self, group: Group, model: Backbone
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return the descriptions, and the logits of the training graphs if it has them.

        The descriptions are (K, ...), also those of one client; logits as in
        :class:`GroupFit`.
        """

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train, then describe the results without dropout and gradient."""
        result = super().fit_group(group, downloads)
        model = cast("Backbone", result.model)  # of FedAvg's
        with torch.no_grad():
            described, logits = self.describe(group, model.eval())
        found = {name: tensor.float().cpu() for name, tensor in described.items()}
        uploads = [
            self.up(cast(Weights, upload).tensors, own)
            for upload, own in zip(
                result.uploads, split_state(found, len(group)), strict=True
            )
        ]
        records = partial(
            self.up.stacked_records, len(group), model.state_dict(), found
        )
        return replace(result, uploads=uploads, records=records, logits=logits)


def _validation(client: Client, model: Backbone) -> float:
    return client.evaluate(model)["val"].selected(client.config.main_score)
