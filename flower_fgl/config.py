"""Settings: Flower's flat run config to checked, frozen dataclasses.

Flower hands over a flat mapping of strings, numbers and booleans and checks no types.
Each setting is declared once, as a field made by :func:`option`; ``pyproject.toml`` and
the generated app folder repeat its default (a test compares them).

A general setting whose field says ``auto`` may be left to the method: its value in
``pyproject.toml`` is ``"auto"``, which stands for the method's own default (its paper's
value), else for the data set's, else for the general one. Which of them was taken is kept
in :attr:`RunConfig.sources`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from flower_fgl.errors import ConfigError
from flower_fgl.model_names import read_model, split_models
from flower_fgl.options import AUTO, Scalar, kebab, nearest, option, read_settings
from flower_fgl.setting_checks import UNSEEN_SETTINGS, check_few_shot, check_unseen

__all__ = [
    "AUTO",
    "DATASETS",
    "GRAPH_PARTITIONS",
    "MIN_SECURE_CLIENTS",
    "PARTITIONS",
    "GeneralSettings",
    "RunConfig",
    "Scalar",
    "SyntheticSettings",
    "is_file",
    "kebab",
    "nearest",
    "option",
    "pyproject_table",
    "read_settings",
]

DATASETS = [
    "synthetic",
    "cora",
    "citeseer",
    "pubmed",
    "cora-full",
    "cora-ml",
    "citeseer-full",
    "dblp",
    "computers",
    "photo",
    "cs",
    "physics",
    "flickr",
    "reddit",
    "reddit2",
    "ogbn-arxiv",
    "ogbn-products",
    "ogbn-papers100m",
    "mutag",
    "proteins",
    "nci1",
    "imdb-binary",
    "collab",
    "amazon-clothing",
    "dblp-few-shot",
    "fold-ppi",
]
"""Names of the sources in ``datasets/sources.py`` (a test compares them)."""

PARTITIONS = (
    "metis louvain louvain-label louvain-label-a metis-label dirichlet uniform network"
)
GRAPH_PARTITIONS = ("dirichlet", "uniform")
"""Rules that deal whole graphs (a test compares them)."""
MIN_SECURE_CLIENTS = 3
"""A sum of one is no secret, and in a sum of two each knows the other's part."""
DATASET_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = {"synthetic": {"rounds": 20}}


@dataclass(frozen=True)
class SyntheticSettings:
    """Settings of the ``synthetic`` data set, see ``datasets/synthetic.py``."""

    nodes: int = option(2000, "number of nodes", ge=2)
    classes: int = option(5, "number of classes", ge=2)
    features: int = option(64, "feature width", ge=1)
    degree: float = option(8.0, "expected number of neighbours of a node", ge=0)
    homophily: float = option(0.7, "share of edges inside a class", ge=0, le=1)
    feature_noise: float = option(
        5.0, "standard deviation of the features around their class mean", ge=0
    )
    blocks: int = option(20, "latent communities, each with its own classes", ge=1)
    block_skew: float = option(
        0.7, "0: every community has all classes alike; 1: one class only", ge=0, le=1
    )


@dataclass(frozen=True)
class GeneralSettings:
    """Settings that every method reads."""

    method: str = option("fedavg", "which method to run: flower-fgl methods lists them")
    dataset: str = option(
        "synthetic", "data set (flower-fgl datasets), tu:NAME, or a graph file's path"
    )
    clients: int = option(
        0, "clients to wait for; 0: as many as the federation has partitions", ge=0
    )
    data_dir: str = option(
        "", "folder of raw data; empty: FLOWER_FGL_DATA, else the user's cache folder"
    )
    partition: str = option("metis", "rule that cuts the graph", choices=PARTITIONS)
    partition_seed: int = option(42, "seed of partition and split", ge=0)
    dirichlet_alpha: float = option(0.5, "concentration of `dirichlet`", gt=0)
    split: str = option(
        "default", "train/val/test in percent of each class, `default` or `public`"
    )
    feature_sparsity: float = option(
        0.0, "share of features missing on nodes that do not train", ge=0, lt=1
    )
    edge_sparsity: float = option(
        0.0, "share of each client's edges missing", ge=0, lt=1
    )
    label_sparsity: float = option(
        0.0, "share of each client's training labels missing, by class", ge=0, lt=1
    )
    setting: str = option(
        "transductive",
        "what is known when; `graph` classifies whole graphs of a set",
        choices="transductive inductive closed-set open-set few-shot graph",
    )
    expansion_hops: int = option(
        0,
        "radius around a client in which `closed-set` and `open-set` score unseen nodes; "
        "0: the data set's",
        ge=0,
    )
    shots: int = option(3, "training nodes per class of `few-shot`", ge=1)
    model: str = option(
        "gcn",
        "backbone, or several (gcn,gin) dealt to the clients in turn; sizes of its own: "
        "gcn:3x512 is 3 layers, 512 wide; gcn:linear has a linear map for a head",
        auto=True,
    )
    hidden_channels: int = option(64, "width of the embedding", ge=1, auto=True)
    num_layers: int = option(2, "layers or propagation steps", ge=1, auto=True)
    dropout: float = option(0.5, "dropout probability", ge=0, lt=1, auto=True)
    rounds: int = option(100, "federated rounds", ge=1, auto=True)
    local_epochs: int = option(3, "epochs a client trains per round", ge=1, auto=True)
    check_every: int = option(
        0,
        "local epochs between checks on the validation nodes, the best weights of a "
        "round's training kept; 0: keep the last",
        ge=0,
        auto=True,
    )
    patience: int = option(
        0,
        "checks without a better one after which local training ends; 0: never",
        ge=0,
        auto=True,
    )
    batch_size: int = option(
        0, "training nodes (or graphs) per step; 0: all of them", ge=0, auto=True
    )
    optimizer: str = option(
        "adam", "client optimizer", choices="adam adamw sgd", auto=True
    )
    lr: float = option(0.01, "client learning rate", gt=0, auto=True)
    weight_decay: float = option(5e-4, "client weight decay", ge=0, auto=True)
    optimizer_state: str = option(
        "keep",
        "whether optimizer moments outlive a round",
        choices="keep reset",
        auto=True,
    )
    weight_by: str = option(
        "train-nodes",
        "what a client's model weighs in the average",
        choices="train-nodes nodes equal",
        auto=True,
    )
    participation: float = option(
        1.0, "share of clients that train in a round", gt=0, le=1, auto=True
    )
    min_replies: int = option(1, "usable replies below which a round fails", ge=1)
    round_timeout: float = option(600.0, "seconds to wait for the replies", gt=0)
    join_timeout: float = option(120.0, "seconds to wait for the clients", gt=0)
    max_message_mb: float = option(
        1000.0, "10⁶ bytes above which a client or the server drops a message", gt=0
    )
    evaluate: str = option(
        "local",
        "which model is scored on a client: its own, the aggregated one, or both",
        choices="local global both",
        auto=True,
    )
    evaluate_every: int = option(1, "rounds between evaluations", ge=1)
    eval_policy: str = option(
        "stale",
        "which own model a client scores in a round that it sat out: what it has, or a "
        "copy trained for final-local-epochs from the newest download",
        choices="stale refresh",
        auto=True,
    )
    final_local_epochs: int = option(
        5, "local epochs of that copy with eval-policy = refresh", ge=0, auto=True
    )
    absent_classes: str = option(
        "ignore",
        "what a class that is neither true nor predicted on a client adds to its macro "
        "means: nothing, or a zero",
        choices="ignore zero",
        auto=True,
    )
    share_class_counts: bool = option(
        True, "whether clients tell the server their training nodes per class"
    )
    min_class_count: int = option(
        1,
        "training nodes (or graphs) of a class below which a client tells nothing of it: "
        "no count, prototype or statistic",
        ge=1,
    )
    upload_clip: float = option(
        0.0,
        "L2 norm to which the numbers of an upload (of weights: their change) are clipped; "
        "0: as they are",
        ge=0,
    )
    upload_noise: float = option(
        0.0,
        "standard deviation of Gaussian noise on every upload, in units of upload-clip",
        ge=0,
    )
    upload_delta: float = option(
        1e-5, "δ for which the ε of the noise is reported", gt=0, lt=1
    )
    secure_aggregation: bool = option(
        False, "whether the server sees sums of the uploads only"
    )
    secure_threshold: float = option(
        0.66,
        "share of the asked clients that must stay for a sum to be opened",
        gt=0.5,
        le=1,
    )
    secure_fraction_bits: int = option(
        24, "numbers are summed in steps of 2 to the power of minus this", ge=1, le=40
    )
    seed: int = option(0, "seed of the run", ge=0)
    device: str = option("auto", "auto, cpu, or a torch device such as cuda:0")
    threads: int = option(1, "torch threads of one client", ge=1)
    output_dir: str = option("runs", "where run folders go")
    run_dir: str = option("", "this run's folder; empty: a new one in output-dir")
    state_dir: str = option(
        "", "where clients keep large state; empty: in Flower's context"
    )
    checkpoint_every: int = option(
        10, "rounds between checkpoints, from which a killed run goes on; 0: none", ge=0
    )
    keep_checkpoint: bool = option(
        False,
        "whether a completed run keeps a checkpoint of its last round, from which "
        "flower-fgl embeddings draws",
    )
    resume: bool = option(
        False, "whether to continue the interrupted run in run-dir from its checkpoint"
    )


@dataclass(frozen=True)
class RunConfig(GeneralSettings):
    """Everything one run is told.

    Parameters
    ----------
    synthetic : SyntheticSettings
        Settings of the synthetic data set.
    hyper : object or None
        Settings of the method (its ``config`` dataclass), ``None`` if it has none.
    sources : mapping of str to str
        Where each general value came from: ``user``, ``method``, ``data set`` or
        ``default``.
    """

    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)
    hyper: Any = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def classifies_graphs(self) -> bool:
        """Whether whole graphs are classified instead of nodes."""
        return self.setting == "graph"

    @property
    def has_unseen(self) -> bool:
        """Whether nodes are scored that the client did not have in training."""
        return self.setting in UNSEEN_SETTINGS

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Scalar],
        methods: Mapping[str, Any],
        *,
        datasets: Iterable[str] = DATASETS,
    ) -> RunConfig:
        """Read Flower's flat run config.

        Parameters
        ----------
        values : mapping of str to bool, int, float or str
            Flat keys: ``rounds``, ``fedprox.mu``, ``synthetic.nodes``; missing ones take
            their default.
        methods : mapping of str to Method
            The table of methods, each with ``settings`` (a dataclass or ``None``) and
            ``defaults`` (general settings it brings).
        datasets : iterable of str
            Names of known data sets.

        Returns
        -------
        RunConfig

        Raises
        ------
        ConfigError
            For an unknown method, data set or key, a wrong type or range.
        """
        general = {k: v for k, v in values.items() if "." not in k}
        tables: dict[str, dict[str, Scalar]] = {}
        for key, value in values.items():
            if "." in key:
                table, _, name = key.partition(".")
                tables.setdefault(table, {})[name] = value
        _check_names(general, tables, methods, datasets)
        method = methods[str(general.get("method", GeneralSettings.method))]
        general, sources = _fill(general, method.defaults)
        settings = {
            name: read_settings(entry.settings, tables.get(name, {}), prefix=name)
            for name, entry in methods.items()
            if entry.settings is not None
        }
        read = read_settings(GeneralSettings, general)
        _check_method(read, method)
        _check_graphs(read, method, methods)
        check_unseen(read)
        check_few_shot(read)
        _check_secure(read, method, methods)
        return cls(
            **vars(read),
            synthetic=read_settings(
                SyntheticSettings, tables.get("synthetic", {}), prefix="synthetic"
            ),
            hyper=settings.get(str(general.get("method", GeneralSettings.method))),
            sources=sources,
        )

    def flat(self) -> dict[str, Scalar]:
        """Return the flat run config that gives this configuration again."""
        out: dict[str, Scalar] = {
            kebab(f.name): getattr(self, f.name) for f in fields(GeneralSettings)
        }
        for table, settings in (
            ("synthetic", self.synthetic),
            (self.method, self.hyper),
        ):
            if is_dataclass(settings):
                out |= {
                    f"{table}.{kebab(f.name)}": getattr(settings, f.name)
                    for f in fields(settings)
                }
        return out


def is_file(dataset: str) -> bool:
    """Say whether ``dataset`` is a path rather than a source's name."""
    return any(mark in dataset for mark in ("/", "\\", ".npz"))


def _check_names(
    general: Mapping[str, Any],
    tables: Mapping[str, Any],
    methods: Mapping[str, Any],
    datasets: Iterable[str],
) -> None:
    """Refuse an unknown method, data set or table before anything else is read."""
    method = str(general.get("method", GeneralSettings.method))
    if method not in methods:
        raise ConfigError(f'Unknown method "{method}". {nearest(method, methods)}')
    dataset = str(general.get("dataset", GeneralSettings.dataset))
    is_known = dataset in set(datasets) or dataset.startswith("tu:")
    if not (is_known or is_file(dataset)):
        raise ConfigError(
            f'Unknown data set "{dataset}". {nearest(dataset, datasets)} '
            "A path to a graph file (.npz or a CSV folder) works as well."
        )
    known = {"synthetic", *(n for n, m in methods.items() if m.settings is not None)}
    for table in tables:
        if table not in known:
            raise ConfigError(f'Unknown settings "{table}.…". {nearest(table, known)}')


def _check_method(settings: GeneralSettings, method: Any) -> None:
    """Refuse what the chosen method cannot do."""
    if settings.evaluate != "local" and not method.has_global_model:
        raise ConfigError(
            f'{settings.method} has no aggregated model: evaluate = "'
            f'{settings.evaluate}" is not possible, use evaluate = "local".'
        )
    names = split_models(settings.model)
    if method.shares_embeddings:
        _refuse_widths(settings, names)
    if "," in settings.model and not method.mixes_models:
        raise ConfigError(
            f'model = "{settings.model}" gives the clients different backbones, which '
            f"{settings.method} cannot average. Use one name."
        )
    if method.is_one_shot and settings.rounds > 1:
        raise ConfigError(
            f"{settings.method} is one upload and one download: rounds must be 1, got "
            f"{settings.rounds}. Set rounds = 1, or leave it out."
        )
    if method.is_one_shot and settings.eval_policy == "refresh":
        raise ConfigError(
            f"{settings.method} has no round to catch up with: use eval-policy = "
            '"stale", or leave it out.'
        )
    if settings.upload_noise and not settings.upload_clip:
        raise ConfigError(
            f"upload-noise = {settings.upload_noise:g} says nothing without a bound on "
            "what a client uploads: set upload-clip."
        )
    if settings.clients and settings.min_replies > settings.clients:
        raise ConfigError(
            f"min-replies must be at most clients = {settings.clients}, "
            f"got {settings.min_replies}."
        )


def _refuse_widths(settings: GeneralSettings, names: Iterable[str]) -> None:
    """Refuse embeddings of different widths where they meet."""
    for name in names:
        width = read_model(name).hidden_channels
        if width not in (None, settings.hidden_channels):
            raise ConfigError(
                f'{settings.method} compares the clients\' embeddings, so model "{name}" '
                f"must be hidden-channels = {settings.hidden_channels} wide, got "
                f"{width}. Other methods, e.g. local, take any widths."
            )


def _check_secure(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Refuse secure aggregation where uploads are no summands, or too few."""
    if not settings.secure_aggregation:
        return
    if not method.additive:
        able = ", ".join(sorted(name for name, row in methods.items() if row.additive))
        raise ConfigError(
            f"{settings.method} needs more than the sum of its uploads: "
            f"secure-aggregation = true is not possible. These methods can: {able}."
        )
    asked = math.ceil(settings.participation * settings.clients - 1e-9)
    if settings.clients and asked < MIN_SECURE_CLIENTS:
        raise ConfigError(
            f"secure-aggregation needs {MIN_SECURE_CLIENTS} clients a round: one alone is "
            "no secret, and of two each knows the other's part. clients = "
            f"{settings.clients} and participation = {settings.participation:g} give "
            f"{asked}."
        )


def _check_graphs(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Refuse a method or a partition rule that cannot do with a set of graphs."""
    if settings.setting != "graph":
        return
    if not method.graphs:
        able = ", ".join(sorted(name for name, row in methods.items() if row.graphs))
        raise ConfigError(
            f'{settings.method} classifies nodes only: setting = "graph" is not '
            f"possible. These methods classify graphs: {able}."
        )
    if settings.partition not in GRAPH_PARTITIONS:
        names = '" or "'.join(GRAPH_PARTITIONS)
        raise ConfigError(
            f'partition = "{settings.partition}" cuts one graph, but setting = "graph" '
            f'deals whole graphs: use partition = "{names}".'
        )
    for name in ("feature_sparsity", "edge_sparsity", "label_sparsity"):
        if getattr(settings, name):
            raise ConfigError(
                f"{kebab(name)} takes away from the nodes of one graph, but setting = "
                f'"graph" classifies whole graphs: use {kebab(name)} = 0, got '
                f"{getattr(settings, name)}."
            )


def _fill(
    general: Mapping[str, Scalar], method_defaults: Mapping[str, Scalar]
) -> tuple[dict[str, Scalar], dict[str, str]]:
    """Resolve ``"auto"`` and say where each general value came from."""
    dataset = str(general.get("dataset", GeneralSettings.dataset))
    layers = [
        ("method", method_defaults),
        ("data set", DATASET_DEFAULTS.get(dataset, {})),
    ]
    filled = dict(general)
    sources = {}
    for f in fields(GeneralSettings):
        key = kebab(f.name)
        is_auto = f.metadata["auto"]
        given = general.get(key, AUTO if is_auto else f.default)
        if not (is_auto and given == AUTO):
            is_default = not is_auto and given == f.default
            sources[key] = "default" if is_default else "user"
            continue
        for source, defaults in layers:
            if key in defaults:
                filled[key] = defaults[key]
                sources[key] = source
                break
        else:
            filled[key] = getattr(GeneralSettings, f.name)
            sources[key] = "default"
    return filled, sources


def pyproject_table(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Build ``[tool.flwr.app.config]`` as ``pyproject.toml`` must hold it.

    Parameters
    ----------
    methods : mapping of str to Method
        The table of methods.

    Returns
    -------
    dict
        General keys first, then one table for each method with settings of its own.
    """
    table: dict[str, Any] = {
        kebab(f.name): AUTO if f.metadata["auto"] else f.default
        for f in fields(GeneralSettings)
    }
    table["synthetic"] = {kebab(f.name): f.default for f in fields(SyntheticSettings)}
    for name, method in sorted(methods.items()):
        if method.settings is not None:
            table[name] = {kebab(f.name): f.default for f in fields(method.settings)}
    return table
