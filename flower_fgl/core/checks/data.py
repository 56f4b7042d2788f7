"""Checks of the data: dataset, task, owners, partition and sparsity."""

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import kebab
from flower_fgl.core.settings import (
    ALL_TARGETS,
    DATASETS,
    EDGE_PARTITIONS,
    GRAPH_PARTITIONS,
    NUMBER_DATASETS,
    SHARED_PARTITIONS,
    TARGETS,
    UNSEEN_SETTINGS,
    GeneralSettings,
    has_targets,
    is_file,
)
from flower_fgl.core.targets import CLASSES, EDGE, LABELS, LINK, NUMBERS, read_time_cuts

__all__ = ["MAX_SHOTS", "check_data"]

CLASS_SETTINGS = (
    *("class_weights", "positive_class", "precision_k", "absent_classes"),
    *("min_class_count", "class_align", "shots"),
)
"""Settings that labels and numbers do not have."""
KEYED_SETTINGS = ("transductive", "inductive", "graph", "edge", "link")
"""Values of ``setting`` whose items have identifiers."""

MAX_SHOTS = 11
"""A kept class has at least 26 nodes, 15 of which are test nodes (a test compares)."""


def check_data(settings: GeneralSettings) -> None:
    """Reject a dataset, task, partition, split or sparsity that contradict each other."""
    if has_targets(settings):
        _check_target(settings)
    if settings.target_kind != "auto":
        _check_target_kind(settings)
    if settings.predicts != CLASSES:
        _check_values(settings)
    elif settings.partition == "quantile":
        raise ConfigError(
            'partition = "quantile" sorts items by the number that is predicted: set '
            'target-kind = "numbers", or use partition = "dirichlet".'
        )
    _check_owners(settings)
    if settings.setting == "graph":
        _check_graphs(settings)
    if settings.setting in (LINK, EDGE):
        _check_pairs(settings)
    if settings.setting in UNSEEN_SETTINGS:
        _check_unseen(settings)
    if settings.setting == "few-shot":
        _check_few_shot(settings)
    if settings.split_by not in ("auto", "random"):
        _check_split_by(settings)
    if settings.partition in SHARED_PARTITIONS:
        _check_shared(settings)


def _check_shared(settings: GeneralSettings) -> None:
    """Reject settings that clients which share nodes do not support."""
    rule = f'partition = "{settings.partition}"'
    if settings.setting not in ("transductive", "inductive"):
        raise ConfigError(
            f'{rule} needs setting = "transductive" or "inductive", got '
            f'"{settings.setting}".'
        )
    _reject_sparsity(
        settings, f"the graphs of clients, but with {rule} they share edges"
    )


def _check_target(settings: GeneralSettings) -> None:
    """Reject a missing target, a number out of range, and all where one is needed."""
    (count, example), target = TARGETS[settings.dataset], settings.target
    are_numbers = example.isdecimal()
    if not target:
        names = f"0 to {count - 1}" if are_numbers else "with the names in its files"
        item = "graph" if settings.dataset.startswith("ogbg") else "node"
        raise ConfigError(
            f"{settings.dataset} has {count} targets, {names}, and a {item} may belong to "
            f'several. Choose one with target, e.g. target = "{example}": the run then '
            f'tells the classes "no {example}" and "{example}" apart. target = '
            f'"{ALL_TARGETS}" learns all of them at once.'
        )
    if target == ALL_TARGETS:
        _check_all_targets(settings)
        return
    if are_numbers and target not in map(str, range(count)):
        raise ConfigError(
            f'target = "{target}" is not one of {settings.dataset}, whose targets are the '
            f"numbers 0 to {count - 1}."
        )
    classes = (f"no {target}", target)
    if settings.setting != LINK and settings.positive_class not in ("", *classes):
        raise ConfigError(
            f'positive-class = "{settings.positive_class}" is no class of target = '
            f'"{target}": its classes are "{classes[0]}" and "{target}". Use one of them, '
            "or remove positive-class."
        )


def _check_all_targets(settings: GeneralSettings) -> None:
    """Reject what needs a single class of each item, with ``target = "all"``."""
    text = f'target = "{ALL_TARGETS}"'
    instead = f'Choose one target, e.g. target = "{TARGETS[settings.dataset].example}".'
    free = {
        "setting": ("transductive", "inductive", "graph"),
        "partition": EDGE_PARTITIONS,
    }
    for name, able_values in free.items():
        if (value := getattr(settings, name)) not in able_values:
            raise ConfigError(
                f'{name} = "{value}" needs one class of each item: with {text} use one of '
                f"{', '.join(able_values)}. {instead}"
            )
    for name in _changed(settings, "class_weights", "positive_class"):
        raise ConfigError(
            f"{kebab(name)} is about one class of each item, but {text} has several "
            f"labels: remove {kebab(name)}. {instead}"
        )


def _check_target_kind(settings: GeneralSettings) -> None:
    """Reject a kind of target that the task or the dataset does not have."""
    kind, name = settings.target_kind, settings.dataset
    if settings.setting == LINK and kind != CLASSES:
        raise ConfigError(
            f'setting = "{LINK}" predicts whether two nodes are linked: target-kind = '
            f'"{kind}" is not possible. Remove target-kind.'
        )
    if settings.setting == EDGE and kind == LABELS:
        raise ConfigError(
            f'setting = "{EDGE}" predicts a class or numbers of each edge: target-kind = '
            f'"{LABELS}" is not possible.'
        )
    # a deployment has the default dataset, which its clients do not read
    if settings.owners or is_file(name) or name == "synthetic":
        return
    due = NUMBERS if name in NUMBER_DATASETS else CLASSES
    if has_targets(settings) and settings.target == ALL_TARGETS:
        due = LABELS
    if name in {*DATASETS, *TARGETS, *NUMBER_DATASETS} and kind != due:
        raise ConfigError(
            f'{name} has {due}: target-kind = "{kind}" is not possible. Remove '
            "target-kind, or choose another dataset or target."
        )


def _check_values(settings: GeneralSettings) -> None:
    """Reject what needs one class of each item, where labels or numbers are predicted."""
    kind = settings.predicts
    names = CLASS_SETTINGS if kind == NUMBERS else CLASS_SETTINGS[:2]
    for name in _changed(settings, *names):
        raise ConfigError(
            f"{kebab(name)} = {_shown(getattr(settings, name))} is for classes, but the "
            f"targets are {kind}. Remove {kebab(name)}."
        )
    able = ("transductive", "inductive", "graph", EDGE)
    if settings.setting not in able:
        raise ConfigError(
            f'setting = "{settings.setting}" is for classes, but the targets are {kind}. '
            f"Use one of {', '.join(able)}."
        )
    free: tuple[str, ...] = EDGE_PARTITIONS
    free += SHARED_PARTITIONS
    free += ("network", "dirichlet", "quantile") if kind == NUMBERS else ()
    if settings.partition not in free and not settings.owners:
        raise ConfigError(
            f'partition = "{settings.partition}" reads classes, but the targets are '
            f"{kind}. Use one of {', '.join(free)}."
        )


def _shown(value: object) -> str:
    """Return a value as in pyproject.toml."""
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _changed(settings: GeneralSettings, *names: str) -> list[str]:
    """Return those of the named settings that differ from their default."""
    return [n for n in names if getattr(settings, n) != getattr(GeneralSettings, n)]


def _check_owners(settings: GeneralSettings) -> None:
    """Reject what contradicts ``owners``, or needs them."""
    if not settings.owners:
        for name in _changed(settings, "feature_align", "class_align"):
            raise ConfigError(
                f"{kebab(name)} is about the graphs of owners: set owners too, or "
                f"remove {kebab(name)}."
            )
        return
    for name in _changed(settings, "dataset", "partition"):
        raise ConfigError(
            f'owners = "{settings.owners}" brings the graphs of the clients: '
            f'{name} = "{getattr(settings, name)}" is not possible. Remove one of '
            "the two."
        )
    _reject_sparsity(settings, "a partition, but an owner's graph is used unchanged")


def _check_pairs(settings: GeneralSettings) -> None:
    """Reject what link prediction and the classification of edges cannot use."""
    if settings.num_neighbors:
        raise ConfigError(
            f'setting = "{settings.setting}" embeds the whole graph in each step: '
            "num-neighbors is not possible. Remove it."
        )
    if settings.setting == EDGE:
        _check_edges(settings)
    elif settings.split == "public":
        raise ConfigError(
            'setting = "link" splits the edges of each client: split = "public" is not '
            'possible. Use percentages of the edges, e.g. "85/5/10".'
        )
    else:
        for name in _changed(settings, "class_weights", "positive_class"):
            raise ConfigError(
                f'{kebab(name)} is not for setting = "link", which draws as many '
                f"pairs without a link as there are links: remove {kebab(name)}."
            )
    _reject_sparsity(settings, "all features, edges and labels of a client")


def _check_edges(settings: GeneralSettings) -> None:
    """Reject malformed times, and a partition that needs classes of nodes."""
    try:
        read_time_cuts(settings.time_cuts)
    except ValueError:
        raise ConfigError(
            "time-cuts must be two numbers, the times at which validation and test "
            f'begin, the second one later, as in "400,500", got "{settings.time_cuts}".'
        ) from None
    if settings.partition not in EDGE_PARTITIONS:
        raise ConfigError(
            f'partition = "{settings.partition}" is not for setting = "edge", since it '
            'reads more than the edges: use partition = "metis", "louvain" or "uniform".'
        )


def _check_graphs(settings: GeneralSettings) -> None:
    """Reject a dataset or partition rule that graph classification does not support."""
    if not settings.owners and settings.partition not in GRAPH_PARTITIONS:
        names = '" or "'.join(GRAPH_PARTITIONS)
        raise ConfigError(
            f'partition = "{settings.partition}" partitions a single graph, but setting = '
            '"graph" assigns whole graphs to clients: use a dataset of task "graph", '
            f'which flower-fgl datasets lists, and partition = "{names}".'
        )
    _reject_sparsity(
        settings,
        'the nodes of one graph, but setting = "graph" classifies whole graphs',
    )


def _reject_sparsity(settings: GeneralSettings, why: str) -> None:
    """Reject the sparsity settings; ``why`` says which data they would remove."""
    for name in ("feature_sparsity", "edge_sparsity", "label_sparsity"):
        if getattr(settings, name):
            raise ConfigError(
                f"{kebab(name)} removes data from {why}: use {kebab(name)} = 0, got "
                f"{getattr(settings, name)}."
            )


def _check_unseen(settings: GeneralSettings) -> None:
    """Reject settings that the closed-set and open-set settings do not support."""
    if settings.partition != "metis":
        raise ConfigError(
            f'setting = "{settings.setting}" partitions the graph among the clients and a '
            f'new one with METIS: use partition = "metis", got "{settings.partition}".'
        )
    _reject_sparsity(
        settings,
        f'the graph of a client, but setting = "{settings.setting}" also scores nodes '
        "outside it",
    )


def _check_few_shot(settings: GeneralSettings) -> None:
    """Reject settings that the few-shot setting does not support."""
    if settings.shots > MAX_SHOTS:
        raise ConfigError(
            "A client keeps the classes with more than 25 nodes. Of these, 15 are test "
            "nodes, which leaves at least 11 for training: shots must be at most "
            f"{MAX_SHOTS}, got {settings.shots}."
        )
    if settings.split != "default":
        raise ConfigError(
            'setting = "few-shot" draws the training nodes and 15 test nodes per class: '
            f'split = "{settings.split}" is not possible. Use split = "default".'
        )
    if settings.label_sparsity:
        raise ConfigError(
            'label-sparsity removes training nodes, but setting = "few-shot" has the same '
            "number in every class: use label-sparsity = 0 and fewer shots, got "
            f"{settings.label_sparsity}."
        )


def _check_split_by(settings: GeneralSettings) -> None:
    """Reject a split by identifiers where another rule splits, or without molecules."""
    text = f'split-by = "{settings.split_by}"'
    by_structure = settings.split_by != "id"
    can = ("graph",) if by_structure else KEYED_SETTINGS
    if settings.setting not in can:
        what = "molecules" if by_structure else "nodes, edges or graphs"
        raise ConfigError(
            f"{text} splits {what} by a hash: it needs setting = {', '.join(can)}, got "
            f'"{settings.setting}".'
        )
    if settings.split == "public":
        raise ConfigError(
            f'{text} draws a split, but split = "public" uses the published one. Remove '
            "one of the two."
        )
    if settings.time_cuts:
        raise ConfigError(
            f"{text} and time-cuts both split the edges. Remove one of the two."
        )
    may_have_smiles = settings.owners or is_file(settings.dataset)
    if by_structure and not may_have_smiles and settings.dataset != "synthetic":
        raise ConfigError(
            f"{text} needs SMILES, which {settings.dataset} does not bring. Use "
            'split-by = "random", or a folder with graphs.csv and its column smiles.'
        )
