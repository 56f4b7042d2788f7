"""Settings of all methods and of the synthetic dataset: defaults, ranges, choices."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flower_fgl.core.extensions import known_names
from flower_fgl.core.model_spec import (
    MOST_CHANNELS,
    MOST_LAYERS,
    TYPED,
    message_direction,
    read_model,
    split_models,
)
from flower_fgl.core.options import option
from flower_fgl.core.targets import (
    CLASSES,
    EDGE,
    KINDS,
    LABELS,
    LINK,
    NUMBERS,
    TargetKind,
)

__all__ = ["ALL_TARGETS", "AUROC_DATASETS", "DATASETS", "EDGE_PARTITIONS"]
__all__ += ["GRAPH_PARTITIONS", "MIN_SECURE_CLIENTS", "NUMBER_DATASETS", "PARTITIONS"]
__all__ += ["SHARED_PARTITIONS", "TARGETS", "TRACKERS", "UNSEEN_SETTINGS"]
__all__ += ["UNSUPPORTED", "GeneralSettings", "SyntheticSettings", "Targets"]
__all__ += ["has_targets", "is_file", "listed_names", "main_score_of"]
__all__ += ["needs_classes", "owners_name", "read_given", "read_num_neighbors"]

DATASETS = [
    *("synthetic", "cora", "citeseer", "pubmed", "cora-full", "cora-ml"),
    *("citeseer-full", "dblp", "computers", "photo", "cs", "physics", "flickr"),
    *("reddit", "reddit2", "yelp", "actor", "chameleon", "squirrel"),
    *("chameleon-filtered", "squirrel-filtered", "cornell", "texas", "wisconsin"),
    *("roman-empire", "amazon-ratings", "minesweeper", "tolokers", "questions"),
    *("airports-usa", "airports-brazil", "airports-europe", "twitch-de", "twitch-en"),
    *("twitch-es", "twitch-fr", "twitch-pt", "twitch-ru", "lastfm-asia"),
    *("deezer-europe", "facebook-page-page", "wiki-cs", "ogbn-arxiv", "ogbn-products"),
    *("ogbn-papers100m", "ogbn-proteins", "ogbn-mag", "mutag", "proteins", "nci1"),
    "imdb-binary",
    *("collab", "ogbg-molhiv", "ogbg-molbace", "ogbg-molbbbp", "ogbg-molclintox"),
    *("ogbg-molmuv", "ogbg-molpcba", "ogbg-molsider", "ogbg-moltox21"),
    *("ogbg-moltoxcast", "ogbg-molesol", "ogbg-molfreesolv", "ogbg-mollipo"),
    *("ogbg-ppa", "amazon-clothing", "dblp-few-shot", "fold-ppi", "aifb"),
]
"""Names of the dataset sources in ``datasets/sources/load.py`` (a test compares them)."""


class Targets(NamedTuple):
    """Number T of targets to which an item may belong, and the name of one of them.

    If that is a number, the targets are 0 to T - 1; else the files name them.
    """

    number: int
    example: str


TARGETS: Mapping[str, Targets] = {
    "yelp": Targets(100, "37"),
    "ogbn-proteins": Targets(112, "0"),
    "ogbg-molclintox": Targets(2, "CT_TOX"),
    "ogbg-molmuv": Targets(17, "MUV-466"),
    "ogbg-molpcba": Targets(128, "PCBA-1030"),
    "ogbg-molsider": Targets(27, "Cardiac disorders"),
    "ogbg-moltox21": Targets(12, "NR-AR"),
    "ogbg-moltoxcast": Targets(617, "ACEA_T47D_80hr_Negative"),
}
"""Datasets of which the setting ``target`` chooses one label, or all."""
ALL_TARGETS = "all"
"""Value of ``target`` with which a run learns all labels of a dataset at once."""
AUROC_DATASETS = frozenset(
    [
        *("minesweeper", "tolokers", "questions"),
        *("ogbg-molhiv", "ogbg-molbace", "ogbg-molbbbp"),
        *TARGETS,
    ]
)
"""Datasets of two classes, one of them rare, whose papers report the area under the ROC
curve (Platonov et al., ICLR 2023; Hu et al., NeurIPS 2020), and one target of several."""
NUMBER_DATASETS = frozenset(["ogbg-molesol", "ogbg-molfreesolv", "ogbg-mollipo"])
"""Datasets whose targets are numbers."""
UNSUPPORTED = {
    "ogbg-code2": "the label is a sequence of words",
    "ogbg-molchembl": "every graph has 1,310 labels at once, which need 5 GB to read",
}
"""Known datasets that cannot be used, and the reason."""

PARTITIONS = (
    "metis louvain louvain-label louvain-label-a metis-label dirichlet uniform quantile "
    "network random-edges random-edge-types"
)
GRAPH_PARTITIONS = ("dirichlet", "uniform", "quantile")
"""Rules that assign whole graphs to clients (a test compares them)."""
EDGE_PARTITIONS = ("metis", "louvain", "uniform")
"""Rules that read no classes of nodes."""
SHARED_PARTITIONS = ("random-edges", "random-edge-types")
"""Rules for the edges of a typed graph, by which clients share nodes."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Experiment trackers in ``runs/trackers.py`` (an assertion compares them)."""
UNSEEN_SETTINGS = ("closed-set", "open-set")
"""Values of ``setting`` that score nodes which clients do not have in training."""
MIN_SECURE_CLIENTS = 3
"""With one or two clients the sum reveals individual updates."""


@dataclass(frozen=True)
class SyntheticSettings:
    """Settings of the ``synthetic`` dataset, see ``datasets/sources/synthetic.py``."""

    nodes: int = option(2000, "number of nodes", ge=2, le=10**9)
    classes: int = option(5, "number of classes", ge=2, le=10_000)
    features: int = option(64, "number of features of a node", ge=1, le=10_000_000)
    degree: float = option(8.0, "expected number of neighbours of a node", ge=0)
    homophily: float = option(0.7, ge=0, le=1)
    """share of edges that join two nodes of the same class"""
    feature_noise: float = option(5.0, ge=0)
    """standard deviation of the features around the mean of their class"""
    blocks: int = option(20, ge=1)
    """number of latent communities, each with its own class distribution"""
    block_skew: float = option(0.7, ge=0, le=1)
    """class skew of a community; 0: the same class distribution everywhere, 1: a single
    class per community"""


@dataclass(frozen=True)
class GeneralSettings:
    """Settings that all methods share."""

    method: str = option("fedavg")
    """federated learning method; `flower-fgl methods` lists all names"""
    dataset: str = option("synthetic")
    """dataset name (`flower-fgl datasets` lists them), `tu:NAME` for a TUDataset,
    `twitch:NAME` for a country of Twitch, or the path of a graph file"""
    owners: str = option("", keeps_commas=True)
    """natural owners instead of the partitions of a dataset: a folder of graph files, or a
    comma-separated list of datasets and graph files, one client each; empty: partition the
    dataset (docs/owners.md)"""
    without_owners: str = option("", keeps_commas=True)
    """names of owners that take no part, separated by commas: the run is as if they had
    never been there"""
    target: str = option("", keeps_commas=True, may_be_number=True)
    """name of the one label that is predicted, of a dataset whose nodes or graphs may have
    several at once: classes are "no <target>" and "<target>"; all: every label at once; of
    numbers, the one that is predicted, all and empty: every one; empty: the dataset has one
    label (docs/data.md)"""
    target_kind: str = option("auto", choices="auto classes labels numbers")
    """what is predicted; classes: one class of each item, labels: any of several labels,
    numbers: one or several numbers, auto: what the dataset holds, or most of the graph
    files (docs/numbers.md)"""
    feature_align: str = option("name", choices="name project")
    """how the features of owners become one input; name: all have the same features, found
    by name, project: widths may differ, and the first layer of each owner stays local"""
    class_align: str = option("default", choices="default name local")
    """how the classes of owners become one output; name: classes of the same name are one
    class, local: each owner has its own classes, and its head stays local, default: name,
    but local for sets of graphs of different datasets"""
    clients: int = option(0, ge=0)
    """number of clients in the federation; 0: the number of partitions of the Flower
    federation, or of owners"""
    clients_per_node: int = option(1, ge=1)
    """clients that a node of Flower's simulation, or a SuperNode, hosts at most: it trains
    them together, and their messages travel as one; clients must be set. The local engine
    hosts all clients in any case"""
    min_clients: int = option(0, ge=0)
    """number of clients with which the run starts once join-timeout is over; later clients
    may join between rounds; 0: all clients must be connected"""
    data_dir: str = option("", keeps_commas=True, is_path=True)
    """folder of the raw datasets; empty: the environment variable FLOWER_FGL_DATA, or else
    the user's cache folder"""
    partition: str = option("metis", choices=PARTITIONS, auto=True)
    """rule that partitions the dataset among the clients; auto: metis, and uniform for a
    set of graphs"""
    partition_seed: int = option(42, ge=0)
    """random seed of the partition and of the train/val/test split"""
    dirichlet_alpha: float = option(0.5, gt=0)
    """concentration parameter of partition = dirichlet; smaller values give more skewed
    label distributions"""
    split: str = option("default")
    """train/val/test shares in percent per class, e.g. 20/40/40; `default`: those of the
    setting and dataset; `public`: the dataset's published split"""
    split_by: str = option("auto", choices="auto random id inchikey skeleton")
    """what decides the part of the split that an item falls into; random: a shuffle per
    client, id: a hash of the identifier, the same for all owners, inchikey, skeleton: a
    hash of the molecule's InChIKey, or of its first 14 characters; auto: skeleton for
    SMILES, id for an owner's set of graphs with ids, else random"""
    graph_features: str = option("given", choices="given degree")
    """features of nodes in a set of graphs; given: those of the set, degree: the number of
    neighbours, as one of max-degree + 2 columns"""
    max_degree: int = option(64, ge=1, le=10_000)
    """largest degree with a column of its own"""
    feature_norm: str = option("default", choices="default none rows columns")
    """feature scaling; rows: divide each node's features by their absolute sum, columns:
    standardise each feature over the client's training nodes (features of edges over its
    training edges), none: unchanged, default: as in the paper of the setting"""
    feature_sparsity: float = option(0.0, ge=0, lt=1)
    """share of features hidden on nodes outside the training set"""
    edge_sparsity: float = option(0.0, ge=0, lt=1)
    """share of each client's edges that is removed"""
    label_sparsity: float = option(0.0, ge=0, lt=1)
    """share of each client's training labels that is removed, per class"""
    setting: str = option(
        "transductive",
        choices="transductive inductive closed-set open-set few-shot graph link edge",
    )
    """task and what clients know while they train; `graph` classifies whole graphs, `link`
    predicts edges, `edge` classifies edges, all others classify nodes (docs/settings.md)"""
    link_decoder: str = option("dot", choices="dot mlp")
    """score of a pair of nodes in link prediction; dot: the dot product of their
    embeddings, mlp: two layers on the product of the embeddings (docs/links.md)"""
    link_features: str = option("default", choices="default given degree")
    """features in link prediction; given: those of the graph, degree: the degree over
    training edges, default: degree for a graph without features, else given"""
    link_k: int = option(10, ge=1)
    """K of Hits@K: an edge counts if its rank among the negatives is at most K"""
    time_cuts: str = option("", keeps_commas=True)
    """times of edges at which validation and test begin, the same for all clients
    (400,500), if the edges have times; empty: each client's own, by `split`
    (docs/links.md)"""
    class_weights: str = option("none", choices="none balanced")
    """weights of the classes in the cross-entropy; balanced: inversely proportional to the
    number of training items of the class on the client"""
    positive_class: str = option("", keeps_commas=True, may_be_number=True)
    """name of the class that is sought, usually a rare one; adds AUPRC, Precision@K and
    scores at a threshold chosen on validation; empty: none, or target"""
    precision_k: int = option(20, ge=1)
    """K of Precision@K: share of the positive class among the K items with the highest
    score"""
    target_scale: str = option("shared", choices="shared given own none")
    """scale that standardises the numbers to predict; shared: mean and standard deviation
    of the training values of all clients, given: target-mean and target-std, own: each
    client's own (no global model then predicts in their units), none: unchanged
    (docs/numbers.md)"""
    target_mean: str = option("", keeps_commas=True, holds_numbers=True)
    """with target-scale = given, the mean of the target in its unit (-3.1); of several
    targets each with its name, separated by commas (weight=1000,length=3)"""
    target_std: str = option("", keeps_commas=True, holds_numbers=True)
    """with target-scale = given, the standard deviation of each target, as target-mean"""
    loss: str = option("mse", choices="mse huber mae")
    """loss of the standardised numbers; mse: squared error, mae: absolute error, huber:
    squared up to huber-delta and linear beyond"""
    huber_delta: float = option(1.0, gt=0)
    """error, in standard deviations, from which loss = huber is linear"""
    target_weight: str = option("entries", choices="entries targets")
    """what counts equally in the loss of several numbers; entries: every known number,
    targets: every target, however many of its numbers are known"""
    expansion_hops: int = option(0, ge=0)
    """radius in hops around a client within which closed-set and open-set score unseen
    nodes; 0: the dataset's own value (Cora 2, CiteSeer 3, others 1)"""
    shots: int = option(3, "training nodes per class in the few-shot setting", ge=1)
    model: str = option("gcn", auto=True, keeps_commas=True)
    """backbone, or a comma-separated list assigned to the clients in turn (gcn,gin); sizes
    may follow the name: gcn:3x512 has 3 layers of width 512, gcn:linear has a linear
    classifier"""
    hidden_channels: int = option(64, ge=1, le=MOST_CHANNELS, auto=True)
    """width of the hidden layers and of the embedding"""
    num_layers: int = option(2, ge=1, le=MOST_LAYERS, auto=True)
    """number of layers or propagation steps"""
    dropout: float = option(0.5, "dropout probability", ge=0, lt=1, auto=True)
    readout: str = option("default", choices="default sum mean")
    """how the nodes of a graph become its embedding with setting = graph; sum: grows with
    the graph, mean: does not, default: sum for gin, gine and FedStar, else mean"""
    initial_model: str = option("", keeps_commas=True, is_path=True)
    """folder of a run, or of a saved model, from whose weights the server starts; empty:
    from random weights"""
    rounds: int = option(100, "number of federated rounds", ge=1, auto=True)
    round_patience: int = option(0, ge=0)
    """number of evaluated rounds without a better validation score after which the run
    ends; 0: all rounds run"""
    local_epochs: int = option(3, ge=1, auto=True)
    """epochs that a sampled client trains per round"""
    check_every: int = option(0, ge=0, auto=True)
    """local epochs between two evaluations on the validation nodes; training keeps the best
    weights of the round; 0: no check, training keeps the last weights"""
    patience: int = option(0, ge=0, auto=True)
    """number of checks without improvement after which local training stops; 0: never stop
    early"""
    batch_size: int = option(0, ge=0, auto=True)
    """training nodes (or graphs) per optimizer step; 0: all of them (full batch)"""
    edge_direction: str = option("default", choices="default both separate forward")
    """how gcn, gine and graphsage pass messages along directed edges; both: each edge both
    ways, separate: both ways with weights of their own, forward: from source to target
    only, default: separate for gine with setting = "edge", else both"""
    types: str = option("use", choices="use ignore")
    """what to do with the kinds of nodes and the relations of a typed graph; use: they need
    a model that reads them, ignore: one plain graph of all nodes and edges"""
    target_node: str = option("")
    """kind of the nodes to predict in a typed graph; empty: the only kind with labels. In a
    set of typed graphs the kind whose nodes are pooled; empty: all"""
    target_relation: str = option("")
    """relation of a typed graph whose links or edges are predicted: its name, or
    SOURCE:NAME:TARGET; empty: the only one, of edges the only one with labels"""
    schema_align: str = option("same", choices="same name private", auto=True)
    """how data owners agree on kinds and relations; same: all have the same, name: compared
    by name, what an owner lacks is averaged among those that have it, private: nothing is
    told, and what belongs to one kind or relation stays local"""
    num_bases: int = option(8, ge=0)
    """bases of the weights of relations in rgcn and rgcn-mean; 0: each relation of rgcn has
    a matrix of its own"""
    node_embedding: bool = option(False)
    """whether each node of a typed graph has a learned vector of its own, which never
    leaves the client; the model can then score no other graph"""
    reverse_relations: bool = option(True)
    """whether backbones of typed graphs pass messages backwards along each relation, too,
    with weights of their own"""
    num_neighbors: str = option("", keeps_commas=True)
    """most neighbors per node that a batch reads in each layer, those of the last layer
    first (10,10), drawn anew in each step; needs batch-size; empty: all neighbors"""
    optimizer: str = option("adam", choices="adam adamw sgd", auto=True)
    """optimizer of the clients"""
    lr: float = option(0.01, "learning rate of the clients", gt=0, auto=True)
    weight_decay: float = option(5e-4, "weight decay of the clients", ge=0, auto=True)
    clip_gradient: float = option(0.0, ge=0)
    """largest L2 norm of the gradient of a client's optimizer step, to which a larger one
    is scaled; 0: no clipping"""
    optimizer_state: str = option("keep", choices="keep reset", auto=True)
    """whether a client keeps its optimizer's moments between rounds"""
    weight_by: str = option(
        "train-nodes", choices="train-nodes nodes entries equal", auto=True
    )
    """weight of a client's model in the average: its number of training nodes, its number
    of nodes, its number of known training labels or numbers (entries), or equal"""
    aggregation: str = option("mean", choices="mean median trimmed-mean krum norm-clip")
    """how the server combines the clients' weights; all but mean limit what a few malicious
    clients can do (docs/robust-aggregation.md)"""
    trimmed_share: float = option(0.2, gt=0, lt=0.5)
    """share of the largest, and of the smallest, values of each weight that trimmed-mean
    drops, rounded up"""
    krum_attackers: int = option(1, ge=1)
    """number f of malicious clients that krum assumes; a round needs 2·f + 3 uploads"""
    krum_keep: int = option(0, ge=0)
    """number of uploads that krum averages, at most n − f − 2 of n; 1: Krum, 0: n − f − 2
    (Multi-Krum)"""
    norm_bound: float = option(0.0, ge=0)
    """L2 norm to which norm-clip shortens each client's change of the weights; 0: the
    median of the norms in the round"""
    server_optimizer: str = option("none", choices="none momentum adam yogi adagrad")
    """what the server does with the mean of the clients' weights; none: it is the new
    global model, else the mean change is a gradient for FedAvgM (momentum), FedAdam,
    FedYogi or FedAdagrad"""
    server_lr: float = option(0.0, ge=0)
    """step size η of the server optimizer; 0: 1 with momentum, 0.1 with adam and adagrad,
    0.01 with yogi"""
    server_momentum: float = option(0.9, ge=0, lt=1)
    """decay β1 of the mean change of the weights"""
    server_beta2: float = option(0.99, ge=0, lt=1)
    """decay β2 of the squared mean change"""
    server_tau: float = option(1e-3, gt=0)
    """adaptivity τ, added to the root of the squared change"""
    server_moments: str = option("paper", choices="paper flower")
    """paper: the squared change starts at τ² and no bias is corrected; flower: it starts at
    0, and FedAdam's step has the factor of Flower"""
    participation: float = option(1.0, gt=0, le=1, auto=True)
    """share of the trainable clients that a round samples, rounded up; 1: all"""
    participants: int = option(0, ge=0, auto=True)
    """number of trainable clients that a round samples (all, if there are fewer); 0: use
    participation instead"""
    min_replies: int = option(1, ge=1)
    """minimum number of usable replies; a round with fewer fails"""
    round_timeout: float = option(600.0, gt=0)
    """seconds that the server waits for the replies of a round"""
    join_timeout: float = option(120.0, gt=0)
    """seconds that the server waits for clients before round 1"""
    max_message_mb: float = option(1000.0, gt=0)
    """largest accepted message in megabytes (10⁶ bytes); clients and server drop larger
    ones"""
    evaluate: str = option("local", choices="local global both mixed", auto=True)
    """models that are evaluated on each client: its personalized model (local), the global
    model (global), or both; mixed: its download of the next round, before it trains, with
    methods that mix a model for each client"""
    evaluate_every: int = option(1, "number of rounds between two evaluations", ge=1)
    eval_policy: str = option("stale", choices="stale refresh refresh-all", auto=True)
    """personalized model that a client not sampled in the round is evaluated with; stale:
    the last one it trained, refresh: a copy of the newest download, trained for
    final-local-epochs; refresh-all: such a copy for all clients"""
    final_local_epochs: int = option(5, ge=0, auto=True)
    """local epochs of the copy that eval-policy = refresh and refresh-all train"""
    absent_classes: str = option("ignore", choices="ignore zero", auto=True)
    """contribution to the macro means of a class that is neither a label nor a prediction
    on the client; ignore: none, zero: a score of 0"""
    calibration: str = option("none", choices="none owner shared")
    """whether validation items calibrate probabilities and give conformal sets or
    intervals; owner: those of each client, for its personalized model, shared: sums over
    all clients, for the aggregated model (docs/acting-on-scores.md)"""
    calibrator: str = option("temperature", choices="temperature isotonic")
    """what calibrates probabilities; temperature: one number, which changes no predicted
    class, isotonic: in addition an increasing map of each class, from half of the items
    (calibration = "owner")"""
    coverage: float = option(0.9, gt=0, lt=1)
    """share of the items whose conformal set, or interval of a number, is to hold the
    truth"""
    conformal_score: str = option("aps", choices="lac aps raps daps scaled")
    """score of conformal sets of classes; lac: smallest sets, aps: larger ones for
    uncertain items, raps: aps with a penalty on many classes, daps: aps of nodes, mixed
    with the neighbours' mean (calibration = "owner"). Of numbers, scaled: intervals are
    wide where errors are large (calibration = "owner")"""
    share_class_counts: bool = option(True)
    """whether clients report their number of training nodes per class to the server"""
    share_target_statistics: bool = option(True)
    """whether clients report number, mean and spread of their training values of each
    target, which target-scale = shared needs"""
    share_feature_names: bool = option(False)
    """whether clients report the names of their features, by which columns are put into one
    order; false: only a hash of the names, and clients with another hash are rejected"""
    min_class_count: int = option(1, ge=1, auto=True)
    """smallest number of training nodes (or graphs) of a class for which a client uploads
    anything about the class (count, prototype or statistic)"""
    min_target_count: int = option(5, ge=1)
    """smallest number of known training values of a target for which a client reports their
    mean and spread"""
    upload_clip: float = option(0.0, ge=0)
    """L2 norm to which each upload is clipped (for weights: their change in the round); 0:
    no clipping"""
    upload_noise: float = option(0.0, ge=0)
    """standard deviation of the Gaussian noise added to every upload, as a multiple of
    upload-clip; 0: no noise"""
    upload_noise_model: str = option("local", choices="local distributed")
    """who adds the noise; local: each client all of it, so that no one needs to be trusted,
    distributed: each client a share, so that the sum of secure aggregation has it once"""
    upload_delta: float = option(1e-5, gt=0, lt=1)
    """δ of differential privacy for which ε is reported"""
    secure_aggregation: bool = option(False)
    """whether uploads are masked so that the server only sees their sum (Bonawitz et al.,
    CCS 2017)"""
    secure_threshold: float = option(0.67, gt=0.5, le=1)
    """share of the sampled clients that must stay until the end of a round for its sum to
    be unmasked; above 2/3"""
    secure_fraction_bits: int = option(24, ge=1, le=40)
    """fractional bits of the fixed-point numbers that secure aggregation sums; the step is
    2^-bits"""
    seed: int = option(0, "random seed of the run", ge=0)
    device: str = option("auto")
    """device of the clients, and of O-pFGL's server: auto (a GPU if there is one), cpu,
    cuda, or one GPU such as cuda:0"""
    threads: int = option(1, "number of PyTorch threads per client", ge=1, le=1024)
    stacked: str = option("auto", choices="auto true false")
    """whether clients in one process train together, as one stack of graphs and weights
    (local engine; equal to one by one up to rounding); auto: where it is faster, true:
    refuse a run that cannot be stacked, false: one by one"""
    output_dir: str = option("runs", keeps_commas=True, is_path=True)
    """folder in which run folders are created"""
    run_dir: str = option("", keeps_commas=True, is_path=True)
    """folder of this run; empty: a new folder in output-dir"""
    state_dir: str = option("", keeps_commas=True, is_path=True)
    """folder in which clients keep large state between rounds; empty: in Flower's
    context"""
    checkpoint_every: int = option(10, ge=0)
    """rounds between two checkpoints, from which an interrupted run can resume; 0: no
    checkpoints"""
    keep_checkpoint: bool = option(False)
    """whether a completed run keeps a checkpoint of its last round, which more rounds
    (`--resume RUN --rounds N`) and `flower-fgl embeddings` of FedPANO need"""
    keep_client_models: bool = option(False)
    """whether a simulation keeps each client's best model in the folder clients of the run,
    for `flower-fgl predict`; SuperNodes keep theirs in model-dir"""
    track: str = option("", keeps_commas=True)
    """experiment trackers that get the scores of every round: tensorboard, mlflow, wandb,
    or several of them separated by commas; empty: none"""
    resume: bool = option(False)
    """whether to resume the interrupted run in run-dir from its last checkpoint"""

    @property
    def predicts(self) -> TargetKind:
        """What the run predicts: ``classes``, ``labels`` or ``numbers``."""
        if self.setting == LINK:
            return CLASSES
        if self.target_kind in KINDS:
            return self.target_kind
        if self.dataset in NUMBER_DATASETS and not self.owners:
            return NUMBERS
        has_all = self.target == ALL_TARGETS and has_targets(self)
        return LABELS if has_all else CLASSES

    @property
    def has_pairs(self) -> bool:
        """Whether the items of the run are pairs of nodes: links or edges."""
        return self.setting in (LINK, EDGE)

    @property
    def predicts_numbers(self) -> bool:
        """Whether the run predicts numbers instead of classes."""
        return self.predicts == NUMBERS

    @property
    def reads_messages(self) -> bool:
        """Whether a backbone of the run reads edges as their owner lists them."""
        models = split_models(self.model)
        return self.reads_types or any(message_direction(self, m) for m in models)

    @property
    def reads_types(self) -> bool:
        """Whether a backbone of the run reads kinds of nodes and relations."""
        return any(read_model(m).name in TYPED for m in split_models(self.model))

    @property
    def has_local_heads(self) -> bool:
        """Whether each owner has its own classes, so that its head stays local."""
        if self.class_align != "default" or self.setting != "graph":
            return bool(self.owners) and self.class_align == "local"
        entries = [entry.strip() for entry in self.owners.split(",")]
        known = {*DATASETS, *known_names("datasets")}
        return all(entry in known or entry.startswith("tu:") for entry in entries)


def listed_names(text: str) -> list[str]:
    """Return the names of a setting such as ``owners``, ``without-owners``, ``track``."""
    return [name for part in text.split(",") if (name := part.strip())]


def owners_name(owners: str) -> str:
    """Return the name of ``owners`` in run folders and tables, e.g. ``MUTAG+PROTEINS``."""
    parts = [part.strip().rstrip("/") for part in owners.split(",")]
    names = [part.rpartition("/")[2].removesuffix(".npz") for part in parts]
    return "+".join(name.rpartition(":")[2] for name in names)


def main_score_of(
    dataset: str,
    owners: str = "",
    setting: str = "",
    positive_class: str = "",
    kind: str = CLASSES,
) -> str:
    """Return the score by which runs that predict a ``kind`` of target are compared."""
    if kind == NUMBERS:
        return "rmse"
    is_ranked = setting in (LINK, EDGE) or bool(positive_class)
    is_ranked |= dataset in AUROC_DATASETS and not owners
    return "auroc" if is_ranked else "accuracy"


def needs_classes(settings: Any) -> bool:
    """Return whether a run reads classes of nodes or graphs."""
    return not settings.has_pairs or settings.partition not in EDGE_PARTITIONS


def has_targets(settings: Any) -> bool:
    """Return whether a run chooses one of several labels, see :data:`TARGETS`."""
    is_known = settings.dataset in TARGETS and not settings.owners
    return is_known and needs_classes(settings)


def is_file(dataset: str) -> bool:
    """Return whether ``dataset`` is a path instead of the name of a dataset."""
    return any(mark in dataset for mark in ("/", "\\", ".npz", ".csv"))


def read_given(text: str) -> dict[str, float]:
    """Return the numbers of ``target-mean`` by target, a single one may be that of ``""``.

    Raises a ValueError unless all are finite, and several have different names. A part with
    a comma in its name is quoted: ``"a,b=3",c=2``.
    """
    try:
        parts = next(csv.reader([text], skipinitialspace=True))
    except csv.Error as error:  # e.g. several lines
        raise ValueError(text) from error
    cells = [part.rpartition("=") for part in parts]
    found = {name.strip(): float(number) for name, _, number in cells}
    is_named = len(parts) == 1 or "" not in found
    if not (len(found) == len(parts) > 0 and is_named):
        raise ValueError(text)
    if not all(map(math.isfinite, found.values())):
        raise ValueError(text)
    return found


def read_num_neighbors(text: str) -> tuple[int, ...]:
    """Return the numbers of ``num-neighbors``; ValueError unless all are positive."""
    if not text:
        return ()
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers
