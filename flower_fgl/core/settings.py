"""The settings that do not belong to a method: their defaults, ranges and choices."""

from __future__ import annotations

from dataclasses import dataclass

from flower_fgl.core.options import option

__all__ = [
    "DATASETS",
    "GRAPH_PARTITIONS",
    "MIN_SECURE_CLIENTS",
    "PARTITIONS",
    "GeneralSettings",
    "SyntheticSettings",
    "is_file",
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
    min_clients: int = option(
        0,
        "clients with which the run begins when join-timeout is over, while the others "
        "may join between two rounds; 0: all of them must be there",
        ge=0,
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
    feature_norm: str = option(
        "default",
        "features: each node's divided by their absolute sum (rows), each feature "
        "standardised over the client's training nodes (columns), as given (none), or "
        "what the setting's paper does",
        choices="default none rows columns",
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
        1.0,
        "share of the clients able to train that a round asks, rounded up",
        gt=0,
        le=1,
        auto=True,
    )
    participants: int = option(
        0,
        "how many of them a round asks instead, all if they are fewer; 0: "
        "participation says",
        ge=0,
        auto=True,
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
    device: str = option("auto", "auto, cpu, cuda, or one GPU such as cuda:0")
    threads: int = option(1, "torch threads of one client", ge=1, le=1024)
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
        "flower-fgl embeddings draws FedPANO's nodes",
    )
    resume: bool = option(
        False, "whether to continue the interrupted run in run-dir from its checkpoint"
    )


def is_file(dataset: str) -> bool:
    """Say whether ``dataset`` is a path rather than a source's name."""
    return any(mark in dataset for mark in ("/", "\\", ".npz"))
