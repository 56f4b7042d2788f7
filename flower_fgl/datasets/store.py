"""Store of partitioned datasets: one safetensors file per client, written once per machine.

Later processes open only the file of their client, and map large files into memory: they
share its pages, and only what is used is read. The index holds the SHA-256 of each file; a
file that does not match is rebuilt, with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file as map_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from flower_fgl.core.atomic import cache_folder, data_folder
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.extensions import known_names
from flower_fgl.core.schema import Schema
from flower_fgl.core.settings import is_file
from flower_fgl.core.targets import Target
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    Graph,
    MessageEdges,
    OutsideEdges,
    Scaling,
)
from flower_fgl.datasets.owners import (
    build_owners,
    file_contents,
    list_owners,
    owner_contents,
)
from flower_fgl.datasets.partition.partition import versions_of
from flower_fgl.datasets.sources.load import find_source, is_missing
from flower_fgl.datasets.suspect import suspect_data
from flower_fgl.datasets.transforms.canonical import SPARSE_BELOW
from flower_fgl.nn.sparse import narrow_csr

__all__ = ["ClientStore", "GraphSizes", "StoreIndex", "log_notes", "open_store"]

log = logging.getLogger(__name__)
NOTES = logging.getLogger("flower_fgl.datasets.suspect")
"""Logger of notes on suspect data, of which a grid logs each once."""
FORMAT = 4
"""Version of the files, and of the notes of :func:`suspect_data` in the index."""
READER = 4
"""Version of the checks of graph files; a store of an earlier version is built again."""
OF_DATA = """partition partition_seed dirichlet_alpha split split_by setting predicts target
target_node target_relation types schema_align feature_norm feature_sparsity edge_sparsity
label_sparsity graph_features max_degree expansion_hops shots link_features time_cuts
needs_cross_edges reads_messages reads_edge_features reads_types"""
"""Attributes of the configuration on which the content of a store depends."""
INDEX = "index.json"
MOST_OWNERS = 3
"""Owners whose notes a run logs."""
MAPPED_FROM = 1 << 20
"""Bytes of a client's file from which it is mapped into memory instead of read."""
STATISTICS = {
    "statistics": ("mean", "std"),
    "edge_statistics": ("edge mean", "edge std"),
}
"""Names of the tensors of a :class:`Scaling`."""
CSR = ("x/indptr", "x/indices", "x/values", "x/shape")
OUTSIDE = ("own", "other", "ids")
Stamp = tuple[int, int, int, int]


@dataclass(frozen=True)
class StoreIndex:
    """Facts about a store that need no client file.

    ``files`` are the SHA-256 of each client's file, ``num_edges`` counts the undirected
    edges of the complete graph. ``clients`` holds ``name``, ``target``, ``feature_names``,
    ``prepared`` and ``schema`` of each of the K natural owners, or once those of all
    clients. ``notes`` are those of :func:`suspect_data` on each client's data; none on the
    benchmark datasets of this package. ``warnings`` were logged when the clients were
    built.
    """

    partition_sha256: str
    files: list[str]
    num_edges: int
    clients: list[dict[str, Any]]
    notes: list[list[str]]
    warnings: list[str]

    @property
    def num_clients(self) -> int:
        """Number of clients K."""
        return len(self.files)


@dataclass(frozen=True)
class ClientStore:
    """A partitioned dataset in a folder, with the configuration for a rebuild."""

    folder: Path
    config: RunConfig
    index: StoreIndex

    @property
    def schema(self) -> Schema | None:
        """Kinds and relations of the first client's typed graph, else ``None``."""
        text = self.index.clients[0]["schema"]
        return Schema.from_text(text) if text else None

    def load(self, partition_id: int) -> ClientGraph:
        """Load one client's graph; rebuild the store if it is damaged."""
        data, index = self._read(partition_id), self.index
        if data is None:
            log.warning(
                "The stored graph of client %s in %s is damaged or missing and will be "
                "rebuilt.",
                partition_id,
                self.folder,
            )
            with _locked(self.folder):
                store = self._reread() or replace(
                    self, index=_write_store(self.folder, self.config, len(index.files))
                )
            data, index = store._read(partition_id), store.index
        if data is None:
            raise DataError(
                f"Cannot read {self.folder} after writing it. Check the disk."
            )
        about = index.clients[partition_id if len(index.clients) > 1 else 0]
        kind, names, units = (about["target"][k] for k in ("kind", "names", "units"))
        target = Target(kind, tuple(names), tuple(units))
        return replace(
            unpack_client(data, partition_id, target),
            feature_names=tuple(about["feature_names"]),
            name=about["name"],
            prepared=about["prepared"],
            schema=Schema.from_text(about["schema"]) if about["schema"] else None,
        )

    def log_notes(self) -> None:
        """Log warnings of the build, and the notes on suspect data.

        They stay on the machine of the data. A process in whose time the store was built
        has logged the warnings.
        """
        with contextlib.suppress(OSError):
            built = (self.folder / INDEX).stat().st_mtime
            if built < psutil.Process().create_time():
                for warning in self.index.warnings:
                    NOTES.warning("%s", warning)
        names = [about["name"] for about in self.index.clients]
        if names[0]:
            log_notes(dict(zip(names, self.index.notes, strict=True)))
        else:  # the clients hold parts of one dataset, with similar notes
            notes = {f"client {k}": found for k, found in enumerate(self.index.notes)}
            log_notes(notes, most=1, what="clients")

    def file_bytes(self) -> list[int]:
        """Return the bytes of each client's file; 0 for a missing one."""
        found = []
        for partition_id in range(self.index.num_clients):
            try:
                found.append((self.folder / _file_name(partition_id)).stat().st_size)
            except OSError:
                found.append(0)
        return found

    def sizes(self, partition_id: int) -> GraphSizes:
        """Read the sizes of a client's graphs, see :func:`graph_sizes`."""
        return graph_sizes(self.folder / _file_name(partition_id))

    def _reread(self) -> ClientStore | None:
        """Return the store if another process has rebuilt it meanwhile, else ``None``."""
        index = _read_index(self.folder, self.index.num_clients)
        if index is None:
            return None
        store = replace(self, index=index)
        complete = all(store._read(pid) is not None for pid in range(index.num_clients))
        return store if complete else None

    def _read(self, partition_id: int) -> dict[str, Tensor] | None:
        """Read a client's file; return ``None`` if its hash differs from the index."""
        path = self.folder / _file_name(partition_id)
        expected = self.index.files[partition_id]
        try:
            stamp = _stamp(path)
            if stamp[-1] >= MAPPED_FROM:
                if _digest(path, stamp) != expected:
                    return None
                tensors = map_safetensors(path)
                # another process may have replaced the file meanwhile
                return tensors if _stamp(path) == stamp else None
            data = path.read_bytes()
        except (OSError, SafetensorError):
            return None
        if hashlib.sha256(data).hexdigest() != expected:
            return None
        return dict(sorted(load_safetensors(data).items()))  # load shuffles them


def log_notes(
    notes: Mapping[str, Sequence[str]], *, most: int = MOST_OWNERS, what: str = "owners"
) -> None:
    """Log the notes of :func:`suspect_data`, by owner, on the machine of the data only.

    Those of the first ``most`` are logged; the others are counted, as ``what``.
    """
    noted = {name: found for name, found in notes.items() if found}
    for name in list(noted)[:most]:
        for note in noted[name]:
            NOTES.warning("%s: %s", name, note)
    if len(noted) > most:
        NOTES.warning("There are such notes on %s more %s.", len(noted) - most, what)


def open_store(config: RunConfig, num_clients: int) -> ClientStore:
    """Open the store of a configuration with K clients; build it if it does not exist."""
    if config.owners and num_clients != (found := len(list_owners(config))):
        raise ConfigError(
            f"owners holds {found} graphs, one client each, but the run has {num_clients} "
            f"clients. Remove clients, or set it to {found} (in Flower: num-supernodes)."
        )
    folder = cache_folder() / "clients" / _folder_name(config, num_clients)
    index = _read_index(folder, num_clients)
    if index is None:
        with _locked(folder):
            index = _read_index(folder, num_clients)  # of another process
            index = index or _write_store(folder, config, num_clients)
    return ClientStore(folder, config, index)


def obtain_data(configs: Iterable[RunConfig]) -> None:
    """Download what several runs lack, each dataset once; one error names all missing."""
    tried: set[tuple[str, str]] = set()
    missing = []
    for config in configs:
        sources: list[Path | str] = [config.dataset]
        if config.owners:
            sources = [owner.source for owner in list_owners(config)]
        names = {s for s in sources if isinstance(s, str) and not is_file(s)}
        new = {(name, config.data_dir) for name in names} - tried
        tried |= new
        data_dir, cache_dir = data_folder(config.data_dir), cache_folder()
        if not any(
            is_missing(name, data_dir=data_dir, cache_dir=cache_dir) for name, _ in new
        ):
            continue
        try:  # a store of an earlier run needs no files
            open_store(config, config.clients)
        except DataError as error:
            missing.append(str(error))
    if missing:
        raise DataError("\n".join(missing))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that one process at a time builds the store."""
    with _writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(f"{folder}.lock").acquire()
    with held:
        yield


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``DataError`` with advice."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"Cannot write the partition to {folder}: {error}. Free some disk space, or "
            "set FLOWER_FGL_CACHE to another folder."
        ) from error


def _stamp(path: Path) -> Stamp:
    """Return device, inode, time of change in nanoseconds, and bytes of a file."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4096)
def _digest(path: Path, stamp: Stamp) -> str:
    """Return the SHA-256 of a file; each process reads an unchanged file only once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_name(partition_id: int) -> str:
    return f"client-{partition_id:06d}.safetensors"


def _folder_name(config: RunConfig, num_clients: int) -> str:
    """Return a folder name with a hash of everything its content depends on."""
    key: dict[str, Any] = {name: getattr(config, name) for name in OF_DATA.split()}
    key |= {
        "versions": [FORMAT, READER, SPARSE_BELOW],
        "data_dir": str(data_folder(config.data_dir) or ""),
        "synthetic": asdict(config.synthetic),
    }
    path = Path(os.path.expanduser(config.dataset))
    if is_file(config.dataset):
        key["dataset"] = [path.name, file_contents(path)]
    else:
        key["dataset"] = [config.dataset, find_source(config.dataset).version]
    if config.owners:
        key["owners"] = owner_contents(config)
        key["align"] = [config.feature_align, config.has_local_heads]
        name, rule = config.data_name, "owners"
    else:
        key["clients"] = num_clients
        key["rule"] = versions_of(config.partition)
        name, rule = path.stem, config.partition
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name[:100])
    return f"{name}-{rule}-{num_clients}-{digest[:16]}"


def _read_index(folder: Path, num_clients: int) -> StoreIndex | None:
    """Read the index; return ``None`` if it is missing, damaged or of other clients."""
    path = folder / INDEX
    try:
        index = _parse_index(path, _stamp(path))
    except (OSError, ValueError, TypeError):
        return None
    return index if index.num_clients == num_clients else None


@lru_cache(maxsize=8)
def _parse_index(path: Path, stamp: Stamp) -> StoreIndex:
    """Parse an index; once, though every client of a process opens it."""
    digest, _, text = path.read_text("utf-8").partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError("damaged")
    return StoreIndex(**json.loads(text))


def _write_store(folder: Path, config: RunConfig, num_clients: int) -> StoreIndex:
    """Write all clients to a temporary folder, then rename it to the target."""
    with _kept_warnings() as warnings:
        if config.owners:
            clients, sha256, num_edges = build_owners(config)
        else:
            clients, sha256, num_edges = build_clients(config, num_clients)
    with _writing(folder):
        # temporary folders left by killed processes
        for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        scratch = Path(
            tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent)
        )
        try:
            own = _own_data(config, num_clients)
            classes = torch.unique(torch.cat([client.graph.y for client in clients]))
            # with local heads each client numbers its own classes
            held = [] if config.has_local_heads else classes[classes >= 0].tolist()
            notes = [
                suspect_data(client, held) if is_own else []
                for client, is_own in zip(clients, own, strict=True)
            ]
            index = _fill(scratch, clients, sha256, num_edges, notes, warnings)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return index


class _Keeper(logging.Handler):
    """Handler that keeps warnings; not those of loading, which concern files of a cache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a record."""
        if not record.name.startswith("flower_fgl.datasets.sources"):
            self.kept.append(record.getMessage())


@contextlib.contextmanager
def _kept_warnings() -> Iterator[list[str]]:
    """Collect the warnings on data while clients are built."""
    keeper, logger = _Keeper(), logging.getLogger("flower_fgl.datasets")
    logger.addHandler(keeper)
    try:
        yield keeper.kept
    finally:
        logger.removeHandler(keeper)


def _own_data(config: RunConfig, num_clients: int) -> list[bool]:
    """Return of each client whether its data are no benchmark of this package."""
    sources: list[Path | str] = [config.dataset] * num_clients
    if config.owners:
        sources = [owner.source for owner in list_owners(config)]
    return [
        isinstance(source, Path) or is_file(source) or source in known_names("datasets")
        for source in sources
    ]


def _fill(
    folder: Path,
    clients: Sequence[ClientGraph],
    sha256: str,
    num_edges: int,
    notes: list[list[str]],
    warnings: list[str],
) -> StoreIndex:
    """Write all clients' files and the index."""
    hashes = []
    for client in clients:
        data = pack_client(client)
        (folder / _file_name(client.partition_id)).write_bytes(data)
        hashes.append(hashlib.sha256(data).hexdigest())
    about = [
        {
            "name": client.name,
            "target": asdict(client.target),
            "feature_names": list(client.feature_names),
            "prepared": client.prepared,
            "schema": "" if client.schema is None else client.schema.to_text(),
        }
        for client in (clients if clients[0].name else clients[:1])
    ]
    index = StoreIndex(sha256, hashes, num_edges, about, notes, warnings)
    text = json.dumps(asdict(index))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / INDEX).write_text(f"{digest}\n{text}", "utf-8")
    return index


@dataclass(frozen=True)
class GraphSizes:
    """Sizes of a client's graphs, those for evaluation included.

    ``num_edges`` counts the entries of the adjacency matrix (2E), ``num_entries`` the
    stored features: N·d, or those that are not zero if ``is_sparse``. ``num_train_nodes``
    and ``num_train`` are the nodes of the training graph, and its training nodes (or
    graphs, or edges). ``num_messages`` counts the edges with direction.
    """

    num_bytes: int
    num_nodes: int
    num_edges: int
    num_features: int
    num_entries: int
    is_sparse: bool
    num_train_nodes: int
    num_train: int
    num_edge_features: int = 0
    num_messages: int = 0


def graph_sizes(path: Path) -> GraphSizes:
    """Read the sizes of a client's graphs without reading the graphs."""
    try:
        with safe_open(path, "pt") as file:
            shapes = {k: file.get_slice(k).get_shape() for k in file.keys()}  # noqa: SIM118 (not a dict)
            is_sparse = "0/x/shape" in shapes
            x = file.get_tensor("0/x/shape").tolist() if is_sparse else shapes["0/x"]
            num_train = int(file.get_tensor("0/mask/train").sum())
        num_bytes = path.stat().st_size
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error

    def total(name: str) -> int:
        return sum(math.prod(s) for k, s in shapes.items() if k.endswith(f"/{name}"))

    messages = shapes.get("0/message_x", (0, 0))
    entries = total("values") if is_sparse else total("x")
    nodes = total("indptr") if is_sparse else entries // max(x[1], 1)
    return GraphSizes(
        num_bytes, nodes, total("edge_index") // 2, x[1], entries, is_sparse, x[0],
        num_train, shapes.get("0/pair_x", messages)[1], messages[0],
    )  # fmt: skip


def pack_client(client: ClientGraph) -> bytes:
    """Serialize a client as safetensors."""
    tensors: dict[str, Tensor] = {"node_ids": client.node_ids}
    if client.scale == "rows":
        tensors["rows"] = torch.empty(0)
    for part, names in STATISTICS.items():
        if found := getattr(client.scaling, part, None):
            tensors |= dict(zip(names, found, strict=True))
    if client.outside is not None:
        # safetensors stores no views of one tensor
        ends = vars(client.outside).items()
        tensors |= {f"outside {name}": part.clone() for name, part in ends}
    for number, graph in enumerate(client.graphs):
        tensors |= {f"{number}/{k}": v for k, v in _graph_tensors(graph).items()}
    return save_safetensors({k: v.contiguous() for k, v in tensors.items()})


def _graph_tensors(graph: Graph) -> dict[str, Tensor]:
    """Return the tensors of a graph by their names in the file."""
    tensors = {k: part for k, part in vars(graph).items() if isinstance(part, Tensor)}
    if graph.x.layout == torch.sparse_csr:
        x = tensors.pop("x")
        parts = (x.crow_indices(), x.col_indices(), x.values(), torch.tensor(x.shape))
        tensors |= dict(zip(CSR, parts, strict=True))
    sent = vars(graph.messages) if graph.messages else {}
    for name, part in sent.items():
        if isinstance(part, Tensor):
            tensors[f"message_{name}"] = part
    return tensors | {f"mask/{name}": mask for name, mask in graph.masks.items()}


def unpack_client(
    tensors: dict[str, Tensor], partition_id: int, target: Target
) -> ClientGraph:
    """Build a client from the tensors of its file, see :func:`pack_client`."""
    node_ids = tensors.pop("node_ids")
    statistics = {
        part: (tensors.pop(mean), tensors.pop(std))
        for part, (mean, std) in STATISTICS.items()
        if mean in tensors
    }
    scaling = Scaling("columns", **statistics) if statistics else None
    if tensors.pop("rows", None) is not None:
        scaling = Scaling("rows")
    outside = None
    if "outside own" in tensors:
        outside = OutsideEdges(*(tensors.pop(f"outside {part}") for part in OUTSIDE))
    groups: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        groups.setdefault(int(number), {})[name] = tensor
    graph, *others = (_read_graph(groups[number]) for number in sorted(groups))
    return ClientGraph(
        partition_id, graph, target, node_ids, tuple(others), scaling, outside=outside
    )


def _read_graph(tensors: Mapping[str, Tensor]) -> Graph:
    """Build a graph from its tensors in the file, whose hash was checked."""
    parts: dict[str, Any] = {f.name: tensors.get(f.name) for f in fields(Graph)}
    if parts["x"] is None:
        start, column, value, shape = (tensors[name] for name in CSR)
        parts["x"] = narrow_csr(start, column, value, tuple(shape.tolist()))
    parts["masks"] = {k[5:]: t for k, t in tensors.items() if k.startswith("mask/")}
    sent: Any = {k[8:]: t for k, t in tensors.items() if k.startswith("message_")}
    parts["messages"] = MessageEdges(**sent) if sent else None
    return Graph(**parts)
