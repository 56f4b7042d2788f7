"""Table of backbones by name, their construction, and any ``Module`` as a backbone."""

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import Table, described
from flower_fgl.core.model_spec import ModelName, read_model, split_models
from flower_fgl.nn.backbone import Backbone, Parts, copy_network
from flower_fgl.nn.decoupled import APPNP, GAMLP, SGC, SIGN, SSGC
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.message_passing import GAT, GCN, GCNII, GIN, GINE, MLP, GraphSAGE
from flower_fgl.nn.state import classifier_state, encoder_state, layer_of
from flower_fgl.nn.typed import RGCN, MeanRGCN, TypedGINE, TypedGraphSAGE

__all__ = ["MODELS", "Factory", "ModuleBackbone", "assign_models", "backbone_class"]
__all__ += ["backbone_shapes", "build_model", "hidden_names", "local_names"]
__all__ += ["num_parameters", "state_shapes"]


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

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
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
        return encoder, nn.Linear(self.hidden_channels, num_outputs)

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
    """Return the class for a row of another package: a backbone, or a :data:`Factory`."""
    if isinstance(thing, type) and issubclass(thing, Backbone):
        return thing
    if not callable(thing) or isinstance(thing, nn.Module):
        raise ConfigError(
            f'The backbone "{name}" must be a subclass of flower_fgl.nn.Backbone or a '
            f"function that makes a torch.nn.Module, got {type(thing).__name__}."
        )
    return type(name, (ModuleBackbone,), {"factory": staticmethod(thing), "name": name})


MODELS: Table[type[Backbone]] = Table(
    "backbones",
    {
        "appnp": APPNP,
        "gamlp": GAMLP,
        "gat": GAT,
        "gcn": GCN,
        "gcnii": GCNII,
        "gin": GIN,
        "gine": GINE,
        "graphsage": GraphSAGE,
        "mlp": MLP,
        "rgcn": RGCN,
        "rgcn-mean": MeanRGCN,
        "sgc": SGC,
        "sign": SIGN,
        "ssgc": SSGC,
        "typed-gine": TypedGINE,
        "typed-graphsage": TypedGraphSAGE,
    },
    backbone_class,
    is_light=False,
)
"""Backbones by name, the values of the setting ``model``; ours first."""


def build_model(
    name: str,
    *,
    in_channels: int,
    hidden_channels: int,
    num_outputs: int = 0,
    num_layers: int,
    dropout: float,
    readout: bool | str = False,
    has_linear_head: bool = False,
    initialise: bool = True,
    link: str = "",
    messages: str = "",
    num_classes: int = 0,
) -> Backbone:
    """Build a backbone in training mode, on the CPU, by its name.

    Arguments that are not listed here are those of :class:`Backbone`.

    Parameters
    ----------
    name : str
        One of ``MODELS``, optionally with sizes, which take precedence: ``"gcn"``,
        ``"gcn:3x512"``, see :mod:`flower_fgl.core.model_spec`. It can also request a linear
        head.
    initialise : bool
        Draw initial parameters from torch's global generator. Otherwise parameters are
        uninitialised memory: load a complete state before use. On ``torch.device("meta")``
        they take none, whatever the sizes are.
    link : {"", "dot", "mlp", "edge:CxA"}
        Decoder of pairs of nodes, see :func:`~flower_fgl.nn.link.make_decoder`; the
        embeddings are then as wide as the hidden layers, whatever ``num_outputs`` is.

    Raises
    ------
    ConfigError
        If the name is unknown or a size is out of range.

    Notes
    -----
    1. Clients build a model for every message, so it is constructed once per set of sizes
       and then copied. Layers initialise twice at construction: initial parameters
       therefore differ from those of a directly constructed class with the same seed.
    2. A backbone of another package is constructed each time.
    """
    spec = read_model(name)
    width = spec.hidden_channels or hidden_channels
    sizes: dict[str, Any] = {
        "in_channels": in_channels,
        "hidden_channels": width,
        "num_outputs": width if link else num_outputs or num_classes,
        "num_layers": spec.num_layers or num_layers,
        "dropout": dropout,
        "readout": readout,
        "has_linear_head": has_linear_head,
    }
    if spec.name not in MODELS.own:
        sizes |= {"link": link} if link else {}
        return _construct(spec, initialise=initialise, **sizes)
    sizes["has_linear_head"] |= spec.has_linear_head
    sizes |= {"steps": spec.steps, "link": link, "messages": messages}
    is_measured = torch.get_default_device().type == "meta"
    dtype = torch.get_default_dtype()
    template = _template(spec.name, tuple(sizes.items()), dtype, is_measured)
    model = copy_network(template, is_empty=True)
    if initialise:
        _reset_parameters(model)
    return model


def backbone_shapes(name: str, **sizes: Any) -> dict[str, tuple[int, ...]]:
    """Return the :func:`state_shapes` of a backbone without its memory.

    ``sizes`` and errors are those of :func:`build_model`. A backbone of another package is
    constructed with its memory.
    """
    is_own = read_model(name).name in MODELS.own
    with torch.device("meta") if is_own else contextlib.nullcontext():
        made = build_model(name, dropout=0.0, initialise=False, **sizes)
    return state_shapes(made)


def assign_models(names: str, num_clients: int) -> list[str]:
    """Assign backbones, such as ``"gcn,gin,gcn:2x128"``, to K clients in turn."""
    models = split_models(names)
    return [models[client % len(models)] for client in range(num_clients)]


def local_names(
    build: Callable[[int], nn.Module],
    in_channels: int,
    *,
    first_layer: bool,
    head: bool,
) -> frozenset[str]:
    """Return the tensors of a backbone that never leave an owner; the same for every d.

    With ``first_layer`` the layers that read the features stay local: those with a tensor
    whose shape depends on d. With ``head`` the classifier stays local.
    """
    shapes = state_shapes(build(in_channels))
    kept = set(classifier_state(shapes)) if head else set()
    if first_layer:
        wider = state_shapes(build(in_channels + 1))
        reading = {layer_of(name) for name in shapes if shapes[name] != wider[name]}
        kept |= {name for name in shapes if layer_of(name) in reading}
    return frozenset(kept)


def num_parameters(model: nn.Module) -> int:
    """Count the trainable parameters P of a model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def state_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model's state, by name, in its order.

    ``build_model(..., initialise=False)`` provides a model for this at no cost.
    """
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _construct(model: ModelName, *, initialise: bool, **sizes: Any) -> Backbone:
    """Construct a backbone of another package; weights are drawn only if wanted."""
    cls: Any = MODELS[model.name]
    expected = _shapes(cls, tuple(sizes.items()))
    made: Backbone
    if initialise:
        made = cls(**sizes)
    else:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            made = cls(**sizes)
    found = state_shapes(made)
    if list(found.items()) != list(expected.items()):
        changed = sorted(
            name
            for name in {*found, *expected}
            if found.get(name) != expected.get(name)
        )
        raise ConfigError(
            f"The backbone {described('backbones', model.name)} makes networks with other "
            f"weights each time: {', '.join(changed) or 'in another order'}. Names, shapes "
            "and order may depend only on in_channels, hidden_channels, num_layers and "
            "dropout, since the clients' weights are averaged."
        )
    return made


# Cache of what should be a pure function; a network is constructed once to find out.
@functools.lru_cache(maxsize=64)
def _shapes(
    cls: Callable[..., Backbone], sizes: tuple[tuple[str, Any], ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a backbone of another package."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        return state_shapes(cls(**dict(sizes)))


# Cache of a pure function; the templates hold shapes only (meta tensors), no values.
@functools.lru_cache(maxsize=64)
def _template(
    name: str,
    sizes: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,  # which the constructors read
    is_measured: bool,
) -> Backbone:
    """Construct a backbone without drawing from the global generator.

    If it ``is_measured`` only, buffers have no values either.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        # a network too large for the memory is only measured
        with torch.device("meta"):
            model = MODELS[name](**dict(sizes))
        if not is_measured and next(model.buffers(), None) is not None:
            model = MODELS[name](**dict(sizes))
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            # empty_like, on the device meta, loads torch's compiler: 0.5 s
            shape_only = torch.empty(
                parameter.shape, dtype=parameter.dtype, device="meta"
            )
            module.register_parameter(key, nn.Parameter(shape_only))
    return model


def _reset_parameters(module: nn.Module) -> None:
    """Initialise each layer once; a layer initialises its own submodules."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset_parameters(child)


@functools.lru_cache(maxsize=64)
def hidden_names(model: str, **sizes: Any) -> frozenset[str]:
    """Return the tensors of the encoder without its input layer.

    That is each module with a parameter whose shape depends on the number of features. In a
    GIN this is the first linear map, which could as well precede the first layer: it
    commutes with the sum over the neighbours.
    """
    narrow, wide = (
        encoder_state(backbone_shapes(model, in_channels=width, num_outputs=2, **sizes))
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
