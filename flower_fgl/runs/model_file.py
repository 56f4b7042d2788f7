"""Save and load trained models: weights and a description of the network.

``model.safetensors`` holds both, with the description as JSON in its header, so that an
interrupted write cannot separate them. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, cast

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_fgl.algorithms.f2l import Adaptation, AdaptedModel
from flower_fgl.algorithms.fedpano.model import PersonalNet, build_encoder
from flower_fgl.algorithms.prototypes.nearest_mean import FixedMeans
from flower_fgl.core.atomic import make_private_folder
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.core.model_spec import read_model
from flower_fgl.core.options import Scalar, parse_settings
from flower_fgl.core.target_scale import TargetScale
from flower_fgl.core.targets import CLASSES, KINDS, LABELS, NUMBERS, Target, TargetKind
from flower_fgl.methods import METHODS
from flower_fgl.nn import MODELS, Backbone, build_model
from flower_fgl.nn.normalize import RepNorm
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.writer import RunWriter

__all__ = ["ModelCard", "SavedModel", "load_model", "read_card", "save_model"]

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
CHOICES = {
    "scaling": ("none", "rows", "kept", "own", "lost"),
    "rep_norm": ("", "l2", "tanh", "none"),
    "target_kind": KINDS,
    "readout": ("default", "sum", "mean"),
    "target_scale": ("", "kept", "lost", "none"),
}
LINKS = r"(dot|mlp|edge:[0-9]{1,9}x[0-9]{1,9})?"
MESSAGES = r"((both|separate|forward):[0-9]{1,9})?"


@dataclass(frozen=True)
class ModelCard:
    """Description of a saved model.

    Parameters
    ----------
    method : str
        Method that trained the model.
    model : str
        Backbone.
    num_features, hidden_channels, num_layers : int
        Sizes of the backbone.
    class_names : tuple of str
        Names of the outputs, in order: of C classes, or of T labels or numbers.
    classifies_graphs : bool
        Whether whole graphs are classified.
    scaling : {"none", "rows", "kept", "own", "lost"}
        Scaling of the input features: none; division by the row sums; standardisation
        with statistics in the file; standardisation of every graph with its own
        statistics; or by each data owner in a way that is not in the file.
    round : int
        Round after which the model was saved.
    owner : str
        Data owner of a personalized model; empty for the aggregated model.
    validation : float, or None
        Accuracy on the owner's validation nodes, or the score by which its runs are
        compared, of numbers an error >= 0; ``None`` if not evaluated.
    rep_norm : {"", "l2", "tanh", "none"}
        Normalisation of the representations in a
        :class:`~flower_fgl.algorithms.fedpano.model.PersonalNet`, which has a linear
        classifier for some of the classes; empty for a plain backbone.
    settings : mapping of str to bool, int, float or str
        The method's settings by kebab-case key, if they determine its own network.
    feature_names : tuple of str
        Length d: names of the input features, in order; empty if they are unknown.
    features_sha256 : str
        Hash of these names; empty if the features have none.
    link : {"", "dot", "mlp", "edge:CxA"}
        Decoder of a model that predicts links or classifies edges, see
        :func:`~flower_fgl.nn.link.make_decoder`; else empty.
    messages : {"", "both:A", "separate:A", "forward:A"}
        Direction of messages and width A of the features of edges, of a backbone that
        reads them, see :class:`~flower_fgl.nn.Backbone`; else empty.
    readout : {"default", "sum", "mean"}
        Pooling of the nodes of a graph; by default that of the backbone.
    target_kind : {"classes", "labels", "numbers"}
        What the model predicts: one of the classes, any of the labels, or numbers.
    target_units : tuple of str
        Length T: units of the numbers; empty if none is known.
    target_scale : {"", "kept", "lost", "none"}
        What turns outputs into numbers: mean and standard deviation in the file; those of
        each data owner, which are not in the file; or nothing. Empty for other kinds.
    prepared : str
        Hash of the recipe and vocabulary of the training data, see ``flower-fgl
        prepare``; empty if they were made in another way.
    """

    method: str
    model: str
    num_features: int
    hidden_channels: int
    num_layers: int
    class_names: tuple[str, ...]
    classifies_graphs: bool
    scaling: str
    round: int
    owner: str = ""
    validation: float | None = None
    rep_norm: str = ""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()
    features_sha256: str = ""
    link: str = ""
    messages: str = ""
    readout: str = "default"
    target_kind: TargetKind = CLASSES
    target_units: tuple[str, ...] = ()
    target_scale: str = ""
    prepared: str = ""

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
        for key, absent in (("messages", ""), ("readout", "default"), ("prepared", "")):
            if values[key] == absent:
                del values[key]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`.

        Raises a ValueError if an entry is missing or unknown, or has a wrong type or
        range.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it must be a JSON object")
        read: dict[str, Any] = {k.replace("-", "_"): v for k, v in values.items()}
        # absent from files of earlier versions
        later = {"rep_norm", "settings", "feature_names", "features_sha256", "link"}
        later |= {"target_kind", "target_units", "target_scale", "prepared"}
        later |= {"messages", "readout"}
        needed = {f.name for f in fields(cls)} - later
        absent = needed - read.keys()
        if absent:
            raise ValueError(f"{sorted(absent)} missing")
        known = {f.name: f.default for f in fields(cls)}
        if "multi_label" in read:
            is_multi = read.pop("multi_label")
            if not isinstance(is_multi, bool):
                raise ValueError(f"multi_label must not be {str(is_multi)[:50]!r}")
            read["target_kind"] = LABELS if is_multi else CLASSES
        read = {"settings": {}, "feature_names": [], "target_units": []} | read
        for name, value in read.items():
            if name not in known:
                raise ValueError(f"{name[:50]!r} is no entry")
            if not _is_plausible(name, value):
                shown = repr(value)[:50].encode("ascii", "backslashreplace").decode()
                raise ValueError(f"{name} must not be {shown}")
        # the names of the features of edges follow if there are any
        is_edge = read.get("link", "").startswith("edge:") or read.get("messages")
        if not is_edge and len(read["feature_names"]) not in (0, read["num_features"]):
            raise ValueError("feature_names must have one name for each feature")
        for name in ("class_names", "feature_names", "target_units"):
            read[name] = tuple(read[name])
        card = cls(**read)
        card._require_target()
        return card

    def _require_target(self) -> None:
        """Raise a ValueError if what is said about the target does not fit together."""
        has_numbers = self.target_kind == NUMBERS
        if bool(self.target_scale) != has_numbers:
            raise ValueError(f"target_scale must not be {self.target_scale!r}")
        if len(self.target_units) not in (0, has_numbers * len(self.class_names)):
            raise ValueError("target_units must have one unit for each number")
        if not has_numbers and (self.validation or 0) > 1:
            raise ValueError(f"validation must not be {self.validation}")


def _is_plausible(name: str, value: object) -> bool:
    """Return whether an entry of a description may have a value.

    The file may come from others: texts are printed, and sizes decide how much is built.
    """
    if name == "target_units":
        return isinstance(value, list) and all(map(_is_line, value))
    if name in ("class_names", "feature_names"):
        return (
            isinstance(value, list)
            and all(map(_is_line, value))
            and len(set(value)) == len(value)
        )
    if name == "classifies_graphs":
        return isinstance(value, bool)
    if name == "settings":
        return isinstance(value, dict) and all(
            _is_line(key) and (_is_line(entry) or isinstance(entry, int | float))
            for key, entry in value.items()
        )
    if name == "validation":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value is None or (is_number and 0 <= value < math.inf)  # type: ignore[operator]
    if name in LARGEST:
        least = 0 if name == "round" else 1
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return is_number and least <= value <= LARGEST[name]  # type: ignore[operator]
    if name == "link":
        return isinstance(value, str) and bool(re.fullmatch(LINKS, value))
    if name == "messages":
        return isinstance(value, str) and bool(re.fullmatch(MESSAGES, value))
    if name in CHOICES:
        return value in CHOICES[name]
    return _is_line(value)


def _is_line(value: object) -> bool:
    """Return whether a value is one line of printable text of limited length."""
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST


@dataclass(frozen=True, eq=False)
class SavedModel:
    """Content of a model file: the network in evaluation mode, and its description.

    ``scaling`` is mean and standard deviation of the features, of shape (d,) and
    float64, if the file has them; ``edge_scaling``, of shape (a,), those of the
    features of classified edges. ``target_scale`` is the scale of T numbers, if they have
    one that the file holds.
    """

    model: Backbone
    card: ModelCard
    scaling: tuple[Tensor, Tensor] | None
    edge_scaling: tuple[Tensor, Tensor] | None = None
    target_scale: TargetScale | None = None


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
    """Write ``model.safetensors`` atomically.

    ``scaling`` belongs to ``card.scaling = "kept"``, ``edge_scaling`` to standardised
    features of classified edges, ``target_scale`` to ``card.target_scale = "kept"``, else
    it is not written; with ``is_private`` only the owner of the process may
    read folder and file. Raises a RunError if it cannot be written; an existing model
    is left unchanged.
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
            "program or an earlier version wrote it. Train the model again."
        ) from error


def load_model(folder: Path) -> SavedModel:
    """Load the network of a model file, or of the folder that holds it.

    Raises a RunError if there is no model, the file is damaged, or its weights do not
    match the network that it describes.
    """
    folder = folder.parent if folder.name == MODEL else folder
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        what = (
            "is a file, but must be a folder" if folder.exists() else "does not exist"
        )
        raise RunError(f"The model folder {folder} {what}.")
    card = read_card(folder)
    if card is None:
        raise RunError(
            f"{folder} holds no {MODEL}. Pass the folder in which a data owner's "
            "SuperNode saved a model, or a run folder. Methods that send no weights save "
            "no model in the run folder."
        )
    try:
        tensors = safetensors.torch.load_file(folder / MODEL)
        scaling, edge_scaling = (
            _statistics(card, tensors, names) for names in (SCALING, EDGE_SCALING)
        )
        target_scale = _target_scale(card, tensors)
        if _can_be_measured(card):
            # what others describe is compared before it takes memory
            with torch.device("meta"):
                _require_fit(card, _build(card, tensors), tensors)
        model = _build(card, tensors)
        _require_fit(card, model, tensors)
        if not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise RunError("its weights are not finite")
    except (FglError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunError(f"{folder / MODEL} cannot be used: {error}.") from error
    model.load_state_dict(tensors)
    return SavedModel(model.eval(), card, scaling, edge_scaling, target_scale)


def _statistics(
    card: ModelCard, tensors: dict[str, Tensor], names: tuple[str, str]
) -> tuple[Tensor, Tensor] | None:
    """Take a data owner's statistics of features out of the tensors of a file.

    Those of the features of nodes belong to a card with scaling ``kept``. Those of edges
    may be absent.
    """
    found = [tensors.pop(name) for name in names if name in tensors]
    is_of_nodes = names == SCALING
    if not found and (card.scaling != "kept" or not is_of_nodes):
        return None
    width = card.num_features if is_of_nodes else len(found[0].flatten())
    if card.scaling != "kept" or not _is_scale(found, width):
        raise RunError(
            f"it describes {card.num_features} features with scaling {card.scaling!r}, "
            f"but its statistics of the features{'' if is_of_nodes else ' of edges'} do "
            "not fit that"
        )
    return found[0], found[1]


def _target_scale(card: ModelCard, tensors: dict[str, Tensor]) -> TargetScale | None:
    """Take the scale of the numbers out of the tensors of a file, if it must have one."""
    found = [tensors.pop(name) for name in TARGET_SCALE if name in tensors]
    width = len(card.class_names)
    if card.target_scale != "kept" and not found:
        is_plain = card.target_scale == "none"
        return TargetScale.identity(width) if is_plain else None
    if card.target_scale != "kept" or not _is_scale(found, width):
        raise RunError(
            f"it describes {width} targets with the scale {card.target_scale!r}, but "
            "their mean and standard deviation do not fit that"
        )
    return TargetScale(*found)


def _is_scale(found: Sequence[Tensor], width: int) -> bool:
    """Return whether tensors are means and positive deviations of a width."""
    return (
        [(t.dtype, tuple(t.shape)) for t in found] == [(torch.float64, (width,))] * 2
        and all(bool(t.isfinite().all()) for t in found)
        and bool((found[1] > 0).all())
    )


def _can_be_measured(card: ModelCard) -> bool:
    """Return whether the described network is this package's own code."""
    backbone = read_model(card.model)
    if (backbone.num_layers or 1) > LARGEST["num_layers"]:
        raise RunError(f"{card.model} has more than {LARGEST['num_layers']} layers")
    is_own = card.method in METHODS.own or not card.settings
    return is_own and backbone.name in MODELS.own


def _require_fit(
    card: ModelCard, model: Backbone, tensors: Mapping[str, Tensor]
) -> None:
    """Raise an error unless the tensors of a file are the state of a network."""
    found = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    expected = {
        name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()
    }
    if found != expected:
        reason = (
            f": {card.method} predicts with its own network, which the file does not "
            "describe"
        )
        is_own = found.keys() - expected.keys()
        raise RunError(
            f"its weights do not match {card.model}{reason if is_own else ''}"
        )


def _build(card: ModelCard, tensors: Mapping[str, Tensor]) -> Backbone:
    """Build the described network, without loading its weights."""
    num_classes = len(card.class_names)
    classes = torch.empty(num_classes, dtype=torch.bool)
    if card.settings:
        return _build_own(card)
    if card.rep_norm:
        return _build_personal(card, tensors)
    if "means" in tensors:
        width = card.hidden_channels
        means = torch.empty(num_classes, width)
        return FixedMeans(_build_backbone(card, num_outputs=width), means, classes)
    backbone = _build_backbone(card, num_outputs=num_classes)
    if "support" not in tensors:
        return backbone
    width = backbone.hidden_channels  # clients may have different widths
    module = Adaptation.blank(width, num_classes, torch.get_default_device())
    support = torch.empty(len(tensors["support"]), width)
    return AdaptedModel(backbone, module, support, classes)


def _build_backbone(card: ModelCard, *, num_outputs: int) -> Backbone:
    """Build the backbone without initialising its weights."""
    return build_model(
        card.model,
        in_channels=card.num_features,
        hidden_channels=card.hidden_channels,
        num_classes=num_outputs,
        num_layers=card.num_layers,
        dropout=0.0,
        readout=card.classifies_graphs and card.readout,
        initialise=False,
        link=card.link,
        messages=card.messages,
    )


def _build_personal(card: ModelCard, tensors: Mapping[str, Tensor]) -> Backbone:
    """Build a network with a classifier for some of the classes."""
    encoder = build_encoder(
        card.model,
        in_channels=card.num_features,
        hidden_channels=card.hidden_channels,
        num_layers=card.num_layers,
        dropout=0.0,
        initialise=False,
    )
    weight, classes = tensors.get("classifier.weight"), tensors.get("classes")
    if weight is None or classes is None:
        raise RunError("it holds no classifier for the owner's classes")
    norm, num_classes = cast(RepNorm, card.rep_norm), len(card.class_names)
    if weight.dim() != 2 or not set(classes.flatten().tolist()) <= set(
        range(num_classes)
    ):
        raise RunError("its classifier does not fit its classes")
    classifier = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    device = torch.get_default_device()
    return PersonalNet(
        encoder, classifier.to_empty(device=device), classes, num_classes, norm
    )


def _build_own(card: ModelCard) -> Backbone:
    """Build a method's own network."""
    method = METHODS.get(card.method)
    if method is None or method.settings is None or not method.network:
        raise RunError(
            f'its network belongs to the method "{card.method}", which this version does '
            "not know: a later version wrote the file"
        )
    method_config = parse_settings(method.settings, card.settings, prefix=card.method)
    # networks of methods that classify nodes only do not take this argument
    readout = {"readout": card.readout} if card.classifies_graphs else {}
    with torch.random.fork_rng(devices=[]):  # initial weights are overwritten
        network: Backbone = method.load_network()(
            method_config,
            model=card.model,
            num_features=card.num_features,
            num_classes=len(card.class_names),
            width=card.hidden_channels,
            num_layers=card.num_layers,
            dropout=0.0,
            **readout,
        )
    return network
