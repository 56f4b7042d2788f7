"""The exchange before round 1 in which clients agree on one scale of numbers."""

from __future__ import annotations

import logging
from dataclasses import replace

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.target_scale import Moments, TargetScale, agree_scale, given_scale
from flower_fgl.protocols.base import Empty, read_payload
from flower_fgl.protocols.target_scale import TARGETS, AgreedScale, TargetStatistics
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.messenger import Messenger
from flower_fgl.strategies.rounds.round_log import Failure

__all__ = ["agree_on_scale", "known_scale"]

log = logging.getLogger(__name__)


def agree_on_scale(messenger: Messenger) -> Federation:
    """Ask the clients for the moments of their targets, and combine them to one scale.

    A client whose moments are nonsense takes no further part, as with a malformed
    description. One that sends none takes part, but its values do not count.
    """
    federation, config = messenger.loop.federation, messenger.config
    names = federation.class_names
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


def known_scale(config: RunConfig, federation: Federation) -> TargetScale | None:
    """Return the scale of the aggregated model, ``None`` with each client's own."""
    if config.target_scale == "shared":
        return None if federation.scale is None else federation.scale.as_scale()
    if config.target_scale == "own":
        return None
    return given_scale(config, federation.class_names)
