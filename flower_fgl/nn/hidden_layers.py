"""Names of the layers of a backbone that depend on neither features nor classes."""

from __future__ import annotations

import functools

from flower_fgl.core.errors import ConfigError
from flower_fgl.nn.body_head import encoder_state
from flower_fgl.nn.models import backbone_shapes

__all__ = ["hidden_names"]


@functools.lru_cache(maxsize=64)
def hidden_names(
    model: str, *, hidden_channels: int, num_layers: int, readout: bool
) -> frozenset[str]:
    """Return the tensors of the encoder without its input layer.

    The input layer is each module with a parameter whose shape depends on the number of
    features. In a GIN this is the first linear map: a linear map and the sum over the
    neighbours commute, so this map could as well precede the first layer. Raises a
    ConfigError if the backbone has no other layer.
    """
    narrow, wide = (
        encoder_state(
            backbone_shapes(
                model,
                in_channels=width,
                hidden_channels=hidden_channels,
                num_classes=2,
                num_layers=num_layers,
                readout=readout,
            )
        )
        for width in (1, 2)
    )
    inputs = {name.rpartition(".")[0] for name in narrow if narrow[name] != wide[name]}
    found = frozenset(n for n in narrow if n.rpartition(".")[0] not in inputs)
    if not found:
        raise ConfigError(
            f'model = "{model}" has no layer between its input layer and its head, but '
            "the method shares those layers. Use gin, or more num-layers."
        )
    return found
