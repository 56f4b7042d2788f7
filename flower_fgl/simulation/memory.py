"""Estimate the memory of a run before it starts, and refuse a run that cannot fit."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from flower_fgl.client_apps.dispatch import FEWEST_STACKED
from flower_fgl.client_apps.runtime.session import CACHE_BYTES, choose_device
from flower_fgl.client_apps.runtime.training import FIELD_SHARE
from flower_fgl.core.checks.rules import num_sampled
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.model_spec import read_model
from flower_fgl.datasets.store import ClientStore, GraphSizes, open_store
from flower_fgl.methods import METHODS, Method
from flower_fgl.nn import MODELS, assign_models, backbone_shapes

__all__ = ["available_memory", "estimate_memory", "graph_sizes", "has_stacked_form"]
__all__ += ["may_stack", "require_memory"]

GIB = 1 << 30
WORKER, RAY, FLOWER = int(0.3 * GIB), int(0.3 * GIB), int(0.6 * GIB)
"""Bytes of a worker process (torch and Flower imported), of Ray's processes, and of those
of Flower's simulation; measured by benchmarks/round_time.py, rounded down."""
SAMPLED = 32
"""Clients' files whose headers are read; the other clients are estimated from these."""
ACTIVATIONS = 3
"""Copies of each layer's output that a training step holds, at least."""
FLOAT = 4


def estimate_memory(
    config: RunConfig, *, engine: str, workers: int = 1, is_cluster: bool = False
) -> dict[str, int]:
    """Estimate the memory that a run needs beyond that of its first process, in bytes.

    The parts are ``worker processes``, ``graphs``, ``training`` (of the largest client),
    ``client states``, ``uploads`` of one round and ``stacked graphs``. Each is a lower
    bound, so that a run that fits is never refused. With the local engine 1 worker is no
    other process; with ``is_cluster`` only the server's part is here.

    Notes
    -----
    1. Methods with a network of their own (:attr:`Method.network`) are counted without
       client states and uploads. Every method may need more than is counted here.
    2. On a GPU, graphs, states and training are in its own memory and not counted.
    """
    store = open_store(config, config.clients)
    row = METHODS[config.method]
    is_ray = engine == "ray"
    number = min(workers, config.clients)
    has_workers = (is_ray or number > 1) and not is_cluster
    parts = {"worker processes": WORKER * number + RAY if has_workers else 0}
    if is_ray:
        parts["worker processes"] += FLOWER
    sizes, largest = graph_sizes(store)
    weights = _bytes_of_weights(config, store, largest)
    is_host = choose_device(config.device).type == "cpu"
    if not is_cluster:
        at_most = CACHE_BYTES * (1 if is_ray else number)
        # propagation operators, and sparse features as operators
        operators = 8 * (sizes.num_edges + sizes.num_nodes)
        operators += 8 * sizes.num_entries * sizes.is_sparse
        needed = sizes.num_bytes + operators * is_host
        parts["graphs"] = min(needed, at_most)
        if is_host:
            parts["training"] = _step_bytes(config, store, largest)
            if not is_ray or config.clients_per_node > 1:
                parts["stacked graphs"] = _stacked_bytes(config, sizes, largest)
    if row.network:
        return parts
    sampled = num_sampled(config, config.clients) / config.clients
    if is_host and not (is_ray or is_cluster):  # with Ray the states are files
        copies = 1
        if row.takes_batches and config.optimizer_state == "keep":
            copies += 2 * (config.optimizer != "sgd")
        share = 1 - float((1 - sampled) ** config.rounds)  # that any round samples
        parts["client states"] = int(copies * weights * share)
    if row.robust:  # uploads are weights
        parts["uploads"] = int(weights * sampled)
    return parts


def available_memory() -> int:
    """Return the bytes that this process can still use, within its control groups."""
    free = int(psutil.virtual_memory().available + psutil.swap_memory().free)
    return min([free, *_control_group_rooms(Path("/"))])


def require_memory(
    config: RunConfig, *, engine: str, workers: int = 1, is_cluster: bool = False
) -> None:
    """Refuse a run that cannot fit into the memory, with settings that need less."""
    needed = estimate_memory(
        config, engine=engine, workers=workers, is_cluster=is_cluster
    )
    total, free = sum(needed.values()), available_memory()
    if total <= free:
        return
    parts = sorted(needed.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)
    raise RunError(
        f"The run needs at least {total / GIB:.1f} GiB of memory ({shown}), and "
        f"{free / GIB:.1f} GiB are free. {_advice(needed, parts[0][0], engine)}"
    )


def _advice(needed: Mapping[str, int], largest: str, engine: str) -> str:
    """Return what reduces the largest part."""
    if largest == "worker processes":
        if engine == "ray":
            return "Use --engine local --workers 1, or fewer workers."
        return "Use fewer workers; --workers 1 starts none."
    advice = {
        "client states": "Use fewer clients, a smaller backbone (hidden-channels), or "
        'optimizer-state = "reset"',
        "uploads": "Use a smaller backbone (hidden-channels), or sample fewer clients "
        "per round (participation)",
        "graphs": "Use a machine with more memory",
        "training": "Use a smaller backbone (hidden-channels), or partition the graph "
        "among more clients",
        "stacked graphs": 'Use stacked = "false"',
    }[largest]
    has_processes = needed["worker processes"]
    return f"{advice}{', and --workers 1' if has_processes else ''}."


def graph_sizes(store: ClientStore) -> tuple[GraphSizes, GraphSizes]:
    """Return the sizes of all clients together, estimated, and of the largest one."""
    files = store.file_bytes()
    order = sorted(range(len(files)), key=lambda pid: -files[pid])
    read = [store.sizes(pid) for pid in order[:: math.ceil(len(order) / SAMPLED)]]
    scale = sum(files) / sum(one.num_bytes for one in read)

    def total(name: str) -> int:
        return int(scale * sum(getattr(one, name) for one in read))

    names = ["num_bytes", "num_nodes", "num_edges"]
    names += ["num_entries", "num_train_nodes", "num_train"]
    sums: dict[str, Any] = {name: total(name) for name in names}
    return replace(read[0], **sums), read[0]


def _shapes(
    config: RunConfig, store: ClientStore, sizes: GraphSizes, name: str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a backbone's state."""
    width = len(store.index.clients[0]["target"]["names"])
    return backbone_shapes(
        name,
        in_channels=sizes.num_features,
        hidden_channels=config.hidden_channels,
        num_outputs=width,
        num_layers=config.num_layers,
        readout=config.classifies_graphs,
        link=config.decoder(width, sizes.num_edge_features),
        messages=config.messages(name, sizes.num_edge_features, store.schema),
    )


def _bytes_of_weights(config: RunConfig, store: ClientStore, sizes: GraphSizes) -> int:
    """Return the bytes of one backbone for each client."""
    names = Counter(assign_models(config.model, config.clients))
    return sum(
        FLOAT
        * count
        * sum(math.prod(s) for s in _shapes(config, store, sizes, name).values())
        for name, count in names.items()
    )


def _step_bytes(config: RunConfig, store: ClientStore, sizes: GraphSizes) -> int:
    """Return the bytes of a training step's representations of the largest client."""
    name = assign_models(config.model, config.clients)[0]
    reads_part = sizes.num_train <= FIELD_SHARE * sizes.num_train_nodes
    reads_part &= not config.messages(name, 0, store.schema)
    if config.batch_size or reads_part or METHODS[config.method].network:
        return 0
    shapes = _shapes(config, store, sizes, name)
    if store.schema is not None:
        return _typed_step_bytes(config, sizes, name, shapes)
    width = sum(shape[0] for shape in shapes.values() if len(shape) == 2)
    # maps of the features of edges, see nn/message_passing.py; both directions of each edge
    of_edges = [s[0] for n, s in shapes.items() if ".edges" in n and len(s) == 2]
    numbers = width * sizes.num_train_nodes + 2 * sum(of_edges) * sizes.num_messages
    return ACTIVATIONS * FLOAT * numbers


def _typed_step_bytes(
    config: RunConfig,
    sizes: GraphSizes,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> int:
    """Return the same of a backbone of typed graphs: rows of nodes, and of messages."""
    backbone: Any = MODELS[read_model(name).name]
    layers = read_model(name).num_layers or config.num_layers
    # a mean for each node that messages reach, or a row for each message
    rows = sizes.num_messages if backbone.has_message_rows else sizes.num_train_nodes
    ways = 2 if config.reverse_relations else 1
    per_layer = ACTIVATIONS * sizes.num_train_nodes + ways * rows
    return FLOAT * layers * shapes["classifier.weight"][1] * per_layer


def _stacked_bytes(config: RunConfig, sizes: GraphSizes, largest: GraphSizes) -> int:
    """Return the bytes of the kept stacked graphs, 0 where clients are not stacked."""
    from flower_fgl.client_apps.stacked.grouping import LARGEST_STEP
    from flower_fgl.client_apps.stacked.handling import CACHE_BYTES as STACKED_BYTES

    rows = max(largest.num_train_nodes, largest.num_features) * config.hidden_channels
    is_worthwhile = config.clients >= FEWEST_STACKED and rows <= LARGEST_STEP
    if (config.stacked == "auto" and not is_worthwhile) or not may_stack(config):
        return 0
    kept = FLOAT * sizes.num_entries + 24 * sizes.num_edges
    return min(kept, STACKED_BYTES // 3)  # the limit counts three times the features


def has_stacked_form(row: Method) -> bool:
    """Return whether a method's client half declares a stacked form."""
    return bool(vars(row.load_client_app()).get("stacked"))


def may_stack(config: RunConfig) -> bool:
    """Return whether clients of a run may train as a stack."""
    from flower_fgl.client_apps.stacked.grouping import why_not_run

    is_allowed = config.stacked != "false" and not why_not_run(config, {})
    return is_allowed and has_stacked_form(METHODS[config.method])


def _control_group_rooms(root: Path) -> list[int]:
    """Return what each memory limit of this process's control groups leaves free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        is_first = controllers == "memory"
        top = root / "sys/fs/cgroup" / controllers
        # in a container the path may be that of the host, and its own files are at the top
        inner = top / path.lstrip("/")
        for folder in {top, *([inner, *inner.parents] if inner.is_dir() else [])}:
            if top == folder or top in folder.parents:
                room = _room(folder, is_first=is_first)
                rooms += [] if room is None else [room]
    return rooms


def _room(folder: Path, *, is_first: bool) -> int | None:
    """Return what a control group's limit leaves free, ``None`` without a limit."""
    prefix = "memory.limit_in_bytes" if is_first else "memory.max"
    usage = "memory.usage_in_bytes" if is_first else "memory.current"
    try:
        limit = int((folder / prefix).read_text())  # "max" is no number
        used = int((folder / usage).read_text())
        pairs = (
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
        stat = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return None
    start = "total_" if is_first else ""
    # pages of files, which the kernel drops first
    cached = stat.get(f"{start}inactive_file", 0) + stat.get(f"{start}active_file", 0)
    return max(limit - used + cached, 0) + int(psutil.swap_memory().free)
