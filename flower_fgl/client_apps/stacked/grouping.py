"""Which clients can train together, and how they are divided into cohorts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.optimizer import step_counts
from flower_fgl.core.config import RunConfig
from flower_fgl.core.targets import CLASSES
from flower_fgl.methods import METHODS
from flower_fgl.nn import Backbone
from flower_fgl.nn.stacked import can_stack

__all__ = ["Backbones", "cut", "is_worthwhile", "num_stacks", "why_not_run"]

MAX_PADDING, MAX_PADDING_OF_SMALL, SMALL_COHORT = 1.25, 4.0, 32
"""Largest ratio of the rows of a cohort, padding included, to its nodes; of a cohort of
few clients, whose calls take longer than their arithmetic, a larger one."""
COHORT_BYTES = 32 << 20
"""Bytes of weights and features of one cohort: more would not stay in the cache."""
FEWEST = 4
"""Clients of a cohort from which stacking is faster, see benchmarks/stacked.py."""
CLIENTS_OF_STACK, MOST_STACKS = 32, 16
"""Clients from which another stack of them costs a round little, and the most stacks into
which memory alone would not divide the clients."""
LARGEST_STEP = 1 << 18
"""Numbers of one client's largest hidden representation or weight up to which stacking is
known to be faster. Beyond it, arithmetic takes longer than the calls that it saves."""


def why_not_run(config: RunConfig, node: Mapping[str, Any]) -> str:
    """Return why no client of a run can be stacked, empty if some can."""
    reasons = {
        'setting = "graph" classifies whole graphs': config.classifies_graphs,
        'setting = "link" predicts pairs of nodes': config.predicts_links,
        'setting = "edge" classifies pairs of nodes': config.classifies_edges,
        "a backbone reads edges with direction or features": (
            config.reads_messages and not config.reads_types
        ),
        "node-embedding has a vector for each node of a client": config.node_embedding,
        "class-weights differ by client": config.class_weights != "none",
        f"it predicts {config.predicts}": config.predicts != CLASSES,
        "each client calibrates its model": config.calibration == "owner",
        "clip-gradient clips the gradient of each client": config.clip_gradient,
        "the first layer or the head of each owner stays local": config.keeps_layers,
        "the dataset is scored by the area under the ROC curve": (
            config.main_score == "auroc"
        ),
        "check-every stops the training of each client at another epoch": (
            config.check_every and not METHODS[config.method].stacks_checks
        ),
        "num-neighbors draws the graph of every step of each client": (
            config.num_neighbors
        ),
        "the clients are data owners with their own files": (
            "graph" in node or "model-dir" in node
        ),
        "keep-client-models stores the model of each client": (
            config.keep_client_models
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Backbones:
    """The stackable backbones of a process, found once per kind of client."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[RunConfig, bool, Backbone]] = {}

    def key(self, client: Client) -> tuple[Any, ...] | str:
        """Return what clients of one cohort have in common, or a text why it has none."""
        data, config = client.data, client.config
        graph, count = data.inputs[0], len(data.training.index)
        if not count:
            return "it has no training nodes"
        if any(g.batch is not None or g.edge_weight is not None for g in data.inputs):
            return "it has a batch of graphs or edge weights"
        kept = client.local_names()
        if kept and config.schema_align == "name":
            return "other clients have kinds of nodes or relations that it lacks"
        sizes = graph.num_features, data.graph.target.width
        layout = type(graph), graph.x.layout, graph.x.dtype, str(client.device)
        kind = (id(config), client.model_name, *sizes, *layout, data.graph.schema)
        if kind not in self._known:
            made: Backbone = client.build_model()
            self._known[kind] = config, can_stack(made), made
        _, is_able, model = self._known[kind]
        if not is_able:
            return f"backbone {client.model_name} has no stacked form"
        size = config.batch_size
        if size and data.training.uses_small_batches(model.reach, size):
            return "its batches are so small that each reads only their surroundings"
        held = () if graph.relations is None else graph.relations.held
        return (
            *kind,
            held if model.skips_empty else bool(held),
            -(-count // size) if size else 1,
            tuple(tuple(sorted(columns)) for columns in data.columns),
        )


def num_stacks(num_clients: int) -> int:
    """Return into how many stacks the clients of a run are divided on a CPU: 2, 4, 8 or 16.

    Client k belongs to stack ``k % num_stacks``. Each worker process has whole stacks:
    the order of all sums, and so every number, is the same for any number of workers.
    """
    stacks = 2
    while stacks < MOST_STACKS and num_clients >= 2 * stacks * CLIENTS_OF_STACK:
        stacks *= 2
    return stacks


def cut(
    clients: Sequence[tuple[Hashable, Client]], *, bytes_per_client: int
) -> list[list[int]]:
    """Divide clients, given with their keys, into cohorts of one key and similar sizes.

    A cohort's memory is limited. The result holds places in ``clients``; clients with
    equal step counts are neighbours.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, (key, _) in enumerate(clients):
        groups.setdefault(key, []).append(place)
    sizes = [client.data.inputs[0].num_nodes for _, client in clients]
    cohorts: list[list[int]] = []
    for places in groups.values():
        places.sort(key=lambda place: (-sizes[place], place))
        start = nodes = 0
        for position, place in enumerate(places):
            rows = sizes[places[start]] * (position - start + 1)
            width = clients[place][1].data.inputs[0].num_features
            used = (position - start + 1) * bytes_per_client + 4 * rows * width
            nodes += sizes[place]
            is_small = position - start < SMALL_COHORT
            ratio = MAX_PADDING_OF_SMALL if is_small else MAX_PADDING
            if position > start and (rows > ratio * nodes or used > COHORT_BYTES):
                cohorts.append(places[start:position])
                start, nodes = position, sizes[place]
        cohorts.append(places[start:])
    known: dict[int, float] = {}
    for cohort in cohorts:
        cohort.sort(key=lambda place: (step_counts(clients[place][1], known), place))
    return cohorts


def is_worthwhile(clients: Sequence[Client]) -> bool:
    """Return whether a cohort trains faster together than one by one."""
    if len(clients) < FEWEST:
        return False
    graphs = [client.data.inputs[0] for client in clients]
    sizes = [graph.num_nodes for graph in graphs]
    sizes += [graph.relations.num_pairs for graph in graphs if graph.relations]
    most_rows = max(sizes)
    longest = max(most_rows, clients[0].data.graph.num_features)
    return longest * clients[0].config.hidden_channels <= LARGEST_STEP
