"""Add a method, a backbone or a dataset to the tables of this process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, one_line
from flower_fgl.core.extensions import adopt, register_row, registered
from flower_fgl.core.model_spec import split_models
from flower_fgl.core.targets import CLASSES, TargetKind
from flower_fgl.methods import METHODS, Method

__all__ = ["adopt_registered", "pack_registered", "refuse_registered", "register"]


def register(
    *,
    method: Method | None = None,
    backbone: Callable[..., Any] | None = None,
    dataset: Any = None,
    name: str = "",
    target_kind: TargetKind = CLASSES,
    target_node: str = "",
) -> str:
    """Add a method, a backbone or a dataset to this process, e.g. in a notebook.

    The local engine can use it, and so can its worker processes. Flower's simulation and
    SuperNodes start new processes, so they need a package with an entry point
    (``flower-fgl new``).

    Parameters
    ----------
    method : Method, optional
        Row of a method; ``strategy`` and ``client_app`` may be the classes themselves.
    backbone : type or callable, optional
        A subclass of :class:`flower_fgl.nn.Backbone`; or any function or class that makes
        a ``torch.nn.Module`` from the keywords ``in_channels``, ``hidden_channels``,
        ``num_layers`` and ``dropout``. The module maps ``x`` (N, in_channels) and
        ``edge_index`` (2, E) to embeddings (N, hidden_channels), as the models of
        ``torch_geometric.nn`` do; a linear classifier is added.
    dataset : torch_geometric.data.Data, HeteroData or Source, optional
        A graph to partition, as for :func:`flower_fgl.to_npz`, or a row of the table of
        datasets.
    name : str
        Value of the setting ``model`` or ``dataset``; a method has its own name.
    target_kind : {"classes", "labels", "numbers"}
        What ``y`` of a graph holds, see :func:`flower_fgl.to_npz`; a run of it has the
        same setting ``target-kind``.
    target_node : str
        Kind of the nodes to predict in a typed graph, by default the only one with ``y``.

    Returns
    -------
    str
        The name. A name that was registered before now means the new object.

    Raises
    ------
    ConfigError
        If not exactly one object is given, or its name is malformed, or taken by this
        package or an installed one.
    DataError
        If the graph is malformed.
    """
    given = [thing for thing in (method, backbone, dataset) if thing is not None]
    if len(given) != 1:
        raise ConfigError(
            "register needs exactly one of method, backbone and dataset, got "
            f"{len(given)}."
        )
    if method is not None:
        if not isinstance(method, Method):
            raise ConfigError(
                "register(method=…) needs a flower_fgl.methods.Method, got "
                f"{type(method).__name__}."
            )
        if name not in ("", method.name):
            raise ConfigError(f'The method is called "{method.name}", not "{name}".')
        register_row("methods", method.name, method, METHODS.own)
        return method.name
    if not name:
        raise ConfigError("register needs a name for a backbone or a dataset.")
    if backbone is not None:
        from flower_fgl.nn.models import MODELS, backbone_class

        backbone_class(name, backbone)  # reports what is no backbone
        register_row("backbones", name, backbone, MODELS.own)
        return name
    from flower_fgl.datasets.sources.registry import SOURCES

    row = _source(dataset, name, target_kind, target_node)
    register_row("datasets", name, row, SOURCES.own)
    return name


def _source(dataset: Any, name: str, target_kind: TargetKind, target_node: str) -> Any:
    """Return the row of a dataset; a graph is written to the cache folder."""
    from flower_fgl.core.atomic import cache_folder
    from flower_fgl.datasets.pyg_data import is_graph, store_graph
    from flower_fgl.datasets.pyg_typed import TypeNames
    from flower_fgl.datasets.sources.registry import Source, Statistics

    if isinstance(dataset, Source):
        return dataset
    if not is_graph(dataset):
        raise ConfigError(
            "register(dataset=…) needs a torch_geometric.data.Data, a HeteroData or a "
            f"Source, got {type(dataset).__name__}."
        )
    types = TypeNames(target=target_node)
    path = store_graph(dataset, cache_folder() / "graphs", target_kind, types)
    return Source(
        f"{name}, registered in a process",
        "node",
        "public" if _read_graph(path).masks else "20/40/40",
        Statistics(),
        loader=partial(_read_graph, path),
        version=path.stem,
    )


def _read_graph(path: Path) -> Any:
    """Read a registered graph; worker processes call this too."""
    from flower_fgl.datasets.graph_files.graph_file import load_graph_file

    return load_graph_file(path).dataset


def pack_registered(instead: str) -> bytes:
    """Return what this process registered for other processes, e.g. classes of a notebook.

    ``instead`` is the option that needs no other process.
    """
    rows = registered()
    if not rows:
        return b""
    from ray import cloudpickle

    for name, row in (pair for named in rows.values() for pair in named.items()):
        try:
            cloudpickle.dumps(row)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever the object's own state raises
            raise ConfigError(
                f'"{name}", registered in this process, cannot be sent to other processes: '
                f"{one_line(repr(error))}. Use {instead}, or put it into a package: "
                "flower-fgl new NAME writes one."
            ) from error
    return bytes(cloudpickle.dumps(rows))  # type: ignore[no-untyped-call]


def adopt_registered(packed: bytes) -> None:
    """Register here what :func:`pack_registered` returned in another process."""
    if packed:
        from ray import cloudpickle

        adopt(cloudpickle.loads(packed))


def refuse_registered(config: RunConfig) -> None:
    """Reject a run in new processes that uses what only this process has registered."""
    rows = registered()
    used = {
        "methods": [config.method],
        "backbones": [text.partition(":")[0] for text in split_models(config.model)],
        "datasets": [config.dataset],
    }
    for kind, names in used.items():
        for name in names:
            if name in rows.get(kind, {}):
                raise ConfigError(
                    f'"{name}" was registered in this process only, but Flower\'s '
                    "simulation starts new processes, which do not know it. Put it into a "
                    "package: flower-fgl new NAME writes one with its entry point. Or use "
                    "the local engine, with workers if you want several processes."
                )
