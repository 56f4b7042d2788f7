"""Save and load trained models: weights and a description of the network.

``model.safetensors`` holds both, with the description as JSON in its header, so that an
interrupted write cannot separate them. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
from flower_fgl.core.options import Scalar, parse_settings
from flower_fgl.methods import METHODS
from flower_fgl.nn import Backbone, build_model, state_shapes
from flower_fgl.nn.normalize import RepNorm
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.writer import RunWriter

__all__ = ["ModelCard", "SavedModel", "load_model", "read_card", "save_model"]

CARD_KEY = "flower-fgl"
"""Header entry that holds the description."""
SCALING = ("features/mean", "features/std")
EDGE_SCALING = ("edge features/mean", "edge features/std")
"""Tensors beside the weights that hold a data owner's feature statistics."""


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
        Length C: names of the outputs, in order.
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
    validation : float in [0, 1], or None
        Accuracy on the owner's validation nodes, or the area under the ROC curve where
        runs are compared by it; ``None`` if not evaluated.
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
    multi_label : bool
        Whether an item may have several of the classes.
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
    multi_label: bool = False

    def to_json(self) -> str:
        """Return the description as a JSON object with kebab-case keys."""
        values = {k.replace("_", "-"): v for k, v in asdict(self).items()}
        if not self.multi_label:  # as in files of earlier versions
            del values["multi-label"]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`.

        Parameters
        ----------
        text : str
            JSON object.

        Raises
        ------
        ValueError, TypeError
            If an entry is missing or unknown.
        """
        values: dict[str, Any] = json.loads(text)
        read = {key.replace("-", "_"): value for key, value in values.items()}
        # absent from files of earlier versions
        later = {"rep_norm", "settings", "feature_names", "features_sha256", "link"}
        later |= {"multi_label"}
        needed = {f.name for f in fields(cls)} - later
        absent = needed - read.keys()
        if absent:
            raise ValueError(f"{sorted(absent)} missing")
        read["class_names"] = tuple(read["class_names"])
        read["feature_names"] = tuple(read.get("feature_names", ()))
        return cls(**read)


@dataclass(frozen=True, eq=False)
class SavedModel:
    """Content of a model file.

    Parameters
    ----------
    model : Backbone
        The network in evaluation mode.
    card : ModelCard
        Description of the model.
    scaling : tuple of two Tensors of shape (d,), float64, or None
        Mean and standard deviation for standardising the features.
    edge_scaling : tuple of two Tensors of shape (a,), float64, or None
        Those of the features of classified edges.
    """

    model: Backbone
    card: ModelCard
    scaling: tuple[Tensor, Tensor] | None
    edge_scaling: tuple[Tensor, Tensor] | None = None


def save_model(
    folder: Path,
    state: Mapping[str, Tensor],
    card: ModelCard,
    scaling: tuple[Tensor, Tensor] | None = None,
    *,
    edge_scaling: tuple[Tensor, Tensor] | None = None,
    is_private: bool = False,
) -> None:
    """Write ``model.safetensors`` atomically.

    Parameters
    ----------
    folder : Path
        Folder to write to; created if missing.
    state : mapping of str to Tensor
        Weights by name, on any device.
    card : ModelCard
        Description of the model.
    scaling : tuple of two Tensors of shape (d,), float64, optional
        Feature statistics, if ``card.scaling`` is ``"kept"``.
    edge_scaling : tuple of two Tensors of shape (a,), float64, optional
        Statistics of the features of classified edges, if these were standardised.
    is_private : bool
        Whether only the owner of the process may read the folder and the file.

    Raises
    ------
    RunError
        If the file cannot be written; an existing model is left unchanged.
    """
    tensors = dict(state) | dict(zip(SCALING, scaling or (), strict=False))
    tensors |= dict(zip(EDGE_SCALING, edge_scaling or (), strict=False))
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
    """Return the description of the model in a folder.

    Parameters
    ----------
    folder : Path
        Folder that may hold ``model.safetensors``.

    Returns
    -------
    ModelCard or None
        ``None`` if there is no model.

    Raises
    ------
    RunError
        If the file is damaged or has no description.
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
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(
            f"{path} does not describe the network of its weights ({error}): another "
            "program or an earlier version wrote it. Train the model again."
        ) from error


def load_model(folder: Path) -> SavedModel:
    """Load the network of a model file.

    Parameters
    ----------
    folder : Path
        Folder with ``model.safetensors``, or the path of that file.

    Raises
    ------
    RunError
        If there is no model, the file is damaged, or its weights do not match the
        network that it describes.
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
    tensors = safetensors.torch.load_file(folder / MODEL)
    scaling, edge_scaling = (
        _pop_pair(tensors, names) for names in (SCALING, EDGE_SCALING)
    )
    try:
        model = _build(card, tensors)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = state_shapes(model)
        if found != expected:
            reason = (
                f": {card.method} predicts with its own network, which the file does not "
                "describe"
            )
            is_own = found.keys() - expected.keys()
            raise RunError(
                f"its weights do not match {card.model}{reason if is_own else ''}"
            )
    except (FglError, TypeError) as error:
        raise RunError(f"{folder / MODEL} cannot be used: {error}.") from error
    model.load_state_dict(tensors)
    return SavedModel(model.eval(), card, scaling, edge_scaling)


def _pop_pair(
    tensors: dict[str, Tensor], names: tuple[str, str]
) -> tuple[Tensor, Tensor] | None:
    """Take mean and standard deviation out of the tensors, if both are there."""
    found = [tensors.pop(name) for name in names if name in tensors]
    return (found[0], found[1]) if len(found) == len(names) else None


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
    module = Adaptation.blank(width, num_classes, torch.device("cpu"))
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
        readout=card.classifies_graphs,
        initialise=False,
        link=card.link,
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
    classifier = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    norm, num_classes = cast(RepNorm, card.rep_norm), len(card.class_names)
    return PersonalNet(
        encoder, classifier.to_empty(device="cpu"), classes, num_classes, norm
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
    readout = {"readout": True} if card.classifies_graphs else {}
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
