"""Exchanges outside the rounds: one scale of numbers, and calibration of the model."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import (
    number_shapes,
    reliability_rows,
    shared_classes,
    shared_numbers,
    sum_shapes,
)
from flower_fgl.core.calibration import Calibration
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.target_scale import Moments, agree_scale
from flower_fgl.protocols.base import Empty, Payload, read_payload
from flower_fgl.protocols.exchanges import (
    CALIBRATE,
    TARGETS,
    AgreedScale,
    CalibrationSums,
    FinalModel,
    TargetStatistics,
)
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.messenger import Messenger
from flower_fgl.strategies.rounds.round_log import Failure
from flower_fgl.strategies.rounds.secure_aggregation import SecureExchanges

__all__ = ["agree_on_scale", "calibrate"]

log = logging.getLogger(__name__)


def agree_on_scale(messenger: Messenger) -> Federation:
    """Ask the clients for the moments of their targets, and combine them to one scale.

    A client whose moments are nonsense takes no further part, as with a malformed
    description. One that sends none takes part, but its values do not count.
    """
    federation, config = messenger.loop.federation, messenger.config
    names = federation.target.names
    asked = dict.fromkeys(federation.trainable, Empty())
    found: dict[int, tuple[Moments, ...]] = {}
    refused: dict[int, str] = {}
    for pid, content in messenger.ask(0, TARGETS, asked).items():
        spec = (len(names), federation.clients[pid].num_train)
        try:
            found[pid] = read_payload(TargetStatistics, content, spec).moments
        except Exception as error:  # any failure concerns this reply only
            reason = Failure.of(pid, error).reason
            refused[pid] = f"its statistics of the targets are malformed: {reason}"
    for pid, reason in refused.items():
        messenger.drop(pid, f"it does not take part in this run: {reason}")
    if not found:
        reasons = "; ".join(one.reason for one in messenger.loop.log.failures)
        raise RunError(
            f"No client sent statistics of its targets: {reasons}. target-scale = "
            '"given" or "own" needs none.'
        )
    labels = {
        pid: f"owner {client.name}" if client.name else f"client {pid}"
        for pid, client in federation.clients.items()
    }
    scale = agree_scale(
        names,
        found,
        labels,
        min_count=config.min_target_count,
        is_robust=config.aggregation != "mean",
        warn=log.warning,
    )
    return replace(federation.without(refused), scale=AgreedScale.of(scale))


def calibrate(
    messenger: Messenger,
    secure: SecureExchanges | None,
    state: Mapping[str, Tensor],
    server_round: int,
) -> Calibration:
    """Sum over the validation items of all clients, and calibrate the aggregated model.

    With secure aggregation all clients must reply.
    """
    config, federation = messenger.config, messenger.loop.federation
    shapes = (
        number_shapes(len(messenger.spreads))
        if config.predicts_numbers
        else sum_shapes(is_free=federation.target.kind == "labels")
    )
    labels = federation.target.width if federation.target.kind == "labels" else 1
    model = FinalModel(dict(state))
    if secure is not None:
        asked: dict[int, Payload] = dict.fromkeys(federation.trainable, model)
        spec = (shapes, 0, labels)
        sums = secure.sum_query(server_round, CALIBRATE, asked, CalibrationSums, spec)
        sums = {name: tensor.clamp(min=0) for name, tensor in sums.items()}
    else:
        asked = dict.fromkeys(federation.clients, model)
        sizes = {pid: one.num_val for pid, one in federation.clients.items()}
        found = messenger.query(
            server_round,
            CALIBRATE,
            asked,
            CalibrationSums,
            lambda pid: (shapes, sizes[pid], labels),
        )
        if not found:
            raise PayloadError("no client sent sums to calibrate the model")
        sums = {
            name: torch.stack([part.sums[name] for part in found.values()]).sum(dim=0)
            for name in shapes
        }
    if config.predicts_numbers:
        std = torch.tensor(messenger.spreads, dtype=torch.float64)
        return shared_numbers(sums, std, coverage=config.coverage)
    calibration = shared_classes(
        sums,
        num_classes=federation.target.width,
        coverage=config.coverage,
        score=config.conformal_score,
    )
    messenger.loop.log.tables["reliability"] = reliability_rows(
        sums, calibration.temperature
    )
    return calibration
