"""Any ``torch.nn.Module`` as a backbone: it embeds nodes, a linear map classifies."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import described
from flower_fgl.nn.backbone import Backbone, Parts
from flower_fgl.nn.graph_input import GraphInput

__all__ = ["Factory", "ModuleBackbone", "backbone_class"]

Factory = Callable[..., nn.Module]
"""Called with ``in_channels``, ``hidden_channels``, ``num_layers`` and ``dropout``. It
returns a module that maps ``x`` (N, in_channels) and ``edge_index`` (2, E) to embeddings
(N, hidden_channels), as the models of ``torch_geometric.nn`` do."""


@atexit.register
def _remove_generated_code() -> None:
    """Remove the temporary files to which PyG writes the code of layers, and leaves it."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if name.startswith("torch_geometric.") and path.name.startswith(f"{name}_"):
            path.unlink(missing_ok=True)


class ModuleBackbone(Backbone):
    """A module of another library as the encoder, and a linear classifier.

    The module gets dense features. Each graph's are made dense once. Nothing follows the
    module's output but the classifier: no activation, no dropout.
    """

    min_layers = 1
    factory: ClassVar[Factory]
    name: ClassVar[str]

    def make(self, in_channels: int, num_classes: int, num_layers: int) -> Parts:
        """Call the factory; check what it returns."""
        what = f"The factory of the backbone {described('backbones', self.name)}"
        sizes = {
            "in_channels": in_channels,
            "hidden_channels": self.hidden_channels,
            "num_layers": num_layers,
            "dropout": self.dropout,
        }
        try:
            encoder = type(self).factory(**sizes)
        except TypeError as error:
            raise ConfigError(
                f"{what} must take {', '.join(sizes)} as keywords: {error}."
            ) from error
        if not isinstance(encoder, nn.Module):
            raise ConfigError(
                f"{what} must return a torch.nn.Module, got {type(encoder).__name__}."
            )
        for name, value in encoder.state_dict().items():
            if not value.is_floating_point():
                raise ConfigError(
                    f"{what} makes a network whose state {name} is of {value.dtype}, "
                    "which cannot be averaged. Use a network with float parameters and "
                    "buffers only, e.g. torch.nn.LayerNorm in place of BatchNorm."
                )
        return encoder, nn.Linear(self.hidden_channels, num_classes)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Run the module: (N, hidden_channels)."""
        if graph.edge_weight is not None:
            raise ConfigError(
                f"The backbone {described('backbones', self.name)} takes no weights of "
                "edges, which this method uses. Choose one of the library's backbones."
            )
        h: Any = self.encoder(graph.dense_features(), graph.edge_index)
        shape = (graph.num_nodes, self.hidden_channels)
        if not isinstance(h, torch.Tensor) or h.shape != shape:
            got = tuple(h.shape) if isinstance(h, torch.Tensor) else type(h).__name__
            raise ConfigError(
                f"The backbone {described('backbones', self.name)} must return embeddings "
                f"of shape (nodes, hidden_channels) = {shape}, got {got}."
            )
        return h


def backbone_class(name: str, thing: Any) -> type[Backbone]:
    """Return the class for a row of another package: a backbone, or a :data:`Factory`.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if isinstance(thing, type) and issubclass(thing, Backbone):
        return thing
    if not callable(thing) or isinstance(thing, nn.Module):
        raise ConfigError(
            f'The backbone "{name}" must be a subclass of flower_fgl.nn.Backbone or a '
            f"function that makes a torch.nn.Module, got {type(thing).__name__}."
        )
    return type(name, (ModuleBackbone,), {"factory": staticmethod(thing), "name": name})
