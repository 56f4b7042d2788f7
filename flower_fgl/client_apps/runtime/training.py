"""Local training: the training loop, the optimizer and its moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.core.score_names import is_better, kind_of_score
from flower_fgl.datasets.client_graph import Graph
from flower_fgl.nn import Backbone, GraphInput, optimizers
from flower_fgl.nn.backbone import is_finite
from flower_fgl.nn.computation_graph import receptive_field
from flower_fgl.nn.link import draw_negatives, pair_codes, pair_sides

if TYPE_CHECKING:
    from flower_fgl.nn.computation_graph import NeighborSampler

__all__ = ["Checks", "DataLoss", "EdgeTrainingSet", "LinkTrainingSet", "TrainingSet"]
__all__ += [
    "clip_steps",
    "copied",
    "load_state",
    "make_optimizer",
    "optimizer_tensors",
    "refuse_non_finite",
]
__all__ += ["restore_optimizer", "state_of", "train_and_check", "train_epochs"]

FIELD_SHARE, BATCH_FIELD_SHARE = 0.1, 0.05
"""Largest shares of nodes, for all training nodes and for one batch, for which a step
computes only their receptive field. A batch needs its own field in every step."""

DataLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss that replaces the cross-entropy of a step: takes logits (b, C), classes (b,), or
labels (b, C) if there are several, and indices (b,) of nodes or graphs; returns a
scalar."""

LONG = 500
"""Epochs from which an optimizer's steps are quick: moments may have become tiny."""


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The training nodes of a client, or the training graphs of its batch.

    ``index`` (n,) are nodes or graphs of ``inputs``; ``labels`` as in
    :class:`ClientData`. ``fields`` are cached receptive fields of all training nodes, by
    number of hops; ``samplers`` is that of the graph's neighbours, once it was needed.
    """

    inputs: GraphInput
    index: Tensor
    labels: Tensor
    fields: dict[int, GraphInput | None] = field(default_factory=dict, init=False)
    samplers: list[NeighborSampler] = field(default_factory=list, init=False)

    def epoch(self, generator: torch.Generator | None) -> TrainingSet:
        """Return the items of one epoch: itself, unless each epoch draws others."""
        return self

    def logits(self, model: Backbone, index: Tensor) -> Tensor:
        """Return differentiable logits (b, C) of some nodes or graphs.

        Nodes need a pass over the whole graph, a few nodes only one over their receptive
        field. Of several graphs only these are passed through the model.
        """
        inputs = self.inputs
        if inputs.batch is None and model.reach:
            part = self.field_of(model.reach, index)
            if part is not None:
                return model(part)  # type: ignore[no-any-return]
        if inputs.batch is None or len(index) == inputs.num_graphs:
            return model(inputs)[index]  # type: ignore[no-any-return]
        return model(inputs.select(index))  # type: ignore[no-any-return]

    def sampled_logits(
        self,
        model: Backbone,
        index: Tensor,
        limits: Sequence[int],
        generator: torch.Generator,
    ) -> Tensor:
        """Return differentiable logits (b, C) of some nodes from drawn neighbours.

        ``limits`` are the most neighbours per node in each layer, those of the last layer
        first; ConfigError if the network's layers are not as many, or not known.
        """
        if model.reach != len(limits):
            layers = "other" if model.reach is None else model.reach
            raise ConfigError(
                f"num-neighbors has {len(limits)} numbers, one for each layer of gcn, "
                f"graphsage or gin, but the client's network has {layers} layers."
            )
        from flower_fgl.nn.computation_graph import NeighborSampler

        if not self.samplers:
            self.samplers.append(NeighborSampler(self.inputs))
        part = self.samplers[0].draw(index, limits, generator)
        return model(part)  # type: ignore[no-any-return]

    def uses_small_batches(self, reach: int | None, batch_size: int) -> bool:
        """Return whether a batch may read only its field in a network of this reach."""
        if not reach or self.inputs.batch is not None:
            return False
        least = len(self.index) % batch_size or batch_size
        return least <= BATCH_FIELD_SHARE * self.inputs.num_nodes

    def part_for(self, model: Backbone) -> GraphInput | None:
        """Return the receptive field of all training nodes; ``None``: the whole graph."""
        if self.inputs.batch is not None or not model.reach or not len(self.index):
            return None
        return self.field_of(model.reach, self.index)

    def field_of(self, reach: int, index: Tensor) -> GraphInput | None:
        """Return the receptive field of some training nodes, ``None`` for many nodes."""
        # The field of a fifth of the nodes already covers most of the graph. A batch uses
        # its field on a CPU only: finding it would synchronize a GPU several times a step.
        is_batch = index is not self.index
        if not is_batch and reach in self.fields:
            return self.fields[reach]
        share = BATCH_FIELD_SHARE if is_batch else FIELD_SHARE
        are_few = len(index) <= share * self.inputs.num_nodes
        if is_batch:
            are_few &= self.inputs.device.type == "cpu"
        part = None
        if are_few:
            part = receptive_field(self.inputs, index, reach, is_batch=is_batch)
        if not is_batch:
            self.fields[reach] = part
        return part


@dataclass(frozen=True, eq=False)
class EdgeTrainingSet(TrainingSet):
    """Training edges with classes or numbers; ``index`` refers to pairs of ``inputs``."""

    def logits(self, model: Backbone, index: Tensor) -> Tensor:
        """Return differentiable logits of some edges, of shape (b, C)."""
        pairs, pair_x = self.inputs.pairs, self.inputs.pair_x
        assert pairs is not None
        assert pair_x is not None
        out: Tensor = model(self.inputs.with_pairs(pairs[:, index], pair_x[index]))
        return out


@dataclass(frozen=True, eq=False)
class LinkTrainingSet(TrainingSet):
    """Training edges as positives; :meth:`epoch` adds as many negatives.

    ``index`` refers to ``pairs`` (2, n) of nodes. ``known`` (T,) are codes of the T
    training edges on the CPU, see :func:`~flower_fgl.nn.link.pair_codes`; ``side`` (N,)
    is the side of each node if negatives join different ones, see
    :func:`~flower_fgl.nn.link.pair_sides`.

    Notes
    -----
    1. A negative is never a training edge. It may be a validation or test edge: a client
       that left these out would use them in training.
    2. All edges decide whether the graph is bipartite; the sides follow from the training
       edges alone.
    """

    pairs: Tensor
    known: Tensor
    side: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, inputs: GraphInput) -> LinkTrainingSet:
        """Return the training edges of a graph on the CPU with ``pairs``, and its input."""
        assert graph.pairs is not None
        pairs = graph.pairs[:, graph.masks["train"]]
        index = torch.arange(pairs.shape[1], device=inputs.device)
        edges, number = graph.pairs[:, graph.y == 1], graph.num_nodes
        return cls(
            inputs,
            index,
            torch.ones_like(index),
            pairs.to(inputs.device),
            pair_codes(pairs, number),
            pair_sides(edges, number, graph.node_type, pairs),
        )

    def epoch(self, generator: torch.Generator | None) -> LinkTrainingSet:
        """Return the training edges and as many new negatives, from a CPU generator."""
        if generator is None:
            raise ValueError("Link prediction needs a generator, to draw negatives.")
        number = len(self.known)
        drawn = draw_negatives(
            self.known, self.inputs.num_nodes, number, generator, self.side
        )
        pairs = torch.cat([self.pairs[:, :number], drawn.to(self.pairs.device)], dim=1)
        index = torch.arange(pairs.shape[1], device=pairs.device)
        return replace(self, index=index, labels=(index < number).long(), pairs=pairs)

    def logits(self, model: Backbone, index: Tensor) -> Tensor:
        """Return differentiable logits of some pairs, of shape (b, 2)."""
        out: Tensor = model(self.inputs.with_pairs(self.pairs[:, index]))
        return out


def make_optimizer(
    model: nn.Module, config: RunConfig, *, lr: float | None = None
) -> torch.optim.Optimizer:
    """Build the client optimizer that the settings name; ``lr`` replaces that setting.

    Parameters listed in the model's attribute ``undecayed`` have no weight decay; its
    attribute ``clipped`` names parts and the norm to which :func:`clip_steps` scales them.
    """
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "adam": optimizers.Adam,
        "adamw": optimizers.AdamW,
        "sgd": optimizers.SGD,
    }
    rate = config.lr if lr is None else lr
    options = {"lr": rate, "weight_decay": config.weight_decay, "fused": True}
    exempt = {id(parameter) for parameter in getattr(model, "undecayed", ())}
    decayed = [p for p in model.parameters() if id(p) not in exempt]
    optimizer = kinds[config.optimizer](decayed, **options)  # type: ignore[arg-type]
    if exempt:
        others = [p for p in model.parameters() if id(p) in exempt]
        optimizer.add_param_group({"params": others, "weight_decay": 0.0})
    turn_for_steps(optimizer)
    clip_steps(optimizer, config.clip_gradient)
    parts, norm = getattr(model, "clipped", ((), 0.0))
    clip_steps(optimizer, norm, parts)
    epochs = config.local_epochs * (
        1 if config.optimizer_state == "reset" else config.rounds
    )
    return optimizer if lr is None and epochs < LONG else optimizers.quick(optimizer)


def turn_for_steps(optimizer: torch.optim.Optimizer) -> None:
    """Transpose column-major parameters for the time of a step, without copies.

    A fused step would copy them, their gradients and moments to row-major order and back.
    """
    turned = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.dim() == 2 and not parameter.is_contiguous()
    ]

    # a hook that held the optimizer would keep it, its weights and moments until Python's
    # collector of cycles runs
    def turn(stepped: torch.optim.Optimizer, *_: object) -> None:
        for parameter in turned:
            grad = parameter.grad
            parameter.data = parameter.data.t()
            parameter.grad = None if grad is None else grad.t()
            state = stepped.state[parameter]
            state |= {key: t.t() for key, t in state.items() if t.dim() == 2}

    if turned:
        optimizer.register_step_pre_hook(turn)
        optimizer.register_step_post_hook(turn)


def clip_steps(
    optimizer: torch.optim.Optimizer, norm: float, parts: Sequence[nn.Module] = ()
) -> None:
    """Scale the gradient of each step, or of each of the ``parts``, to an L2 ``norm``."""

    def clip(stepped: torch.optim.Optimizer, *_: object) -> None:
        every = [p for group in stepped.param_groups for p in group["params"]]
        for one in [list(part.parameters()) for part in parts] or [every]:
            nn.utils.clip_grad_norm_(one, norm)

    if norm:
        optimizer.register_step_pre_hook(clip)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return the optimizer's moments by ``<moment>/<parameter>``."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Restore moments of :func:`optimizer_tensors`; ignore those that do not fit."""
    parameters = dict(model.named_parameters())
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (tensor.dim() and tensor.shape != parameter.shape):
            continue
        # a fused optimizer needs the moments in their parameter's memory layout, and the
        # step counter on the parameter's device
        kept = tensor.to(parameter.device)
        if tensor.dim():
            kept = torch.empty_like(parameter).copy_(kept)
        optimizer.state[parameter][key] = kept


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy tensors, whose names and shapes the caller has checked, into a model."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def refuse_non_finite(tensors: Mapping[str, Tensor], *, rate: str = "lr") -> None:
    """Raise an error for a trained model with NaN or infinite weights.

    ``rate`` is the name of the setting of the learning rate, for the message.
    """
    # how many numbers, and where, would tell the server something about the data
    if not all(map(is_finite, tensors.values())):
        raise FglError(
            "training left non-finite numbers in the model: the client keeps its state "
            f"from before the round. Try a smaller {rate}."
        )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's state."""
    return copied(model.state_dict())


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class Checks:
    """The validation checks of one training: the best weights, and when to stop.

    ``kept`` are the weights of the best check, the earliest one of equal checks; ``None``
    before a check above 0 (an error may be 0). ``patience`` counts checks without
    improvement; 0 never stops.
    """

    def __init__(self, patience: int, score: str = "accuracy") -> None:
        self._patience, self._score = patience, score
        self._best = float("nan") if kind_of_score(score).is_lower else 0.0
        self._waited = 0
        self.kept: dict[str, Tensor] | None = None

    def note(self, value: float, state: Callable[[], dict[str, Tensor]]) -> bool:
        """Take the score of a check and the weights; return whether to stop."""
        if is_better(self._score, value, self._best):
            self._best, self.kept, self._waited = value, state(), 0
        elif self.kept is not None or not math.isnan(value):  # no nodes, or diverged
            self._waited += 1
            return self._waited == self._patience
        return False


def train_and_check(
    model: nn.Module,
    train: Callable[[int], float],
    validate: Callable[[], float],
    *,
    epochs: int,
    check_every: int,
    patience: int,
    score: str = "accuracy",
) -> float:
    """Train with early stopping, and restore the weights of the best validation score.

    The model ends with the weights of the best check, see :class:`Checks`, or with the
    last weights. ``train`` takes a number of epochs and returns the loss; ``validate``
    returns the ``score``, NaN without validation nodes: training then never stops early.
    The last of the ``epochs`` is checked too. The result is the loss of the last trained
    epoch; NaN without epochs.
    """
    checks, loss = Checks(patience, score), float("nan")
    for start in range(0, epochs, check_every):
        loss = train(min(check_every, epochs - start))
        if checks.note(validate(), lambda: state_of(model)):
            break
    if checks.kept is not None:
        load_state(model, checks.kept)
    return loss


def train_epochs(
    model: Backbone,
    data: TrainingSet,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch_size: int = 0,
    data_loss: DataLoss | None = None,
    penalty: Callable[[], Tensor] | None = None,
    generator: torch.Generator | None = None,
    num_neighbors: Sequence[int] = (),
) -> float:
    """Minimize the cross-entropy, or ``data_loss``, of the training nodes or graphs.

    ``batch_size`` 0 takes all in one step. ``generator`` draws the batches;
    ``num_neighbors`` are the most neighbours per node in each layer that a batch reads,
    those of the last layer first, or all. A batch makes no step if its loss depends on
    no output. The result is the mean loss over the steps of the last epoch; NaN without
    any. Dropout draws from torch's global generator: call this inside
    :func:`flower_fgl.core.seeds.seeded`.
    """
    model.train()
    size = int(data.index.numel())
    if size == 0:
        return float("nan")
    total = torch.zeros((), device=data.labels.device)
    steps = 1
    for _ in range(epochs):
        items = data.epoch(generator)
        batches = [(items.index, items.labels)]
        if batch_size:
            size = len(items.index)
            order = torch.randperm(size, generator=generator).to(items.index.device)
            batches = [
                (items.index[part], items.labels[part])
                for part in torch.split(order, batch_size)
            ]
        total.zero_()
        steps = 0
        for index, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            if num_neighbors and generator is not None:
                logits = data.sampled_logits(model, index, num_neighbors, generator)
            else:
                logits = items.logits(model, index)
            if data_loss is None:
                loss = F.cross_entropy(logits, labels)
            else:
                loss = data_loss(logits, labels, index)
                if not loss.requires_grad:  # nothing of the batch is known: no step
                    continue
            if penalty is not None:
                loss = loss + penalty()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
            steps += 1
    return float(total) / steps if steps else float("nan")
