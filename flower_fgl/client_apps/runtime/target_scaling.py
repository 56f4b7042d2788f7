"""A client's numbers on the scale on which it trains, and the statistics that it sends."""

from dataclasses import replace

from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.training import DataLoss
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.regression import regression_loss
from flower_fgl.core.target_scale import Moments, given_scale, moments, own_scale
from flower_fgl.protocols.exchanges import SCALE, AgreedScale, TargetStatistics

__all__ = ["number_loss", "scaled", "target_statistics"]


def scaled(data: ClientData, config: RunConfig, content: RecordDict) -> ClientData:
    """Return a client's data with its training numbers standardised; kept in its memo.

    The scale comes from the message, the settings or the client's own training values.
    """
    agreed = None
    if config.target_scale == "shared":
        if SCALE not in content:
            raise PayloadError("the message lacks the scale of the targets")
        agreed = AgreedScale.from_record(content, data.graph.target.width)
    key = ("scaled", agreed)
    if key not in data.memo:
        values = data.training.labels
        if agreed is not None:
            scale = agreed.as_scale()
        elif config.target_scale == "own":
            scale = own_scale(values)
        else:
            scale = given_scale(config, data.graph.target.names)
        training = replace(data.training, labels=scale.standardize(values))
        # a memo of its own: the two would refer to each other
        data.memo[key] = replace(data, training=training, scale=scale, memo={})
    found: ClientData = data.memo[key]
    return found


def target_statistics(data: ClientData, config: RunConfig) -> TargetStatistics:
    """Return the moments of each target's training values; PayloadError if not needed.

    Targets with fewer known ones than ``min-target-count`` say nothing.
    """
    if not config.predicts_numbers or config.target_scale != "shared":
        raise PayloadError("the run does not combine statistics of targets")
    found = moments(data.training.labels)
    nothing, least = Moments(0, 0.0, 0.0), config.min_target_count
    return TargetStatistics(tuple(m if m.count >= least else nothing for m in found))


def number_loss(config: RunConfig) -> DataLoss:
    """Return the loss of the settings; without any known number it depends on no output."""

    def loss(output: Tensor, z: Tensor, index: Tensor) -> Tensor:
        if bool(z.isnan().all()):
            return z.new_zeros(())
        return regression_loss(
            output,
            z,
            loss=config.loss,
            delta=config.huber_delta,
            target_weight=config.target_weight,
        )

    return loss
