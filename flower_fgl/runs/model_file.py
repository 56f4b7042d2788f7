"""Save trained models: weights and a description of the network.

``model.safetensors`` holds both, with the description as JSON in its header, so that an
interrupted write cannot separate them. Nothing is pickled.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_fgl.core.atomic import make_private_folder
from flower_fgl.core.calibration import (
    CONFORMAL,
    DIFFUSED,
    LABEL,
    NUMBER_SCORES,
    SCALED,
    Calibration,
)
from flower_fgl.core.errors import RunError, refuse
from flower_fgl.core.options import Scalar
from flower_fgl.core.schema import TYPED
from flower_fgl.core.target_scale import TargetScale
from flower_fgl.core.targets import CLASSES, KINDS, LABELS, NUMBERS, Target, TargetKind
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.writer import RunWriter

__all__ = ["ModelCard", "read_card", "save_model"]

CARD_KEY = "flower-fgl"
"""Header entry that holds the description."""
SCALING = ("features/mean", "features/std")
EDGE_SCALING = ("edge features/mean", "edge features/std")
"""Tensors beside the weights that hold a data owner's feature statistics."""
TARGET_SCALE = ("targets/mean", "targets/std")
"""Tensors beside the weights that hold the scale of the numbers that are predicted."""

LARGEST = {
    "num_features": 10**9,
    "hidden_channels": 10**9,
    "num_layers": 1000,
    "round": 10**9,
}
"""Largest numbers in a description. A layer takes time to build, whatever its size is."""
LONGEST = 300
"""Characters of a text in a description."""
LONGEST_SCHEMA = 1 << 20
"""Characters of the kinds and relations of a typed graph."""
CHOICES = {
    "scaling": ("none", "rows", "kept", "own", "lost"),
    "rep_norm": ("", "l2", "tanh", "none"),
    "target_kind": KINDS,
    "readout": ("default", "sum", "mean"),
    "target_scale": ("", "kept", "lost", "none"),
}
NEEDED = {"method", "model", "num_features", "hidden_channels", "num_layers", "round"}
NEEDED |= {"class_names", "classifies_graphs", "scaling", "owner", "validation"}
"""Entries of all files; those of earlier versions have no others."""
PATTERNS = {
    "link": r"(dot|mlp|edge:[0-9]{1,9}x[0-9]{1,9})?",
    "messages": r"((both|separate|forward):[0-9]{1,9}|typed:[0-9:]{3,20}:\[.*\])?",
}


@dataclass(frozen=True)
class ModelCard:
    """Description of a saved model."""

    method: str  # that trained the model
    model: str  # backbone
    num_features: int
    hidden_channels: int
    num_layers: int
    class_names: tuple[str, ...]
    """Names of the outputs, in order: of C classes, or of T labels or numbers."""
    classifies_graphs: bool  # whole graphs instead of nodes
    scaling: str
    """Scaling of the input features: ``none``; ``rows``, by the row sums; ``kept``,
    standardised with statistics in the file; ``own``, each graph with its own; or ``lost``,
    by each data owner in a way that is not in the file."""
    round: int  # after which the model was saved
    owner: str = ""  # of a personalized model; empty for the aggregated model
    validation: float | None = None
    """Accuracy on the owner's validation nodes, or the score by which its runs are
    compared, of numbers an error >= 0; ``None`` if not evaluated."""
    rep_norm: str = ""
    """Normalisation of the representations (``l2``, ``tanh``, ``none``) in a
    :class:`~flower_fgl.algorithms.fedpano.PersonalNet`, which has a linear classifier for
    some of the classes; empty for a plain backbone."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The method's settings by kebab-case key, if they determine its own network."""
    feature_names: tuple[str, ...] = ()  # of length d, in order; empty if unknown
    features_sha256: str = ""  # hash of these names; empty if there are none
    link: str = ""
    """Decoder of a model that predicts links or classifies edges, ``dot``, ``mlp`` or
    ``edge:CxA``, see :func:`~flower_fgl.nn.link.make_decoder`; else empty."""
    messages: str = ""
    """Direction of messages and width A of the features of edges, such as ``both:A``, of a
    backbone that reads them, see :class:`~flower_fgl.nn.Backbone`; of typed graphs the text
    of a :class:`~flower_fgl.core.schema.TypedModel`; else empty."""
    readout: str = "default"  # pooling of a graph's nodes, by default the backbone's
    target_kind: TargetKind = CLASSES
    target_units: tuple[str, ...] = ()  # of T numbers; empty if none is known
    target_scale: str = ""
    """What turns outputs into numbers: mean and standard deviation in the file (``kept``);
    those of each data owner, which are not in the file (``lost``); or ``none``. Empty for
    other kinds."""
    prepared: str = ""
    """Hash of the recipe and vocabulary of the training data, see ``flower-fgl prepare``;
    empty if they were made in another way."""
    calibration: Calibration | None = None

    @property
    def is_typed(self) -> bool:
        """Whether the model reads kinds of nodes and relations."""
        return self.messages.startswith(TYPED)

    @property
    def multi_label(self) -> bool:
        """Whether an item may have several of the classes."""
        return self.target_kind == LABELS

    @property
    def target(self) -> Target:
        """What the model predicts."""
        return Target(self.target_kind, self.class_names, self.target_units)

    def to_json(self) -> str:
        """Return the description as a JSON object with kebab-case keys."""
        values = {k.replace("_", "-"): v for k, v in asdict(self).items()}
        if self.target_kind != NUMBERS:  # as in files of earlier versions
            del values["target-kind"], values["target-units"], values["target-scale"]
            if self.multi_label:
                values["multi-label"] = True
        if self.calibration is not None:
            values["calibration"] = self.calibration.as_dict()
        absent = {"messages": "", "readout": "default", "prepared": ""}
        for key, nothing in {**absent, "calibration": None}.items():
            if values[key] == nothing:
                del values[key]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`; ValueError if an entry is missing or odd."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it must be a JSON object")
        read: dict[str, Any] = {k.replace("-", "_"): v for k, v in values.items()}
        if absent := sorted(NEEDED - read.keys()):
            raise ValueError(f"{absent} missing")
        known = {f.name for f in fields(cls)}
        if "multi_label" in read:
            is_multi = read.pop("multi_label")
            if not isinstance(is_multi, bool):
                raise ValueError(f"multi_label must not be {str(is_multi)[:50]!r}")
            read["target_kind"] = LABELS if is_multi else CLASSES
        read = {"settings": {}, "feature_names": [], "target_units": []} | read
        for name, value in read.items():
            if name not in known:
                raise ValueError(f"{name[:50]!r} is no entry")
            if name != "calibration" and not _is_plausible(name, value):
                shown = repr(value)[:50].encode("ascii", "backslashreplace").decode()
                raise ValueError(f"{name} must not be {shown}")
        # the names of the features of edges follow if there are any
        is_edge = read.get("link", "").startswith("edge:") or read.get("messages")
        if not is_edge and len(read["feature_names"]) not in (0, read["num_features"]):
            raise ValueError("feature_names must have one name for each feature")
        for name in ("class_names", "feature_names", "target_units"):
            read[name] = tuple(read[name])
        if "calibration" in read:
            read["calibration"] = Calibration.from_dict(read["calibration"])
        card = cls(**read)
        card._require_fit()
        return card

    def _require_fit(self) -> None:
        """Raise a ValueError if entries do not fit together."""
        has_numbers, number = self.target_kind == NUMBERS, len(self.class_names)
        fitting = {NUMBERS: NUMBER_SCORES, CLASSES: CONFORMAL, LABELS: (LABEL,)}
        is_node = not (self.link or self.classifies_graphs or self.is_typed)
        found = self.calibration
        knots = found.knots if found is not None and found.score != SCALED else ()
        thresholds = () if found is None else found.thresholds
        score = found.score if found is not None and thresholds else ""
        refuse(
            {
                "num_features must not be 0": not (self.num_features or self.is_typed),
                f"target_scale must not be {self.target_scale!r}": (
                    bool(self.target_scale) != has_numbers
                ),
                "target_units must have one unit for each number": (
                    len(self.target_units) not in (0, has_numbers * number)
                ),
                f"validation must not be {self.validation}": (
                    not has_numbers and (self.validation or 0) > 1
                ),
                "calibration has knots of other classes": knots
                and (
                    has_numbers
                    or len(knots) != (2 if self.link in ("dot", "mlp") else number)
                ),
                "calibration does not fit the target": thresholds
                and (
                    score not in fitting[self.target_kind]
                    or len(thresholds) != (1 if self.target_kind == CLASSES else number)
                ),
                "calibration needs a model of nodes of one kind": (
                    score == DIFFUSED and not is_node
                ),
            },
            ValueError,
        )


def _is_plausible(name: str, value: Any) -> bool:
    """Return whether an entry of a description may have a value.

    The file may come from others: texts are printed, and sizes decide how much is built.
    """
    if name in ("class_names", "feature_names", "target_units"):
        is_list = isinstance(value, list) and all(map(_is_line, value))
        return is_list and (name == "target_units" or len(set(value)) == len(value))
    if name == "classifies_graphs":
        return isinstance(value, bool)
    if name == "settings":
        return isinstance(value, dict) and all(
            _is_line(key) and (_is_line(entry) or isinstance(entry, int | float))
            for key, entry in value.items()
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "validation":
        return value is None or (is_number and 0 <= value < math.inf)
    if name in LARGEST:
        # kinds of nodes may have no features
        least = 0 if name in ("round", "num_features") else 1
        return is_number and isinstance(value, int) and least <= value <= LARGEST[name]
    if name in PATTERNS:
        is_short = isinstance(value, str) and len(value) <= LONGEST_SCHEMA
        return is_short and bool(re.fullmatch(PATTERNS[name], value))
    return value in CHOICES[name] if name in CHOICES else _is_line(value)


def _is_line(value: object) -> bool:
    """Return whether a value is one line of printable text of limited length."""
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST


def save_model(
    folder: Path,
    state: Mapping[str, Tensor],
    card: ModelCard,
    scaling: tuple[Tensor, Tensor] | None = None,
    *,
    edge_scaling: tuple[Tensor, Tensor] | None = None,
    target_scale: TargetScale | None = None,
    is_private: bool = False,
) -> None:
    """Write ``model.safetensors`` atomically, or raise a RunError and change nothing.

    ``scaling`` belongs to ``card.scaling = "kept"``, ``edge_scaling`` to standardised
    features of classified edges; ``target_scale`` is written with ``card.target_scale =
    "kept"``. With ``is_private`` only the owner of the process may read folder and file.
    """
    tensors = dict(state) | dict(zip(SCALING, scaling or (), strict=False))
    tensors |= dict(zip(EDGE_SCALING, edge_scaling or (), strict=False))
    if target_scale is not None and card.target_scale == "kept":
        pair = target_scale.mean, target_scale.std
        tensors |= dict(zip(TARGET_SCALE, pair, strict=True))
    try:
        if is_private:
            make_private_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"Cannot create the folder {folder}: {error.strerror}."
        ) from error
    header = {CARD_KEY: card.to_json()}
    RunWriter(folder).write_model(tensors, header, is_private=is_private)


def read_card(folder: Path) -> ModelCard | None:
    """Return the description of the model in a folder, ``None`` if there is no model.

    Raises a RunError if the file is damaged or has no description.
    """
    path = folder / MODEL
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {})[CARD_KEY]
        return ModelCard.from_json(text)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} is not a model file, or is damaged: {error}."
        ) from error
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} does not describe the network of its weights ({error}): another "
            "program or another version wrote it. Use that version, or train the model "
            "again."
        ) from error
