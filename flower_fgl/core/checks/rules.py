"""Rules between settings: why some cannot be combined, one mapping for each subject.

Each function returns the texts of the errors, and whether their reasons hold.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from flower_fgl.core.calibration import CONFORMAL, DIFFUSED, SCALED
from flower_fgl.core.errors import refuse
from flower_fgl.core.model_spec import (
    BACKBONES,
    SAMPLED,
    check_models,
    message_direction,
    read_model,
    split_models,
)
from flower_fgl.core.options import kebab, nearest
from flower_fgl.core.settings import (
    ALL_TARGETS,
    DATASETS,
    EDGE_PARTITIONS,
    GRAPH_PARTITIONS,
    MIN_SECURE_CLIENTS,
    NUMBER_DATASETS,
    SHARED_PARTITIONS,
    TARGETS,
    TRACKERS,
    UNSEEN_SETTINGS,
    GeneralSettings,
    has_targets,
    is_file,
    listed_names,
    read_given,
    read_num_neighbors,
)
from flower_fgl.core.targets import CLASSES, EDGE, LABELS, LINK, NUMBERS, read_time_cuts

__all__ = ["MAX_SHOTS", "check_data", "check_training", "describe_sampling"]
__all__ += ["least_uploads", "num_sampled"]

Reasons = Mapping[str, object]
CLASS_SETTINGS = (
    *("class_weights", "positive_class", "precision_k", "absent_classes"),
    *("min_class_count", "class_align", "shots"),
)
"""Settings that labels and numbers do not have."""
NUMBER_SETTINGS = (
    *("loss", "huber_delta", "target_weight"),
    *("target_scale", "target_mean", "target_std"),
)
"""Settings that classes and labels do not have."""
KEYED_SETTINGS = ("transductive", "inductive", "graph", "edge", "link")
"""Values of ``setting`` whose items have identifiers."""
SPARSITY = ("feature_sparsity", "edge_sparsity", "label_sparsity")

MAX_SHOTS = 11
"""A kept class has at least 26 nodes, 15 of which are test nodes (a test compares)."""


def num_sampled(settings: GeneralSettings, able: int) -> int:
    """Return how many of the ``able`` trainable clients a round samples."""
    if settings.participants:
        return min(settings.participants, able)
    return math.ceil(settings.participation * able - 1e-9)


def describe_sampling(settings: GeneralSettings) -> str:
    """Return the setting that :func:`num_sampled` uses, with its value."""
    if settings.participants:
        return f"participants = {settings.participants}"
    return f"participation = {settings.participation:g}"


def least_uploads(settings: GeneralSettings) -> int:
    """Return the number of uploads that ``aggregation`` needs to outvote an attacker."""
    if settings.aggregation == "krum":
        return 2 * settings.krum_attackers + 3
    return 1 if settings.aggregation == "mean" else 3


def check_data(s: GeneralSettings) -> None:
    """Reject a dataset, task, target, partition or split that contradict each other."""
    for rules, applies in (
        (_target, has_targets(s) and s.target != ALL_TARGETS),
        (_target_kind, s.target_kind != "auto"),
        (_values, s.predicts != CLASSES),
        (_owners, True),
        (_partition, True),
        (_pairs, s.has_pairs),
        (_few_shot, s.setting == "few-shot"),
        (_split_by, s.split_by not in ("auto", "random")),
        (_sparsity, any(getattr(s, name) for name in SPARSITY)),
        (_numbers, True),
        (_given_scale, s.predicts_numbers and s.target_scale == "given"),
    ):
        if applies:
            refuse(rules(s))


def check_training(s: GeneralSettings, method: Any) -> None:
    """Reject backbones, devices, rounds and protections that cannot work."""
    refuse(
        {
            f'device must be "auto", "cpu", "cuda" or "cuda:N", got "{s.device}".': (
                not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", s.device)
            )
        }
        | {
            f'Unknown tracker "{name}". {nearest(name, TRACKERS)}': name not in TRACKERS
            for name in listed_names(s.track)
        }
    )
    check_models(s, method)
    if s.num_neighbors:
        refuse(_neighbors(s))
        for name in split_models(s.model):
            refuse(_sampled(s, name))
    refuse(_rounds(s))
    refuse(_sampling(s, method.defaults.get("participants", 0)))
    for rules, applies in (
        (_distributed, s.upload_noise_model == "distributed"),
        (_secure, s.secure_aggregation),
        (_shared_calibration, s.calibration == "shared"),
        (_conformal_score, s.calibration == "owner"),
        (_late, s.min_clients),
        (_robust, s.aggregation != "mean"),
    ):
        if applies:
            refuse(rules(s))


def _changed(s: GeneralSettings, *names: str) -> dict[str, Any]:
    """Return those of the named settings that differ from their default, by key."""
    found = {name: getattr(s, name) for name in names}
    return {
        kebab(name): value
        for name, value in found.items()
        if value != getattr(GeneralSettings, name)
    }


def _is_odd(read: Callable[[str], object], text: str) -> bool:
    """Return whether a text cannot be read."""
    try:
        read(text)
    except ValueError:
        return True
    return False


def _target(s: GeneralSettings) -> Reasons:
    """Reject a missing target, and a number out of range."""
    (count, example), target, name = TARGETS[s.dataset], s.target, s.dataset
    are_numbers = example.isdecimal()
    names = f"0 to {count - 1}" if are_numbers else "with the names in its files"
    item = "graph" if name.startswith("ogbg") else "node"
    is_known = not are_numbers or target in map(str, range(count))
    classes = ("", f"no {target}", target)
    return {
        f"{name} has {count} targets, {names}, and a {item} may belong to "
        f'several. Choose one with target, e.g. target = "{example}": the run then '
        f'tells the classes "no {example}" and "{example}" apart. target = '
        f'"{ALL_TARGETS}" learns all of them at once.': not target,
        f'target = "{target}" is not one of {name}, whose targets are the '
        f"numbers 0 to {count - 1}.": not is_known,
        f'positive-class = "{s.positive_class}" is no class of target = '
        f'"{target}": its classes are "no {target}" and "{target}". Use one of them, '
        "or remove positive-class.": (
            s.setting != LINK and s.positive_class not in classes
        ),
    }


def _target_kind(s: GeneralSettings) -> Reasons:
    """Reject a kind of target that the task or the dataset does not have."""
    kind, name = s.target_kind, s.dataset
    due = NUMBERS if name in NUMBER_DATASETS else CLASSES
    if has_targets(s) and s.target == ALL_TARGETS:
        due = LABELS
    # a deployment has the default dataset, which its clients do not read
    is_read = not (s.owners or is_file(name) or name == "synthetic")
    is_known = name in {*DATASETS, *TARGETS, *NUMBER_DATASETS}
    return {
        f'setting = "{LINK}" predicts whether two nodes are linked: target-kind = '
        f'"{kind}" is not possible. Remove target-kind.': (
            s.setting == LINK and kind != CLASSES
        ),
        f'setting = "{EDGE}" predicts a class or numbers of each edge: target-kind = '
        f'"{LABELS}" is not possible.': s.setting == EDGE and kind == LABELS,
        f'{name} has {due}: target-kind = "{kind}" is not possible. Remove '
        "target-kind, or choose another dataset or target.": (
            is_read and is_known and kind != due
        ),
    }


def _values(s: GeneralSettings) -> Reasons:
    """Reject what needs one class of each item, where labels or numbers are predicted."""
    kind, has_numbers = s.predicts, s.predicts_numbers
    able = ("transductive", "inductive", "graph", EDGE)
    has_all = s.target == ALL_TARGETS and has_targets(s)  # of a graph of one kind
    free: tuple[str, ...] = (*EDGE_PARTITIONS, *(() if has_all else SHARED_PARTITIONS))
    free += ("network", "dirichlet", "quantile") if has_numbers else ()
    names = CLASS_SETTINGS if has_numbers else CLASS_SETTINGS[:2]
    end = "."
    if has_all:
        end += f' Or choose one target, e.g. target = "{TARGETS[s.dataset].example}".'
    return {
        f"{key} = {json.dumps(value, ensure_ascii=False)} is for classes, but the targets "
        f"are {kind}. Remove {key}{end}": True
        for key, value in _changed(s, *names).items()
    } | {
        f'setting = "{s.setting}" is for classes, but the targets are {kind}. '
        f"Use one of {', '.join(able)}{end}": s.setting not in able,
        f'partition = "{s.partition}" reads classes, but the targets are '
        f"{kind}. Use one of {', '.join(free)}{end}": (
            s.partition not in (*free, *SHARED_PARTITIONS) and not s.owners
        ),
    }


def _owners(s: GeneralSettings) -> Reasons:
    """Reject what contradicts ``owners``, or needs them."""
    if s.owners:
        return {
            f'owners = "{s.owners}" brings the graphs of the clients: '
            f'{key} = "{value}" is not possible. Remove one of the two.': True
            for key, value in _changed(s, "dataset", "partition").items()
        }
    return {
        f"{key} is about the graphs of owners: set owners too, or remove {key}.": True
        for key in _changed(s, "feature_align", "class_align")
    }


def _partition(s: GeneralSettings) -> Reasons:
    """Reject a rule that cannot partition the data of the task."""
    rule, setting = f'partition = "{s.partition}"', f'setting = "{s.setting}"'
    of_graphs = '" or "'.join(GRAPH_PARTITIONS)
    return {
        f"{rule} sorts items by the number that is predicted: set "
        'target-kind = "numbers", or use partition = "dirichlet".': (
            s.partition == "quantile" and s.predicts == CLASSES
        ),
        f"{rule} partitions a single graph, but setting = "
        '"graph" assigns whole graphs to clients: use a dataset of task "graph", '
        f'which flower-fgl datasets lists, and partition = "{of_graphs}".': (
            s.setting == "graph"
            and not s.owners
            and s.partition not in GRAPH_PARTITIONS
        ),
        f'{rule} is not for setting = "edge", since it '
        'reads more than the edges: use partition = "metis", "louvain" or "uniform".': (
            s.setting == EDGE and s.partition not in EDGE_PARTITIONS
        ),
        f"{setting} partitions the graph among the clients and a "
        f'new one with METIS: use partition = "metis", got "{s.partition}".': (
            s.setting in UNSEEN_SETTINGS and s.partition != "metis"
        ),
        f'{rule} needs setting = "transductive" or "inductive", got "{s.setting}".': (
            s.partition in SHARED_PARTITIONS
            and s.setting not in ("transductive", "inductive")
        ),
        f"{rule} assigns the edges of a typed graph, but {s.dataset} has one kind of nodes "
        'and edges: use partition = "metis".': (
            s.partition in SHARED_PARTITIONS and has_targets(s)
        ),
    }


def _pairs(s: GeneralSettings) -> Reasons:
    """Reject what link prediction and the classification of edges cannot use."""
    is_link = s.setting == LINK
    return {
        f'setting = "{s.setting}" embeds the whole graph in each step: '
        "num-neighbors is not possible. Remove it.": s.num_neighbors,
        "time-cuts must be two numbers, the times at which validation and test "
        f'begin, the second one later, as in "400,500", got "{s.time_cuts}".': (
            not is_link and _is_odd(read_time_cuts, s.time_cuts)
        ),
        'setting = "link" splits the edges of each client: split = "public" is not '
        'possible. Use percentages of the edges, e.g. "85/5/10".': (
            is_link and s.split == "public"
        ),
    } | {
        f'{key} is not for setting = "link", which draws as many '
        f"pairs without a link as there are links: remove {key}.": is_link
        for key in _changed(s, "class_weights", "positive_class")
    }


def _few_shot(s: GeneralSettings) -> Reasons:
    """Reject settings that the few-shot setting does not support."""
    return {
        "A client keeps the classes with more than 25 nodes. Of these, 15 are test "
        "nodes, which leaves at least 11 for training: shots must be at most "
        f"{MAX_SHOTS}, got {s.shots}.": s.shots > MAX_SHOTS,
        'setting = "few-shot" draws the training nodes and 15 test nodes per class: '
        f'split = "{s.split}" is not possible. Use split = "default".': (
            s.split != "default"
        ),
        'label-sparsity removes training nodes, but setting = "few-shot" has the same '
        "number in every class: use label-sparsity = 0 and fewer shots, got "
        f"{s.label_sparsity}.": s.label_sparsity,
    }


def _sparsity(s: GeneralSettings) -> Reasons:
    """Reject a sparsity, with the first reason why there is nothing to remove."""
    setting, rule = f'setting = "{s.setting}"', f'partition = "{s.partition}"'
    whys = {
        "removes data from a partition, but an owner's graph is used unchanged": s.owners,
        f"removes data from the nodes of one graph, but {setting} classifies whole "
        "graphs": s.setting == "graph",
        "removes data from all features, edges and labels of a client": s.has_pairs,
        f"removes data from the graph of a client, but {setting} also scores nodes "
        "outside it": s.setting in UNSEEN_SETTINGS,
        f"removes data from the graphs of clients, but with {rule} they share edges": (
            s.partition in SHARED_PARTITIONS
        ),
    }
    return {
        f"{kebab(name)} {why}: use {kebab(name)} = 0, got {getattr(s, name)}.": (
            holds and getattr(s, name)
        )
        for why, holds in whys.items()
        for name in SPARSITY
    } | {
        f'{kebab(name)} is for plain graphs: remove it for model = "{s.model}".': (
            getattr(s, name) and s.reads_types
        )
        for name in SPARSITY
    }


def _numbers(s: GeneralSettings) -> Reasons:
    """Reject settings of numbers for others, and statistics that may not leave a client."""
    kind, is_number = s.predicts, s.predicts_numbers
    end = "."
    if s.target_kind == "auto":  # a deployment learns it later
        end += ' Set target-kind = "numbers" if the data owners hold them.'
    is_shared = is_number and s.target_scale == "shared"
    return {
        f"{key} = {json.dumps(value, ensure_ascii=False)} is for numbers, but the targets "
        f"are {kind}{end}": not is_number
        for key, value in _changed(s, *NUMBER_SETTINGS).items()
    } | {
        'weight-by = "entries" is for labels and numbers, but the targets are '
        "classes.": kind == CLASSES and s.weight_by == "entries",
        'share-target-statistics = false, but target-scale = "shared" sends each '
        'owner\'s mean and spread. Set target-scale = "given" or "own".': (
            is_shared and not s.share_target_statistics
        ),
        "secure-aggregation = true hides single uploads, but target-scale = "
        '"shared" sends each owner\'s mean and spread. Set target-scale = "given" or '
        '"own".': is_shared and s.secure_aggregation,
    }


def _split_by(s: GeneralSettings) -> Reasons:
    """Reject a split by identifiers where another rule splits, or without molecules."""
    text = f'split-by = "{s.split_by}"'
    by_structure = s.split_by != "id"
    able = ("graph",) if by_structure else KEYED_SETTINGS
    what = "molecules" if by_structure else "nodes, edges or graphs"
    may_have_smiles = s.owners or is_file(s.dataset) or s.dataset == "synthetic"
    return {
        f"{text} splits {what} by a hash: it needs setting = {', '.join(able)}, got "
        f'"{s.setting}".': s.setting not in able,
        f'{text} draws a split, but split = "public" uses the published one. Remove '
        "one of the two.": s.split == "public",
        f"{text} and time-cuts both split the edges. Remove one of the two.": (
            s.time_cuts
        ),
        f"{text} needs SMILES, which {s.dataset} does not bring. Use "
        'split-by = "random", or a folder with graphs.csv and its column smiles.': (
            by_structure and not may_have_smiles
        ),
    }


def _given_scale(s: GeneralSettings) -> Reasons:
    """Reject means and deviations that are missing, malformed or not as many."""
    texts = {"target-mean": s.target_mean, "target-std": s.target_std}
    refuse(
        {
            f'With target-scale = "given", {key} must be a finite number as in "-3.1", or '
            'one for each of several targets with its name as in "weight=1000,length=3", '
            f'got "{text}".': _is_odd(read_given, text)
            for key, text in texts.items()
        }
    )
    means, stds = map(read_given, texts.values())
    return {
        f"target-std must be above 0, got {s.target_std}.": min(stds.values()) <= 0,
        f"target-mean has {_listed(means)}, but target-std has {_listed(stds)}. Give one "
        "of each for every target.": means.keys() != stds.keys(),
    }


def _listed(given: Mapping[str, float]) -> str:
    """Return the names of targets with a given number, for a message."""
    return (
        "a number without a name" if "" in given else f"numbers of {', '.join(given)}"
    )


def _neighbors(s: GeneralSettings) -> Reasons:
    """Reject ``num-neighbors`` that is malformed or would have no effect."""
    return {
        "num-neighbors must be positive numbers, one per layer and separated by "
        f'commas as in "10,10", got "{s.num_neighbors}".': (
            _is_odd(read_num_neighbors, s.num_neighbors)
        ),
        'num-neighbors is for node classification: remove it for setting = "graph".': (
            s.setting == "graph"
        ),
        "num-neighbors limits what a batch reads: set batch-size, or remove it.": (
            not s.batch_size
        ),
    }


def _sampled(s: GeneralSettings, name: str) -> Reasons:
    """Reject a backbone that cannot read the samples of ``num-neighbors``."""
    model, direction = read_model(name), message_direction(s, name)
    number = len(read_num_neighbors(s.num_neighbors))
    layers, is_sampled = model.num_layers or s.num_layers, model.name in SAMPLED
    what = f'edge-direction = "{s.edge_direction}"'
    what = what if is_sampled else f'model = "{name}"'
    return {
        f"{what} reads all neighbours: remove num-neighbors.": direction,
        f'num-neighbors = "{s.num_neighbors}" has {number} number(s), but model '
        f'"{name}" has {layers} layers: give one number for each layer, the '
        "last layer first.": is_sampled and number != layers,
        f'num-neighbors does not work with model "{name}". Remove it, or use one '
        f"of {', '.join(SAMPLED)}.": model.name in BACKBONES and not is_sampled,
    }


def _without_global_model(s: GeneralSettings) -> dict[str, object]:
    """Return reasons why no client has all weights of a model, with whether they hold."""
    none, align = "there is no complete global model", s.schema_align
    return {
        f'With feature-align = "project" {none}': (
            s.owners and s.feature_align == "project"
        ),
        f'With class-align = "local" {none}': s.has_local_heads,
        f"With node-embedding = true {none}": s.node_embedding,
        f'With schema-align = "{align}" clients have different parts of a model': (
            align != "same"
        ),
    }


def _rounds(s: GeneralSettings) -> Reasons:
    """Reject an evaluation, noise or hosts that lack what they need."""
    return {
        f'{reason}: use evaluate = "local", got "{s.evaluate}".': (
            holds and s.evaluate != "local"
        )
        for reason, holds in _without_global_model(s).items()
    } | {
        'evaluate = "mixed" scores the downloads before they are trained, but '
        f'eval-policy = "{s.eval_policy}" trains them. Use eval-policy = '
        '"stale".': s.evaluate == "mixed" and s.eval_policy != "stale",
        f"upload-noise = {s.upload_noise:g} is a multiple of upload-clip, which "
        "is 0: set upload-clip.": s.upload_noise and not s.upload_clip,
        f"clients-per-node = {s.clients_per_node} needs the number of all "
        "clients: set clients.": s.clients_per_node > 1 and not s.clients,
    }


def _sampling(s: GeneralSettings, by_default: object) -> Reasons:
    """Reject rounds that sample more clients than there are, or too few.

    A method may sample more participants ``by_default``.
    """
    sampled = num_sampled(s, s.clients)
    return {
        f"min-replies must be at most clients = {s.clients}, got {s.min_replies}.": (
            s.clients and s.min_replies > s.clients
        ),
        f"participants = {s.participants} and participation = "
        f"{s.participation:g} both set the number of sampled clients. Give one.": (
            s.participants and s.participation != 1
        ),
        f"participants must be at most clients = {s.clients}, got {s.participants}.": (
            s.clients and s.participants > s.clients and s.participants != by_default
        ),
        f"min-replies is {s.min_replies}, but {describe_sampling(s)} "
        f"samples {sampled} of {s.clients} clients per round, so every round "
        "would fail. Lower min-replies or sample more clients.": (
            s.clients and s.min_replies > sampled
        ),
    }


def _distributed(s: GeneralSettings) -> Reasons:
    """Reject distributed noise where it would protect nothing."""
    needed = {
        "secure-aggregation = true": s.secure_aggregation,
        "upload-clip above 0": s.upload_clip,
        "upload-noise above 0": s.upload_noise,
        'weight-by = "equal"': s.weight_by == "equal",
    }
    return {
        'upload-noise-model = "distributed" adds shares of the noise that are only '
        f"enough in a secure sum of equally weighted uploads: set {text}, or "
        'use upload-noise-model = "local".': not is_set
        for text, is_set in needed.items()
    }


def _secure(s: GeneralSettings) -> Reasons:
    """Reject secure aggregation with too few clients."""
    sampled = num_sampled(s, s.clients)
    return {
        "secure-threshold must be above 2/3, so that a server cannot show two groups "
        f"of clients different lists, got {s.secure_threshold:g}. Remove it, "
        "or set it to 0.67 or more.": 3 * s.secure_threshold <= 2,
        f"secure-aggregation needs {MIN_SECURE_CLIENTS} clients per round: with one or "
        "two, the sum reveals individual updates. clients = "
        f"{s.clients} and {describe_sampling(s)} give {sampled}.": (
            s.clients and sampled < MIN_SECURE_CLIENTS
        ),
    }


def _shared_calibration(s: GeneralSettings) -> Reasons:
    """Reject a common calibration without a complete global model, or beside noise."""
    reasons = _without_global_model(s) | {
        'With target-scale = "own" the global model predicts no numbers in their units': (
            s.predicts_numbers and s.target_scale == "own"
        ),
        "upload-noise protects uploads, and the sums of a calibration have no noise": (
            s.upload_noise
        ),
        "isotonic maps need the items themselves": s.calibrator == "isotonic",
        f'conformal-score = "{s.conformal_score}" needs the items themselves': (
            s.conformal_score in (DIFFUSED, SCALED)
        ),
    }
    end = f'use calibration = "owner", got "{s.calibration}".'
    return {f"{reason}: {end}": holds for reason, holds in reasons.items()}


def _conformal_score(s: GeneralSettings) -> Reasons:
    """Reject a conformal score of another kind of items."""
    score, is_of_nodes = s.conformal_score, s.setting not in ("graph", LINK, EDGE)
    return {
        f'conformal-score = "{SCALED}" scales intervals of numbers, and the run '
        f"predicts {s.predicts}. Use {', '.join(CONFORMAL)}.": (
            score == SCALED and not s.predicts_numbers
        ),
        f'conformal-score = "{DIFFUSED}" mixes scores of neighbouring nodes of one '
        'kind, and this run has none to predict. Use "aps".': (
            score == DIFFUSED
            and s.predicts == CLASSES
            and not (is_of_nodes and not s.reads_types)
        ),
    }


def _late(s: GeneralSettings) -> Reasons:
    """Reject ``min-clients`` if all clients are needed from the start."""
    least = s.min_clients
    return {
        "With secure-aggregation all clients exchange keys before round 1: "
        f"min-clients = {least} is not possible. Remove one of the two.": (
            s.secure_aggregation
        ),
        f"min-clients must be at most clients = {s.clients}, got {least}.": (
            s.clients and least > s.clients
        ),
        f"Rounds with min-clients = {least} clients would always fail, since "
        f"min-replies = {s.min_replies}. Set min-replies to {least} or less.": (
            s.min_replies > least
        ),
    }


def _robust(s: GeneralSettings) -> Reasons:
    """Reject a robust aggregation that masks or few clients rule out."""
    rule, least, sampled = s.aggregation, least_uploads(s), num_sampled(s, s.clients)
    reason = f" (2·{s.krum_attackers} + 3)" if rule == "krum" else ""
    return {
        f'aggregation = "{rule}" compares single uploads, which secure-aggregation '
        "hides from the server. Remove one of the two.": s.secure_aggregation,
        f'aggregation = "{rule}" needs {least} uploads per round{reason}'
        f", but clients = {s.clients} and {describe_sampling(s)} give {sampled}.": (
            s.clients and sampled < least
        ),
    }
