"""Load a model file: build the network that it describes, and check its weights."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from torch import Tensor

from flower_fgl.algorithms.f2l import Adaptation, AdaptedModel
from flower_fgl.algorithms.fedpano import PersonalNet, build_encoder
from flower_fgl.algorithms.prototypes.nearest_mean import FixedMeans
from flower_fgl.core.errors import FglError, RunError, first_of, refuse
from flower_fgl.core.model_spec import read_model
from flower_fgl.core.options import parse_settings
from flower_fgl.core.schema import TypedModel
from flower_fgl.core.target_scale import TargetScale
from flower_fgl.methods import METHODS
from flower_fgl.nn import MODELS, Backbone, build_model
from flower_fgl.nn.backbone import is_finite
from flower_fgl.nn.layers import RepNorm
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.model_file import (
    EDGE_SCALING,
    LARGEST,
    SCALING,
    TARGET_SCALE,
    ModelCard,
    read_card,
)

__all__ = ["SavedModel", "load_model"]


@dataclass(frozen=True, eq=False)
class SavedModel:
    """Content of a model file: the network in evaluation mode, and its description.

    ``scaling`` is mean and standard deviation (d,), float64, of the features;
    ``edge_scaling`` (a,) those of the features of classified edges; ``target_scale`` the
    scale of numbers; each if the file has it.
    """

    model: Backbone
    card: ModelCard
    scaling: tuple[Tensor, Tensor] | None
    edge_scaling: tuple[Tensor, Tensor] | None = None
    target_scale: TargetScale | None = None


def load_model(folder: Path) -> SavedModel:
    """Load the network of a model file, or of its folder, or raise a RunError."""
    folder = folder.parent if folder.name == MODEL else folder
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        what = (
            "is a file, but must be a folder" if folder.exists() else "does not exist"
        )
        raise RunError(f"The model folder {folder} {what}.")
    card = read_card(folder)
    if card is None:
        if inner := sorted(path.parent.name for path in folder.glob(f"*/{MODEL}")):
            raise RunError(
                f"{folder} holds folders of models. Pass one of them: {first_of(inner)}."
            )
        raise RunError(
            f"{folder} holds no {MODEL}. Pass the folder in which a data owner's "
            "SuperNode saved a model, or a run folder. No model is in the folder of a run "
            "whose method sends no weights, or whose owners have different parts of it "
            '(e.g. schema-align = "name").'
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
        if not all(map(is_finite, tensors.values())):
            raise RunError("its weights are not finite")
    except (FglError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunError(f"{folder / MODEL} cannot be used: {error}.") from error
    model.load_state_dict(tensors)
    return SavedModel(model.eval(), card, scaling, edge_scaling, target_scale)


def _statistics(
    card: ModelCard, tensors: dict[str, Tensor], names: tuple[str, str]
) -> tuple[Tensor, Tensor] | None:
    """Take a data owner's statistics of nodes or edges out of the tensors of a file."""
    found = [tensors.pop(name) for name in names if name in tensors]
    is_of_nodes, is_kept = names == SCALING, card.scaling == "kept"
    if not found and not (is_kept and is_of_nodes):
        return None
    width = card.num_features if is_of_nodes else len(found[0].flatten())
    text = (
        f"it describes {card.num_features} features with scaling {card.scaling!r}, "
        f"but its statistics of the features{'' if is_of_nodes else ' of edges'} do "
        "not fit that"
    )
    refuse({text: not is_kept or not _is_scale(found, width)}, RunError)
    return found[0], found[1]


def _target_scale(card: ModelCard, tensors: dict[str, Tensor]) -> TargetScale | None:
    """Take the scale of the numbers out of the tensors of a file, if it must have one."""
    found = [tensors.pop(name) for name in TARGET_SCALE if name in tensors]
    width, is_kept = card.target.width, card.target_scale == "kept"
    if not found and not is_kept:
        return TargetScale.identity(width) if card.target_scale == "none" else None
    text = (
        f"it describes {width} targets with the scale {card.target_scale!r}, but "
        "their mean and standard deviation do not fit that"
    )
    refuse({text: not is_kept or not _is_scale(found, width)}, RunError)
    return TargetScale(*found)


def _is_scale(found: Sequence[Tensor], width: int) -> bool:
    """Return whether tensors are means and positive deviations of a width."""
    return (
        [(t.dtype, tuple(t.shape)) for t in found] == [(torch.float64, (width,))] * 2
        and all(map(is_finite, found))
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
    found, expected = (
        {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
        for state in (tensors, model.state_dict())
    )
    if found != expected:
        own = f": {card.method} predicts with its own network, which the file does not "
        end = f"{own}describe" if found.keys() - expected.keys() else ""
        raise RunError(f"its weights do not match {card.model}{end}")


def _build(card: ModelCard, tensors: Mapping[str, Tensor]) -> Backbone:
    """Build the described network, without loading its weights."""
    outputs = card.target.width
    classes = torch.empty(outputs, dtype=torch.bool)
    typed = TypedModel.from_text(card.messages)
    if typed and len(typed.schema.relations) * card.num_layers > len(tensors):
        raise RunError("it holds fewer tensors than its relations have")
    if card.settings:
        return _build_own(card)
    if card.rep_norm:
        return _build_personal(card, tensors)
    if "means" in tensors:
        width = card.hidden_channels
        means = torch.empty(outputs, width)
        return FixedMeans(_build_backbone(card, num_outputs=width), means, classes)
    backbone = _build_backbone(card, num_outputs=outputs)
    if "support" not in tensors:
        return backbone
    width = backbone.hidden_channels  # clients may have different widths
    module = Adaptation.blank(width, outputs, torch.get_default_device())
    support = torch.empty(len(tensors["support"]), width)
    return AdaptedModel(backbone, module, support, classes)


def _build_backbone(card: ModelCard, *, num_outputs: int) -> Backbone:
    """Build the backbone without initialising its weights."""
    return build_model(
        card.model,
        in_channels=card.num_features,
        hidden_channels=card.hidden_channels,
        num_outputs=num_outputs,
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
    norm, outputs = cast(RepNorm, card.rep_norm), card.target.width
    if weight.dim() != 2 or not set(classes.flatten().tolist()) <= set(range(outputs)):
        raise RunError("its classifier does not fit its classes")
    classifier = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    classifier.to_empty(device=torch.get_default_device())
    return PersonalNet(encoder, classifier, classes, outputs, norm)


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
            num_outputs=card.target.width,
            width=card.hidden_channels,
            num_layers=card.num_layers,
            dropout=0.0,
            **readout,
        )
    return network
