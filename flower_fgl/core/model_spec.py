"""The setting ``model``: names of backbones, optionally with sizes, and what they need.

::

    gcn                     the general sizes num-layers and hidden-channels
    gcn:3x512               3 layers, 512 wide
    appnp:2x64:k2           2 propagation steps, for backbones that count them separately
    graphsage:linear        all layers are encoder layers, the classifier is linear
    gcn,gcn:2x128,sgc:4x64  assigned to the clients in turn
"""

import re
from dataclasses import dataclass
from typing import Any

from flower_fgl.core.errors import ConfigError, refuse
from flower_fgl.core.extensions import REINSTALL, known_names
from flower_fgl.core.options import nearest
from flower_fgl.core.targets import EDGE, LINK

__all__ = ["BACKBONES", "DIRECTED", "EDGE_READERS", "LAYERED", "MOST_CHANNELS"]
__all__ += ["MOST_LAYERS", "SAMPLED", "SHALLOW", "STEPPED", "TYPED", "ModelName"]
__all__ += ["check_models", "message_direction", "read_model", "split_models"]

BACKBONES = [
    *("appnp", "gamlp", "gat", "gcn", "gcnii", "gin", "gine", "graphsage", "mlp"),
    *("rgcn", "rgcn-mean", "sgc", "sign", "ssgc", "typed-gine", "typed-graphsage"),
]
"""Our own names in ``nn.MODELS`` (a test compares them)."""
STEPPED = ("appnp", "gamlp")
"""Backbones that count propagation steps separately from layers (a test compares)."""
TYPED = ("rgcn", "rgcn-mean", "typed-gine", "typed-graphsage")
"""Backbones of typed graphs, which others cannot read (a test compares)."""
SHALLOW = ("gcnii", "gine", "sgc", "sign", "ssgc", "rgcn", *TYPED[2:])
"""Backbones that work with one layer; the others need two (a test compares)."""
LAYERED = ("gat", "gcn", "gin", "graphsage", "mlp")
"""Backbones whose last layer is the classifier unless ``:linear`` (a test compares)."""
SAMPLED = ("gcn", "gin", "graphsage", "mlp")
"""Backbones whose layers can read a sample of the neighbors (a test compares)."""
DIRECTED = ("gcn", "gine", "graphsage")
"""Backbones that read ``edge-direction``."""
EDGE_READERS = ("gine",)
"""Backbones that read the features of edges, and need them."""

MOST_LAYERS, MOST_CHANNELS = 1_000, 1_000_000
"""Largest depth and width; a larger number is a typing error."""

SIZES = re.compile(r"([1-9]\d*)x([1-9]\d*)")
STEPS = re.compile(r"k([1-9]\d*)")


@dataclass(frozen=True)
class ModelName:
    """One backbone of the setting ``model``, of this or of another package.

    Sizes that are ``None`` are those of the general settings, ``steps`` that of the
    backbone. With a linear head the classifier is a linear map instead of the last of
    the layers.
    """

    name: str
    num_layers: int | None = None
    hidden_channels: int | None = None
    steps: int | None = None
    has_linear_head: bool = False


def split_models(models: str) -> list[str]:
    """Split the setting ``model`` at its commas; check each name by :func:`read_model`."""
    names = [part.strip() for part in models.split(",")]
    for name in names:
        read_model(name)
    return names


def read_model(text: str) -> ModelName:
    """Parse ``name[:LAYERSxWIDTH][:kSTEPS][:linear]``, e.g. ``gcn:3x512``."""
    name, *parts = text.split(":")
    if name not in BACKBONES and name not in known_names("backbones"):
        names = {*BACKBONES, *known_names("backbones")}
        raise ConfigError(f'Unknown model "{name}". {nearest(name, names)} {REINSTALL}')
    layers = hidden = steps = None
    is_linear = parts[-1:] == ["linear"]
    for part in parts[:-1] if is_linear else parts:
        sizes, count = SIZES.fullmatch(part), STEPS.fullmatch(part)
        if sizes and layers is None and steps is None:
            layers = _size(text, sizes[1], "layers", MOST_LAYERS)
            hidden = _size(text, sizes[2], "hidden channels", MOST_CHANNELS)
        elif count and steps is None:
            steps = _size(text, count[1], "propagation steps", MOST_LAYERS)
        else:
            raise ConfigError(
                f'model "{text}" must be written {name}, {name}:LAYERSxWIDTH (e.g. '
                f"{name}:2x128)"
                + (f" or {name}:2x128:kSTEPS" if name in STEPPED else "")
                + (", optionally followed by :linear." if name in LAYERED else ".")
            )
    if steps is not None and name not in STEPPED:
        raise ConfigError(
            f'model "{text}": {name} has no propagation steps of its own. Only '
            f"{' and '.join(STEPPED)} take :kSTEPS."
        )
    if is_linear and name not in LAYERED:
        raise ConfigError(
            f'model "{text}": the classifier of {name} is always linear. Remove :linear; '
            f"only {', '.join(LAYERED)} take it."
        )
    return ModelName(name, layers, hidden, steps, is_linear)


def message_direction(settings: Any, model: str) -> str:
    """Return the direction of a backbone's messages.

    Empty for a backbone that reads undirected edges without features.
    """
    name, direction = read_model(model).name, settings.edge_direction
    reads_features = name in EDGE_READERS
    if direction == "default":
        is_edge = settings.setting == EDGE and reads_features
        direction = "separate" if is_edge else "both"
    is_directed = name in DIRECTED and direction != "both"
    return direction if is_directed or reads_features else ""


def check_models(settings: Any, method: Any) -> None:
    """Reject backbones that do not fit the method or the other settings."""
    for text in split_models(settings.model):
        refuse(_unfit(text, read_model(text), settings, method))
    if settings.reads_types:
        refuse(_typed(settings))


def _unfit(text: str, model: ModelName, s: Any, method: Any) -> dict[str, object]:
    """Reject a backbone with too few layers, of a wrong width or unfit for the method."""
    layers, width = model.num_layers or s.num_layers, model.hidden_channels
    where = "its name" if model.num_layers else "num-layers"
    needs_two = model.name in BACKBONES and model.name not in SHALLOW
    able = '" or "'.join(method.models)
    return {
        f'model "{text}" needs at least 2 layers, got {layers} by {where}. Only '
        f"{', '.join(SHALLOW)} work with one layer.": layers < 2 and needs_two,
        f"{s.method} compares the embeddings of different clients: model "
        f'"{text}" must have the width hidden-channels = {s.hidden_channels}, got {width}. '
        "Other methods, e.g. local, accept any widths.": (
            method.shares_embeddings and width not in (None, s.hidden_channels)
        ),
        f'{s.method} works with model = "{able}" only, got "{text}".': (
            method.models and model.name not in method.models
        ),
    }


def _typed(s: Any) -> dict[str, object]:
    """Reject what backbones of typed graphs cannot do."""
    model = s.model
    align, is_named = f'schema-align = "{s.schema_align}"', s.schema_align == "name"
    able = ("transductive", "inductive", LINK, EDGE, "graph")
    return {
        f'model = "{model}" reads typed graphs: set setting = "transductive", '
        f'"inductive", "link", "edge" or "graph", got "{s.setting}".': (
            s.setting not in able
        ),
        f'setting = "{s.setting}" predicts one relation at all owners, but '
        'schema-align = "private" tells none. Use "same" or "name".': (
            s.has_pairs and s.schema_align == "private"
        ),
        f'link-features = "degree" is for plain graphs: remove it for model = '
        f'"{model}".': s.setting == LINK and s.link_features == "degree",
        f'types = "ignore" leaves one kind of nodes and edges, but model = "{model}" '
        "reads several. Use another model, e.g. gcn.": s.types == "ignore",
        "node-embedding = true learns a vector for each node of the training graph: "
        f'set setting = "transductive", "link" or "edge", got "{s.setting}".': (
            s.node_embedding and not (s.has_pairs or s.setting == "transductive")
        ),
        f"{align} uploads other tensors at each owner, which secure-aggregation "
        'cannot sum. Use schema-align = "same" or "private".': (
            is_named and s.secure_aggregation
        ),
        f"{align} averages each tensor over the owners that have it: aggregation = "
        f'"{s.aggregation}" is not possible. Use "mean".': (
            is_named and s.aggregation != "mean"
        ),
    }


def _size(text: str, digits: str, what: str, most: int) -> int:
    """Return a size of a model's name; raise ConfigError if it is above ``most``."""
    # Python refuses to convert thousands of digits
    if len(digits) > len(str(most)) or int(digits) > most:
        raise ConfigError(f'model "{text}" may have at most {most:,} {what}.')
    return int(digits)
