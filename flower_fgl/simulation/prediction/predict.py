"""Predict the items of a graph file with a saved model: nodes, graphs, edges or links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import Surroundings, calibrated, in_sets
from flower_fgl.core.calibration import DIFFUSED
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.client_graph import EdgeTable, GraphDataset
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile
from flower_fgl.datasets.graph_files.graph_set import OwnedSet
from flower_fgl.nn.link import pair_codes
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.saved_model import SavedModel, load_model
from flower_fgl.simulation.prediction.fit import fit_graph
from flower_fgl.simulation.prediction.pairs import (
    PairNodes,
    best_partners,
    decode_pairs,
    link_score,
    read_pairs,
)
from flower_fgl.simulation.prediction.read import (
    read_graph,
    read_set,
    without_kinds,
)
from flower_fgl.simulation.prediction.table import Prediction, schema_of, task_of

__all__ = ["Wanted", "conformal_draws", "predict_graph", "predict_items"]
__all__ += ["require_scale"]

NODES_AT_ONCE = 1 << 16
"""Nodes of small graphs that are computed at once."""


@dataclass(frozen=True)
class Wanted:
    """What to predict, see :func:`predict_graph`."""

    pairs: Any = None
    top_k: int | None = None
    only_unknown: bool = False
    from_time: float | None = None

    def check(self, task: str) -> None:
        """Raise a ConfigError if a model of another task needs an option, or lacks one."""
        options = {
            "--pairs": ("links", self.pairs is not None),
            "--top-k": ("links", self.top_k is not None),
            "--only-unknown": ("edges", self.only_unknown),
            "--from": ("edges", self.from_time is not None),
        }
        given = {name: other for name, (other, is_set) in options.items() if is_set}
        for name, other in given.items():
            if other != task:
                raise ConfigError(
                    f"The model predicts {task}: {name} is for a model that predicts "
                    f"{other}."
                )
        if task == "links" and len(given) != 1:
            raise ConfigError(
                "Give either --pairs or --top-k, not both."
                if given
                else "The model predicts links: give the pairs to score with --pairs."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k must be at least 1, got {self.top_k}.")


def predict_graph(
    model: Path,
    graph: Path | str | Any,
    *,
    pairs: Any = None,
    top_k: int | None = None,
    only_unknown: bool = False,
    from_time: float | None = None,
) -> Prediction:
    """Predict the items of a graph: what the model was trained for decides which.

    ``model`` is a data owner's model folder or a run folder. :meth:`flower_fgl.Run.predict`
    describes the other arguments and the errors. Messages pass over all edges of the graph.
    With times of edges and a part of the edges to predict, they pass over edges before the
    first of these, as in training.
    """
    wanted = Wanted(pairs, top_k, only_unknown, from_time)
    return predict_items(load_model(model), graph, wanted)


def predict_items(
    saved: SavedModel, graph: Path | str | Any, wanted: Wanted
) -> Prediction:
    """Predict the items of a graph with a loaded model, see :func:`predict_graph`."""
    task = task_of(saved.card)
    wanted.check(task)
    require_scale(saved.card)
    if task == "graphs":
        return _predict_set(saved, *read_set(graph, saved.card))
    owned, where = read_graph(graph, saved.card)
    predict = {
        "nodes": _predict_nodes,
        "edges": _predict_edges,
        "links": _predict_links,
    }
    with torch.inference_mode():
        return predict[task](saved, owned, where, wanted)


def require_scale(card: ModelCard) -> None:
    """Raise a DataError if a model of numbers does not hold their scale."""
    if card.target_scale == "lost":
        raise DataError(
            "Each client scaled its targets with its own statistics for training, and this "
            "model file does not hold these. Use the model that a data owner's SuperNode "
            "saved."
        )


def _predict_nodes(
    saved: SavedModel, owned: LocalGraphFile, where: Path | str, wanted: Wanted
) -> Prediction:
    """Predict all nodes; of a typed graph those of the kind that the model predicts."""
    ids, schema = owned.ids, owned.dataset.schema
    items = {"node": ids}
    if schema is not None and not saved.card.is_typed:
        kinds = np.array(schema.node_types, dtype=object)
        assert owned.dataset.node_type is not None
        items = {"kind": kinds[owned.dataset.node_type.numpy()], "node": ids}
        owned = without_kinds(owned, saved.card)
    fitted, graph = fit_graph(owned, saved, where)
    notes = [*fitted.notes]
    logits = saved.model(graph)
    if fitted.typed is not None:
        logits = logits[fitted.typed.rows]
        items = {"node": ids[fitted.typed.rows.numpy()]}
    if "kind" in items:
        notes.append("The model reads no kinds: it predicts nodes of all kinds.")
    return _prediction(items, logits, saved, notes, owned.dataset.edge_index)


def _predict_edges(
    saved: SavedModel, owned: LocalGraphFile, where: Path | str, wanted: Wanted
) -> Prediction:
    """Predict the edges of the file, or a part of them."""
    table = owned.dataset.edges
    assert table is not None  # the reader was told to read edges
    chosen = _chosen_edges(table, wanted, where)
    sent, notes = _messages(table, chosen)
    fitted, graph = fit_graph(owned, saved, where, sent)
    assert fitted.pair_x is not None
    pairs = table.pairs[:, chosen]
    logits = decode_pairs(saved.model, graph, pairs, fitted.pair_x[chosen])
    items = _ends(owned, pairs)
    if table.time is not None:
        items["time"] = table.time[chosen].numpy()
    return _prediction(items, logits, saved, [*fitted.notes, *notes])


def _chosen_edges(table: EdgeTable, wanted: Wanted, where: Path | str) -> Tensor:
    """Return a mask (M,) of the edges to predict."""
    chosen = torch.ones(table.num_edges, dtype=torch.bool)
    if wanted.only_unknown:
        chosen &= table.y < 0
    if wanted.from_time is not None:
        if table.time is None:
            raise DataError(
                f"--from {wanted.from_time:.15g} chooses edges by their times, but those "
                f"of {where} have none. Add a column time (edge_time in an .npz file), or "
                "leave --from out."
            )
        chosen &= table.time >= wanted.from_time
    if not bool(chosen.any()):
        raise DataError(
            f"{where} has no edge to predict: {table.num_edges:,} edges, of which "
            f"{int((table.y < 0).sum()):,} have no label. Check --only-unknown and --from."
        )
    return chosen


def _messages(table: EdgeTable, chosen: Tensor) -> tuple[Tensor | None, list[str]]:
    """Return a mask (M,) of the edges over which messages pass, and a note on them.

    These are the edges before the first one to predict. Without times, or if all edges
    are predicted, the mask is ``None``: they are all edges of the graph.
    """
    if table.time is None:
        return None, []
    if bool(chosen.all()):
        return None, [
            "Messages pass over all edges: later edges were read to predict earlier ones. "
            "Use --from TIME to predict only the edges from a time on."
        ]
    first = table.time[chosen][0]  # times are ascending
    earlier = table.time < first
    return earlier, [
        f"Messages pass over the {int(earlier.sum()):,} edges before the time "
        f"{float(first):.15g} of the first edge to predict."
    ]


def _predict_links(
    saved: SavedModel, owned: LocalGraphFile, where: Path | str, wanted: Wanted
) -> Prediction:
    """Score the given pairs, or the best partners of every node."""
    fitted, graph = fit_graph(owned, saved, where)
    notes = [*fitted.notes]
    nodes = PairNodes.of(graph, schema_of(saved.card))
    if wanted.pairs is None:
        assert wanted.top_k is not None
        pairs, score, note = best_partners(saved.model, graph, wanted.top_k, nodes)
        notes += [note] if note else []
    else:
        pairs = read_pairs(wanted.pairs, owned.ids, where, nodes)
        score = link_score(decode_pairs(saved.model, graph, pairs))
        codes = pair_codes(nodes.known, graph.num_nodes)
        known = int(torch.isin(pair_codes(pairs, graph.num_nodes), codes).sum())
        if known:
            notes.append(
                f"{known:,} of {len(score):,} pairs are edges of {where}, over which "
                "messages pass: their scores are too high to judge the model by."
            )
    sets, found = None, saved.card.calibration
    if found is not None:
        both = torch.stack([torch.zeros_like(score), score], dim=1)
        p = calibrated(both, found, is_free=False)
        score = score.to(torch.float64) / found.temperature
        if found.knots:
            score = p[:, 1].logit(eps=1e-12)
        sets = _conformal_sets(p, saved.card)
    text = " ".join([*notes, *_uncalibrated(saved.card)])
    return Prediction(_ends(owned, pairs), score[:, None], saved.card, text, sets)


def _predict_set(saved: SavedModel, owned: OwnedSet, where: Path | str) -> Prediction:
    """Predict the graphs of a set, some at a time."""
    dataset = owned.dataset
    fitted, union = fit_graph(owned, saved, where)
    with torch.inference_mode():
        logits = [saved.model(union.select(part)) for part in _parts(dataset)]
        ids = np.array(owned.ids, dtype=object)
        return _prediction({"graph": ids}, torch.cat(logits), saved, fitted.notes)


def _parts(dataset: GraphDataset) -> Iterator[Tensor]:
    """Yield consecutive graphs that have about ``NODES_AT_ONCE`` nodes together."""
    sizes = torch.bincount(dataset.batch, minlength=dataset.num_graphs)
    part = (sizes.cumsum(0) - sizes) // NODES_AT_ONCE
    _, counts = torch.unique_consecutive(part, return_counts=True)
    yield from torch.split(torch.arange(dataset.num_graphs), counts.tolist())


def _prediction(
    items: dict[str, Any],
    logits: Tensor,
    saved: SavedModel,
    notes: Sequence[str],
    edge_index: Tensor | None = None,
) -> Prediction:
    """Turn logits (I, C) into probabilities and sets, or outputs (I, T) into numbers.

    ``edge_index`` (2, 2E) are the edges between the items if these are all nodes.
    """
    card, sets = saved.card, None
    notes = [*notes, *_uncalibrated(card)]
    if card.target.has_numbers:
        assert saved.target_scale is not None  # a lost one was refused
        values = saved.target_scale.restore(logits)
    elif card.calibration is None:
        values = logits.sigmoid() if card.multi_label else logits.softmax(dim=1)
    else:
        values = calibrated(logits, card.calibration, is_free=card.multi_label)
        sets = _conformal_sets(values, card, logits, edge_index)
    return Prediction(items, values, card, " ".join(notes), sets)


def _conformal_sets(
    probability: Tensor,
    card: ModelCard,
    logits: Tensor | None = None,
    edge_index: Tensor | None = None,
) -> Tensor | None:
    """Return the sets (I, C) of a calibrated model, ``None`` if it has no threshold.

    The draws of their scores are the same in each call.
    """
    found = card.calibration
    if found is None or not found.coverage:
        return None
    u = conformal_draws(len(probability))
    around = None
    if found.score == DIFFUSED:
        assert logits is not None
        assert edge_index is not None  # the card has nodes
        around = Surroundings(logits, edge_index, u, torch.arange(len(u)))
    return in_sets(probability, found, u, around)


def conformal_draws(number: int) -> Tensor:
    """Return the uniform draws (n,) for the scores of items, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(number, generator=generator, dtype=torch.float64)


def _uncalibrated(card: ModelCard) -> list[str]:
    """Say why a model that was to be calibrated gives no sets or bounds."""
    found = card.calibration
    if found is None or found.coverage:
        return []
    what = "bounds" if card.target.has_numbers else "sets"
    if card.multi_label and found.source == "shared":
        return [
            'There are no sets: several labels get them with calibration = "owner".'
        ]
    return [
        f"There are no {what}: the model was calibrated with {found.items:,} validation "
        "items, too few for the coverage of the run."
    ]


def _ends(owned: LocalGraphFile, pairs: Tensor) -> dict[str, Any]:
    """Return the owner's identifiers of both ends of pairs (2, P)."""
    ids = owned.ids
    return {"source": ids[pairs[0].numpy()], "target": ids[pairs[1].numpy()]}
