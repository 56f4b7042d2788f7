"""Local training: the loop, its optimizer, and the optimizer's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import FglError
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.computation_graph import receptive_field

__all__ = [
    "DataLoss",
    "TrainingSet",
    "load_state",
    "make_optimizer",
    "optimizer_tensors",
    "refuse_non_finite",
    "restore_optimizer",
    "state_of",
    "train_and_check",
    "train_epochs",
]

FEW, FEW_IN_BATCH = 0.1, 0.05
"""Share of the nodes up to which training nodes, and those of a batch, are few: what a
batch is computed from is cut out anew for each."""

DataLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss of a step's nodes or graphs, in place of the cross-entropy: takes logits (b, C),
classes (b,) and numbers (b,) of them, returns a scalar."""


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The nodes, or graphs of a union, a client trains on.

    Parameters
    ----------
    inputs : GraphInput
        The graph as backbones take it.
    index : Tensor of shape (n,), int64
        Training nodes or graphs.
    labels : Tensor of shape (n,), int64
        Their classes.
    fields : dict of int to (GraphInput or None)
        What the training nodes are computed from, by reach: a memo.
    """

    inputs: GraphInput
    index: Tensor
    labels: Tensor
    fields: dict[int, GraphInput | None] = field(default_factory=dict, init=False)

    def logits(self, model: Backbone, index: Tensor) -> Tensor:
        """Predict some of the items, for a gradient.

        Parameters
        ----------
        model : Backbone
            The network.
        index : Tensor of shape (b,), int64
            Nodes, which need a pass over the whole graph (if they are few: over what
            they are computed from), or graphs, of which only these are passed through
            the model.

        Returns
        -------
        Tensor of shape (b, C)
        """
        inputs = self.inputs
        if inputs.batch is None and model.reach:
            part = self.field_of(model.reach, index)
            if part is not None:
                return model(part)  # type: ignore[no-any-return]
        if inputs.batch is None or len(index) == inputs.num_graphs:
            return model(inputs)[index]  # type: ignore[no-any-return]
        return model(inputs.select(index))  # type: ignore[no-any-return]

    def field_of(self, reach: int, index: Tensor) -> GraphInput | None:
        """Return the receptive field of some training nodes; ``None`` if it is large.

        It is not looked for unless they are few: of a fifth of the nodes it is most of
        the graph. That of all training nodes is kept. A batch has one on a CPU only:
        finding it waits for an accelerator several times, in every step.
        """
        if index is not self.index:
            are_few = len(index) <= FEW_IN_BATCH * self.inputs.num_nodes
            are_few &= self.inputs.device.type == "cpu"
            return (
                receptive_field(self.inputs, index, reach, is_batch=True)
                if are_few
                else None
            )
        if reach not in self.fields:
            are_few = len(index) <= FEW * self.inputs.num_nodes
            self.fields[reach] = (
                receptive_field(self.inputs, index, reach) if are_few else None
            )
        return self.fields[reach]


def make_optimizer(
    model: nn.Module, config: RunConfig, *, lr: float | None = None
) -> torch.optim.Optimizer:
    """Build the client optimizer that the settings name.

    Parameters
    ----------
    model : nn.Module
        Whose parameters it steps.
    config : RunConfig
        ``optimizer``, ``lr`` and ``weight-decay`` are read.
    lr : float, optional
        Instead of ``lr``.

    Returns
    -------
    torch.optim.Optimizer

    Notes
    -----
    1. Parameters that the model names in ``undecayed`` have no weight decay.
    """
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    rate = config.lr if lr is None else lr
    # fused steps copy what is laid out by columns; SGD is as fast without
    is_fused = config.optimizer != "sgd" or all(
        parameter.is_contiguous() for parameter in model.parameters()
    )
    options = {"lr": rate, "weight_decay": config.weight_decay, "fused": is_fused}
    exempt = {id(parameter) for parameter in getattr(model, "undecayed", ())}
    decayed = [p for p in model.parameters() if id(p) not in exempt]
    optimizer = kinds[config.optimizer](decayed, **options)  # type: ignore[arg-type]
    if exempt:
        others = [p for p in model.parameters() if id(p) in exempt]
        optimizer.add_param_group({"params": others, "weight_decay": 0.0})
    return optimizer


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
    """Give an optimizer the moments that :func:`optimizer_tensors` returned.

    Tensors whose parameter is gone or has another shape are left out.
    """
    parameters = dict(model.named_parameters())
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (tensor.dim() and tensor.shape != parameter.shape):
            continue
        # fused optimizers want moments in their parameter's layout, and the step counter
        # where the parameter is
        kept = tensor.to(parameter.device)
        if tensor.dim():
            kept = torch.empty_like(parameter).copy_(kept)
        optimizer.state[parameter][key] = kept


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model's state, names and shapes having been checked."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def refuse_non_finite(tensors: Mapping[str, Tensor], *, rate: str = "lr") -> None:
    """Stop before a trained model replaces the one that a client keeps.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        The model.
    rate : str
        Setting of its learning rate.

    Raises
    ------
    FglError
        If a weight is NaN or infinite. The client keeps what it had before the round.
    """
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise FglError(
                f'training left {bad} non-finite numbers in "{name}": the client keeps '
                f"what it had before. A smaller {rate} may help."
            )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's state."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def train_and_check(
    model: nn.Module,
    train: Callable[[int], float],
    validate: Callable[[], float],
    *,
    epochs: int,
    check_every: int,
    patience: int,
) -> float:
    """Train, and keep the weights that do best on the validation nodes.

    Parameters
    ----------
    model : nn.Module
        Ends with the weights of the best check, the earliest of equals; with the last
        ones if no check is above 0.
    train : callable
        Trains that many epochs on, and returns the loss.
    validate : callable
        Returns the validation score; NaN without validation nodes.
    epochs : int
        Epochs at most.
    check_every : int, positive
        Epochs between checks; the last epoch is checked too.
    patience : int
        Checks without a better one after which training ends; 0: never. Without
        validation nodes it never ends early.

    Returns
    -------
    float
        Loss of the last epoch trained; NaN if there was none.
    """
    best, kept, waited = 0.0, None, 0
    loss = float("nan")
    for start in range(0, epochs, check_every):
        loss = train(min(check_every, epochs - start))
        value = validate()
        if value > best:
            best, kept, waited = value, state_of(model), 0
        elif value <= best:  # false for NaN
            waited += 1
            if waited == patience:
                break
    if kept is not None:
        load_state(model, kept)
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
) -> float:
    """Minimise the cross-entropy, or another loss, of the training nodes or graphs.

    Parameters
    ----------
    model : Backbone
        Trained in place, in training mode.
    data : TrainingSet
        Graph, nodes and labels.
    optimizer : torch.optim.Optimizer
        Over the model's parameters.
    epochs : int
        Passes over the training nodes or graphs.
    batch_size : int
        Training nodes per step, each with a pass over the whole graph, or training
        graphs per step; 0 takes all of them in one step.
    data_loss : DataLoss, optional
        Instead of the mean cross-entropy.
    penalty : callable, optional
        Returns a term added to the loss of every step.
    generator : torch.Generator, optional
        Draws the batches.

    Returns
    -------
    float
        Mean loss over the steps of the last epoch; NaN without training nodes.

    Notes
    -----
    1. Dropout draws from torch's global generator: call this inside
       :func:`flower_fgl.core.seeds.seeded`.
    """
    model.train()
    size = int(data.index.numel())
    if size == 0:
        return float("nan")
    total = torch.zeros((), device=data.labels.device)
    steps = 1
    for _ in range(epochs):
        batches = [(data.index, data.labels)]
        if batch_size:
            order = torch.randperm(size, generator=generator).to(data.index.device)
            batches = [
                (data.index[part], data.labels[part])
                for part in torch.split(order, batch_size)
            ]
        total.zero_()
        steps = len(batches)
        for index, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            logits = data.logits(model, index)
            if data_loss is None:
                loss = F.cross_entropy(logits, labels)
            else:
                loss = data_loss(logits, labels, index)
            if penalty is not None:
                loss = loss + penalty()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
    return float(total) / steps
