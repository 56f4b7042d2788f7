"""Prompt generators: generated neighbours of synthetic nodes, FedLoG Eqs. (11)-(13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedlog.matching import HIDDEN, PromptTask, RandomNets
from flower_fgl.core.seeds import seeded
from flower_fgl.nn import GraphInput
from flower_fgl.nn.optimizers import Adam

__all__ = ["apply_generators", "blend_generators", "make_generator", "prompt_pairs"]
__all__ += ["train_prompt_generators"]

WIDTHS = (256, 512)
DROPOUT = 0.5
TOGETHER = 16
"""Clients whose prompts are multiplied by the random networks' weights at once."""
BUDGET = 1 << 24
"""Size of one activation of the random networks computed together: 64 MB."""


def make_generator(num_features: int) -> nn.Sequential:
    """Return a prompt generator PG_k, which maps a node's features to a neighbour's."""
    first, second = WIDTHS
    return nn.Sequential(
        nn.Linear(num_features, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(second, num_features),
        nn.Tanh(),
    )


def blend_generators(
    states: Sequence[Mapping[str, Tensor]], weights: Tensor
) -> dict[str, Tensor]:
    """Average the clients' generators for each class, FedLoG Sec. 4.3.

    ``PG^c = Σ_k r_k^c PG_k / Σ_k r_k^c``. Each column of ``weights`` (K, C) sums to 1.
    Returns the states of all C generators, stacked: tensors (C, ...).
    """
    return {
        name: torch.einsum(
            "kc,k...->c...", weights, torch.stack([s[name] for s in states])
        )
        for name in states[0]
    }


def apply_generators(stacked: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Generate each synthetic node's prompt by its class's generator, no dropout.

    ``stacked`` is the result of :func:`blend_generators`, and ``x`` (C·s, d) is x̂,
    grouped by class. Prompts (C·s, d) are within [−1, 1].
    """
    weights = [tensor for name, tensor in stacked.items() if name.endswith("weight")]
    biases = [tensor for name, tensor in stacked.items() if name.endswith("bias")]
    h = x.view(len(weights[0]), -1, x.shape[1])
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        h = torch.baddbmm(bias[:, None], h.relu() if number else h, weight.mT)
    return h.tanh().view_as(x)


def prompt_pairs(x: Tensor, prompts: Tensor) -> GraphInput:
    """Return the graph of pairs: node i and its prompt, node n + i; features (n, d)."""
    first = torch.arange(len(x), device=x.device)
    second = first + len(x)
    edges = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    return GraphInput(torch.cat([x, prompts]), edges)


def train_prompt_generators(
    generators: Sequence[nn.Module],
    tasks: Sequence[PromptTask],
    *,
    epochs: int,
    networks: Callable[[int], RandomNets],
    seeds: Callable[[int, int], int],
    lr: float,
    batch_sizes: Sequence[int],
    is_mean: bool = False,
) -> list[tuple[float, float]]:
    """Train PG_k of some clients by ``L_feat + L_grad``, FedLoG Eqs. (11)-(13).

    Each takes one step per epoch, by Adam, in place; it is left in evaluation mode. If
    no training node of a client has a neighbour, nothing is trained and its losses are
    0. Returns L_feat and L_grad of each client's last epoch.

    ``networks`` returns the N networks of an epoch, the same for all clients: they are
    drawn once. ``seeds`` returns the seed of a client's draws, by its place and the
    epoch. An epoch computes both losses on so many (``batch_sizes``) training nodes
    with neighbours of each client, drawn anew; 0, or at least their number: all of
    them. With ``is_mean`` both losses are means over entries, as in the published code,
    instead of the squared norms that the paper prints.

    Notes
    -----
    1. The paper sums Eq. (11) over all nodes of the graph. Here the sum covers training
       nodes with neighbours: labels of validation and test nodes are unknown, and nodes
       without neighbours have no target.
    2. With a batch size both sides of Eq. (12) use the same nodes, and ℓ_true all
       their neighbours. Time and memory of an epoch then depend on the batch and its
       neighbours, not on the size of the graph.
    """
    learners = [
        PromptLearner(generator, task, lr=lr, batch_size=size, is_mean=is_mean)
        for generator, task, size in zip(generators, tasks, batch_sizes, strict=True)
    ]
    able = [place for place, learner in enumerate(learners) if len(learner.x)]
    losses = [(0.0, 0.0)] * len(learners)
    for epoch in range(epochs if able else 0):
        nets, is_last = networks(epoch), epoch == epochs - 1
        for start in range(0, len(able), TOGETHER):
            some = able[start : start + TOGETHER]
            for place in some:
                with seeded(seeds(place, epoch), tasks[place].graph.device):
                    learners[place].begin()
            match_gradients([learners[place] for place in some], nets, is_last=is_last)
            for place in some:
                losses[place] = learners[place].end()
    for generator in generators:
        generator.eval()
    return losses


def match_gradients(
    learners: Sequence[PromptLearner], nets: RandomNets, *, is_last: bool
) -> None:
    """Add L_grad, Eq. (12), to the losses and slopes of learners that have begun a step.

    The products of pairs with the large weights are computed for all of them at once.
    """
    few = [one for one in learners if nets.goes_by_nodes(one.some, one.inputs)]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    slopes: tuple[Tensor, Tensor] | None = None
    sizes = [len(one.inputs) for one in few]
    if few:
        inputs, prompts = (
            torch.cat([getattr(one, name) for one in few])
            for name in ("inputs", "leaf")
        )
        with torch.no_grad():
            products = nets.pair_products(inputs, prompts)
        slopes = torch.zeros_like(products[0]), torch.zeros_like(products[1])
        split = [zip(*(torch.split(t, sizes) for t in pair), strict=True)
                 for pair in (products, slopes)]  # fmt: skip
        found = {
            id(one): (made, slope) for one, made, slope in zip(few, *split, strict=True)
        }
    for one in learners:
        one.match(nets, *found.get(id(one), (None, None)), is_whole=is_last)
    if slopes is not None:
        for one, slope in zip(
            few, torch.split(nets.slope_of_prompts(*slopes), sizes), strict=True
        ):
            one.slope = one.slope + slope


class PromptLearner:
    """A client's prompt generator in training, see :func:`train_prompt_generators`.

    A step draws from torch's global generator when it begins. Until it ends, ``inputs``
    and ``leaf`` (m, d) are nodes and their prompts, and ``slope`` is the derivative of the
    loss by the prompts.
    """

    def __init__(
        self,
        generator: nn.Module,
        task: PromptTask,
        *,
        lr: float,
        batch_size: int,
        is_mean: bool,
    ) -> None:
        self._is_mean = is_mean
        self._task = self.some = task = task.with_fast_features()
        self.x, self._around, self._labels = task.features()
        self._places = task.has_neighbours.nonzero().squeeze(1)
        self._batch_size = batch_size if batch_size < len(self.x) else 0
        self._generator = generator.train()
        self._optimizer = Adam(generator.parameters(), lr=lr, fused=True)
        self.inputs, self._targets, self._classes = self.x, self._around, self._labels

    def begin(self) -> None:
        """Draw the nodes of a step, generate their prompts, compute Eq. (11)."""
        if self._batch_size:
            drawn = torch.randperm(len(self.x))[: self._batch_size]
            drawn = drawn.to(self._places.device)
            self.some = self._task.batch(self._places[drawn])
            self.inputs, self._targets = self.x[drawn], self._around[drawn]
            self._classes = self._labels[drawn]
        self._optimizer.zero_grad(set_to_none=True)
        self._prompts = self._generator(self.inputs)
        # networks run in groups to bound memory; gradients accumulate at the prompts
        self.leaf = self._prompts.detach().requires_grad_()
        difference = self._prompts.detach() - self._targets
        entries = difference.numel() if self._is_mean else len(difference)
        self._of_features = difference.square().sum() / entries  # Eq. (11)
        self._of_gradients = torch.zeros((), device=difference.device)
        self.slope = difference * (2 / entries)

    def match(
        self,
        nets: RandomNets,
        products: tuple[Tensor, Tensor] | None,
        slopes: tuple[Tensor, Tensor] | None,
        *,
        is_whole: bool,
    ) -> None:
        """Add Eq. (12) to the loss, and to the slope.

        Where ``products`` of :meth:`RandomNets.pair_products` are given, derivatives by
        them are written to ``slopes`` instead.
        """
        rows = max(self.some.num_rows, 2 * len(self.inputs))
        at_once = max(1, min(nets.number, BUDGET // (rows * HIDDEN)))
        for start in range(0, nets.number, at_once):
            stop = min(start + at_once, nets.number)
            wide = slice(start * HIDDEN, stop * HIDDEN)
            known = None
            if products is not None:
                a, b = (t[:, wide].detach().requires_grad_() for t in products)
                known = a, b
            part = nets.part(start, stop).mismatch(
                self.some,
                self.inputs,
                self.leaf,
                self._classes,
                is_mean=self._is_mean,
                is_whole=is_whole,
                products=known,
            )
            part = part / nets.number
            to_leaf, *to_products = torch.autograd.grad(
                part, (self.leaf, *(known or ()))
            )
            self.slope = self.slope + to_leaf
            for slope, value in zip(slopes or (), to_products, strict=True):
                slope[:, wide] = value
            self._of_gradients = self._of_gradients + part.detach()

    def end(self) -> tuple[float, float]:
        """Update the generator; return both losses, of the last step in full."""
        self._prompts.backward(self.slope)
        self._optimizer.step()
        return float(self._of_features), float(self._of_gradients)
