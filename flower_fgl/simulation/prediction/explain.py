"""Explain one prediction: the features and the edges that carry its score."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import calibrated
from flower_fgl.algorithms.explanation import (
    STEPS,
    drops,
    edge_mask,
    integrated_gradients,
    overlap,
)
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.saved_model import SavedModel, load_model
from flower_fgl.simulation.prediction.neighbourhood import (
    Neighbourhood,
    cut_out,
    cut_out_graph,
)
from flower_fgl.simulation.prediction.predict import require_scale
from flower_fgl.simulation.prediction.table import task_of

__all__ = ["Explanation", "explain_item"]

SEEDS = 5
"""Masks that are learned from different draws, and averaged."""
DRAWS = 20
"""Random sets of edges to which the named ones are compared."""
MOST_EDGES, MOST_LOWERING, MOST_FEATURES = 10, 3, 10
"""Edges that raise the score, edges that lower it, and features that are named."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What carries the score of one item; nothing of it leaves this process.

    ``what`` is the explained class, label or number, ``score`` its probability or value,
    ``baseline`` that with all features 0, and ``without_edges`` that without any edge.
    ``features`` have name, attribution over all nodes, and attribution of the item's own
    nodes (``ends``), ``other_features`` number and sum of those that are not named; all
    together lead from ``baseline`` to ``score``. ``drawing`` holds both ends
    and the attribution of all edges that influence the score; they lead from
    ``without_edges`` to it. ``edges`` are the largest of them, with the number of masks
    that have them on top, and ``labels`` their relation or features, empty if the model
    reads none. ``lowering`` are those that lower the score most, and their labels.
    ``overlap`` is the mean Jaccard overlap of the top edges of the masks, NaN
    without edges. ``drop`` is the score minus that without the named edges, ``mask_drop``
    the same of the top edges of the mean mask, ``random_drops`` of as many random edges,
    several times.
    """

    item: str
    what: str
    score: float
    baseline: float
    features: list[tuple[str, float, float]]
    other_features: tuple[int, float]
    without_edges: float
    edges: list[tuple[str, str, float, int]]
    labels: list[str]
    lowering: list[tuple[str, str, float, str]]
    overlap: float
    drop: float
    mask_drop: float
    random_drops: list[float]
    drawing: list[tuple[str, str, float]] = field(repr=False)
    ends: tuple[str, ...]
    card: ModelCard = field(repr=False)

    @property
    def text(self) -> str:
        """Say in a few lines what carries the score."""
        lines = [f"{self.item}: {self.what}, score {self.score:.4g}"]
        lines.append(f"Features (from {self.baseline:.4g} with all of them 0):")
        lines += [
            f"  {name}: {total:+.4g}, of which own {own:+.4g}"
            for name, total, own in self.features
        ]
        lines += _others("features", *self.other_features)
        found = [total for _, total, _ in self.features]
        found.append(self.other_features[1])
        lines += _missed(self.score - self.baseline, found)
        if not self.edges:
            return "\n".join([*lines, "No edge influences the score."])
        lines.append(
            f"Edges, of {len(self.drawing):,} that influence the score (from "
            f"{self.without_edges:.4g} without any):"
        )
        lines += [
            f"  {_edge(one, other, label)}: {value:+.4g} "
            f"(on top in {count} of {SEEDS} masks)"
            for (one, other, value, count), label in zip(
                self.edges, self.labels, strict=True
            )
        ]
        lines += [
            f"  {_edge(one, other, label)}: {value:+.4g} (lowers the score)"
            for one, other, value, label in self.lowering
        ]
        named = [edge[2] for edge in (*self.edges, *self.lowering)]
        every = [value for _, _, value in self.drawing]
        rest = math.fsum(every) - math.fsum(named)
        lines += _others("edges", len(every) - len(named), rest)
        lines += _missed(self.score - self.without_edges, every)
        mean = math.fsum(self.random_drops) / len(self.random_drops)
        first = f"{len(self.edges)} edges" if len(self.edges) > 1 else "edge"
        lines.append(
            f"Without the first {first} the score drops by {self.drop:.4g}; without as "
            f"many random ones by {mean:.4g} on average, at most "
            f"{max(self.random_drops):.4g}."
        )
        lines.append(
            f"Masks of GNNExplainer from {SEEDS} draws: their top edges overlap by "
            f"{self.overlap:.2f}, and without those of their mean the score drops by "
            f"{self.mask_drop:.4g}."
        )
        return "\n".join(lines)


def _edge(one: str, other: str, label: str) -> str:
    """Name an edge, with its relation or features if the model reads some."""
    return f"{one} - {other} [{label}]" if label else f"{one} - {other}"


def _others(what: str, number: int, total: float) -> list[str]:
    """Return the line of those that are not named, so that a reader can add up."""
    return [f"  the other {number:,} {what} together: {total:+.4g}"] if number else []


def _missed(difference: float, found: Sequence[float]) -> list[str]:
    """Return the line of what attributions lack to a difference, if over 1 % of them."""
    total = math.fsum(found)
    if abs(difference - total) <= 0.01 * math.fsum(map(abs, found)):
        return []
    return [
        f"  not attributed, since the score jumps between {STEPS} points of the path: "
        f"{difference - total:+.4g}"
    ]


def explain_item(
    model: Path,
    graph: Path | str | Any,
    item: Sequence[str],
    *,
    target: str = "",
    seed: int = 0,
) -> Explanation:
    """Explain the prediction for one item of a graph; say how faithful this is.

    ``model`` is the model folder of a data owner, or a run folder, and ``graph`` as for
    ``predict``. ``item`` is the identifier of a node or a graph, or the two of an edge or
    a pair of nodes; of several edges between the same nodes the last one listed is
    explained, and the result says so.
    ``target`` is the class, label or number to explain, by default the predicted class,
    the most probable label, or the first number. ``seed`` is that of the masks and of the
    random edges.

    A RunError says that the model cannot be read; a ConfigError that the number of
    identifiers or the target does not fit, or the network cannot be explained; a
    DataError that the graph lacks the item, or does not fit the model.
    """
    saved = load_model(model)
    card = saved.card
    require_scale(card)
    task = task_of(card)
    times = {"edges": "twice, for both ends", "links": "twice, for both ends"}
    if len(item) != (2 if task in times else 1):
        raise ConfigError(
            f"The model predicts {task}: give --item {times.get(task, 'once')}, got "
            f"{len(item)} identifiers."
        )
    problem = cut_out_graph(saved, graph, item[0]) if task == "graphs" else None
    problem = problem or cut_out(saved, graph, item, task)
    name = " - ".join(item)
    if problem.listed > 1:
        name += f" (the last listed of {problem.listed:,} such edges)"
    return _explain(saved, problem, name, target, seed)


def _explain(
    saved: SavedModel, problem: Neighbourhood, item: str, target: str, seed: int
) -> Explanation:
    """Attribute the score of an item, and measure how faithful that is."""
    both, labels, _ = problem.edges
    outputs, x = _outputs(saved, problem), problem.graph.x
    _require_mask(saved, problem, outputs)
    ones = torch.ones(both.shape[1])
    with torch.no_grad():
        first = outputs(x, ones)
    number, what = _target(saved.card, first, target)

    def score_of(x: Tensor, weight: Tensor) -> Tensor:
        return outputs(x, weight)[number]

    gains = integrated_gradients(lambda x: score_of(x, ones), x)
    gains_of_edges = integrated_gradients(lambda w: score_of(x, w), ones)
    used = gains_of_edges.nonzero().flatten()
    gains_of_edges = gains_of_edges[used]
    full = float(first[number])

    def masked(part: Tensor) -> Tensor:
        return score_of(x, ones.index_copy(0, used, part))

    def loss(part: Tensor) -> Tensor:
        if saved.card.target.has_numbers:
            # keeping the number instead would balance edges that raise and lower it
            assert saved.target_scale is not None
            return -masked(part) / float(saved.target_scale.std[number])
        return -masked(part).clamp(min=1e-12).log()

    k = min(MOST_EDGES, max(1, len(used) // 2)) if len(used) else 0
    best = gains_of_edges.topk(k).indices
    masks, tops = [], []
    for run in range(SEEDS if k else 0):
        generator = torch.Generator().manual_seed(seed * SEEDS + run)
        masks.append(edge_mask(loss, len(used), generator))
        tops.append(set(masks[-1].topk(k).indices.tolist()))
    drop = mask_drop = math.nan
    others: list[float] = []
    if k:
        generator = torch.Generator().manual_seed(seed)
        drop, others = drops(masked, len(used), best, generator, DRAWS)
        top = torch.stack(masks).mean(dim=0).topk(k).indices
        mask_drop, _ = drops(masked, len(used), top, generator, 0)
    features, other_features = _top_features(gains.detach(), problem)
    worst = gains_of_edges.topk(min(MOST_LOWERING, len(used)), largest=False).indices
    named = [
        (problem.names[one], problem.names[other])
        for one, other in both[:, used].T.tolist()
    ]
    return Explanation(
        item=item,
        what=what,
        score=full,
        baseline=float(outputs(torch.zeros_like(x), ones)[number].detach()),
        features=features,
        other_features=other_features,
        without_edges=float(masked(torch.zeros(len(used))).detach()),
        edges=[
            (*named[j], float(gains_of_edges[j]), sum(j in top for top in tops))
            for j in best.tolist()
        ],
        labels=[labels[k] for k in used[best].tolist()],
        lowering=[
            (*named[j], float(gains_of_edges[j]), labels[int(used[j])])
            for j in worst.tolist()
            if gains_of_edges[j] < 0 and j not in best
        ],
        overlap=overlap(tops),
        drop=drop,
        mask_drop=mask_drop,
        random_drops=others,
        drawing=[
            (*pair, value)
            for pair, value in zip(named, gains_of_edges.tolist(), strict=True)
        ],
        ends=()
        if problem.is_graph
        else tuple(problem.names[k] for k in problem.places.tolist()),
        card=saved.card,
    )


def _outputs(
    saved: SavedModel, problem: Neighbourhood
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of features and weights of edges: outputs (C,)."""
    card, scale = saved.card, saved.target_scale
    task, found = task_of(card), saved.card.calibration
    temperature = 1.0 if found is None else found.temperature

    def outputs(x: Tensor, weight: Tensor) -> Tensor:
        graph = problem.graph.with_features(x)
        graph = graph.masked(weight, problem.edges.of, saved.model.edge_direction)
        logits: Tensor = saved.model(graph)
        logits = logits[problem.places[0] if task == "nodes" else 0] / temperature
        if card.target.has_numbers:
            assert scale is not None
            return logits * scale.std.float() + scale.mean.float()
        return logits.sigmoid() if card.multi_label else logits.softmax(dim=0)

    return outputs


def _require_mask(
    saved: SavedModel,
    problem: Neighbourhood,
    outputs: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Raise a ConfigError if a method's own network reads edges past their weights."""
    if not saved.card.settings or task_of(saved.card) != "nodes":
        return
    graph, none = problem.graph, torch.zeros(problem.edges.ends.shape[1])
    bare = graph.with_edges(graph.edge_index[:, :0])
    empty = problem.edges._replace(ends=none.new_zeros(2, 0), of=[none[:0].long()])
    without = _outputs(saved, replace(problem, graph=bare, edges=empty))
    with torch.no_grad():
        masked, removed = outputs(graph.x, none), without(graph.x, none[:0])
    if not torch.allclose(masked, removed, atol=1e-3):
        raise ConfigError(
            f"The network of {saved.card.method} reads edges in a way that weights of "
            "edges do not change, so they cannot be explained. Use a model of another "
            "method."
        )


def _target(card: ModelCard, outputs: Tensor, target: str) -> tuple[int, str]:
    """Return number and name of the output to explain."""
    names = card.target.names
    if target:
        if target not in names:
            raise ConfigError(
                f'The model predicts no "{target}". {nearest(target, names)}'
            )
        return names.index(target), target
    found = card.calibration
    if found is not None and found.knots:  # isotonic maps may choose another class
        logits = outputs.logit() if card.multi_label else outputs.log()
        logits = found.temperature * logits.unsqueeze(0)
        outputs = calibrated(logits, found, is_free=card.multi_label).squeeze(0)
    number = 0 if card.target.has_numbers else int(outputs.argmax())
    if task_of(card) == "links":
        number = 1
    return number, names[number]


def _top_features(
    gains: Tensor, problem: Neighbourhood
) -> tuple[list[tuple[str, float, float]], tuple[int, float]]:
    """Return the features with the largest attributions, and number and sum of others."""
    rows = sorted(set(problem.places.tolist()))
    total, own = gains.sum(dim=0), gains[rows].sum(dim=0)
    names = problem.columns or [f"feature {k}" for k in range(len(total))]
    order = total.abs().topk(min(MOST_FEATURES, len(total))).indices.tolist()
    top = [(names[k], float(total[k]), float(own[k])) for k in order if float(total[k])]
    rest = total.index_fill(0, torch.tensor(order), 0.0)
    return top, (int(rest.count_nonzero()), float(rest.sum()))
