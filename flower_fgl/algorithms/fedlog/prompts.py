"""Prompt generators: generated neighbours of synthetic nodes, FedLoG Eqs. (11)-(13)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedlog.matching import (
    HIDDEN,
    PromptTask,
    RandomNets,
    TaskStack,
)
from flower_fgl.algorithms.fedlog.network import graphs_of
from flower_fgl.nn import GraphInput
from flower_fgl.nn.optimizers import Adam

__all__ = ["apply_generators", "blend_generators", "make_generator", "prompt_pairs"]
__all__ += ["train_prompt_generators"]

WIDTHS = (256, 512)
DROPOUT = 0.5
MOST_ROWS = 1 << 13
"""Nodes and prompts of the clients that train at once."""
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

    ``stacked`` is the result of :func:`blend_generators`, and ``x`` (C·s, d), or (K, C·s,
    d), is x̂, grouped by class. Prompts, of the same shape, are within [−1, 1].
    """
    weights = [tensor for name, tensor in stacked.items() if name.endswith("weight")]
    biases = [tensor for name, tensor in stacked.items() if name.endswith("bias")]
    shape = -1, len(weights[0]), x.shape[-2] // len(weights[0]), x.shape[-1]
    by_class = x.view(shape).transpose(0, 1)  # (C, K, s, d)
    h = by_class.flatten(1, 2)
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        h = torch.baddbmm(bias[:, None], h.relu() if number else h, weight.mT)
    return h.tanh().view_as(by_class).transpose(0, 1).reshape(x.shape)


def prompt_pairs(x: Tensor, prompts: Tensor) -> GraphInput:
    """Return the graph of pairs: node i and its prompt, node n + i; features (n, d).

    From those (K, n, d) of K clients, one of each.
    """
    first = torch.arange(x.shape[-2], device=x.device)
    second = first + x.shape[-2]
    edges = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    graph = graphs_of(torch.cat([x, prompts], dim=-2), edges)
    if x.dim() == 3:
        graph.shape = "pairs"
    return graph


def train_prompt_generators(
    generators: Sequence[nn.Sequential],
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

    Each takes one step per epoch, by Adam, in place; it is left in evaluation mode, with
    the gradients of its last step. If no training node of a client has a neighbour,
    nothing is trained and its losses are 0. Returns L_feat and L_grad of each client's
    last epoch.

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
    tasks = [task.with_fast_features() for task in tasks]
    features = [task.features() for task in tasks]
    losses = [(0.0, 0.0)] * len(tasks)
    learners = [
        PromptLearner(
            places,
            [generators[place] for place in places],
            [tasks[place] for place in places],
            [features[place] for place in places],
            lr=lr,
            batch_size=batch_sizes[places[0]],
            is_mean=is_mean,
        )
        for places in _together(tasks, [len(x) for x, _, _ in features], batch_sizes)
    ]
    for epoch in range(epochs if learners else 0):
        nets, is_last = networks(epoch), epoch == epochs - 1
        for learner in learners:
            drawn = [seeds(place, epoch) for place in learner.places]
            found = learner.step(nets, drawn, is_last=is_last)
            if is_last:
                for place, of_features, of_gradients in zip(
                    learner.places, *found.tolist(), strict=True
                ):
                    losses[place] = of_features, of_gradients
    for learner in learners:
        learner.end()
    for generator in generators:
        generator.eval()
    return losses


def _together(
    tasks: Sequence[PromptTask], counts: Sequence[int], batch_sizes: Sequence[int]
) -> list[list[int]]:
    """Divide clients that can train into those trained at once; one that draws is alone."""
    out: list[list[int]] = []
    rows = 0
    for place, (task, count, size) in enumerate(
        zip(tasks, counts, batch_sizes, strict=True)
    ):
        if not count:
            continue
        own = task.num_rows + 2 * count
        is_alone = 0 < size < count
        if is_alone or not out or rows < 0 or rows + own > MOST_ROWS:
            out.append([])
            rows = 0
        out[-1].append(place)
        rows = -1 if is_alone else rows + own
    return out


class PromptLearner:
    """Prompt generators of K clients in training, see :func:`train_prompt_generators`.

    ``places`` are those of the clients. One that draws batches is alone.
    """

    def __init__(
        self,
        places: Sequence[int],
        generators: Sequence[nn.Sequential],
        tasks: Sequence[PromptTask],
        features: Sequence[tuple[Tensor, Tensor, Tensor]],
        *,
        lr: float,
        batch_size: int,
        is_mean: bool,
    ) -> None:
        self.places, self._generators, self._is_mean = places, generators, is_mean
        # weights (K, in, out), the layout of their gradients, and biases (K, 1, out)
        self._stacked = {
            name: torch.stack([_turned(g.get_parameter(name)) for g in generators])
            .detach()
            .requires_grad_()
            for name, _ in generators[0].named_parameters()
        }
        self._optimizer = Adam(self._stacked.values(), lr=lr, fused=True)
        self._task, self._features = tasks[0], features[0]
        self._nodes = self._task.has_neighbours.nonzero().squeeze(1)
        self._batch_size = batch_size if batch_size < len(self._nodes) else 0
        self._stack = None if self._batch_size else TaskStack(tasks, features)

    def step(self, nets: RandomNets, seeds: Sequence[int], *, is_last: bool) -> Tensor:
        """Take one step; return L_feat and L_grad (2, K), the latter only if it is last.

        Random numbers are those that each client would draw with its seed alone.
        """
        device = self._task.graph.device
        order = [torch.Generator().manual_seed(seed) for seed in seeds]
        masks = order
        if device.type != "cpu":
            masks = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        stack = self._stack or self._draw(order[0])
        self._optimizer.zero_grad(set_to_none=True)
        prompts = self._generate(stack, masks)
        made = prompts.detach()
        share = stack.pairs.share[..., None]
        difference = (made - stack.targets) * (share > 0)
        if self._is_mean:
            share = share / made.shape[2]
        of_features = (difference.square() * share).flatten(1).sum(1)  # Eq. (11)
        of_gradients = torch.zeros_like(of_features)
        slope = difference * (2 * share)
        at_once = max(1, min(nets.number, BUDGET // (stack.size * HIDDEN)))
        for start in range(0, nets.number, at_once):
            part = nets.part(start, min(start + at_once, nets.number))
            losses, more = part.mismatch(
                stack, made, is_mean=self._is_mean, is_whole=is_last
            )
            of_gradients += losses / nets.number
            slope += more / nets.number
        prompts.backward(slope * (share > 0))  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return torch.stack([of_features, of_gradients])

    def _draw(self, generator: torch.Generator) -> TaskStack:
        """Draw the nodes of a step."""
        drawn = torch.randperm(len(self._nodes), generator=generator)
        drawn = drawn[: self._batch_size].to(self._nodes.device)
        few = self._task.batch(self._nodes[drawn])
        x, around, labels = (part[drawn] for part in self._features)
        return TaskStack([few], [(x, around, labels)])

    def _generate(
        self, stack: TaskStack, generators: Sequence[torch.Generator]
    ) -> Tensor:
        """Return the prompts (K, m, d), with dropout of each client's numbers."""
        h = stack.x
        for name, layer in self._generators[0].named_children():
            if isinstance(layer, nn.Linear):
                weight, bias = (
                    self._stacked[f"{name}.{n}"] for n in ("weight", "bias")
                )
                h = torch.baddbmm(bias, h, weight)
            elif not isinstance(layer, nn.Dropout):
                h = layer(h)
            elif layer.p:
                kept = torch.zeros_like(h)
                for row, count, generator in zip(
                    kept.unbind(), stack.counts, generators, strict=True
                ):
                    row[:count].bernoulli_(1 - layer.p, generator=generator)
                h = h * (kept / (1 - layer.p))
        return h

    def end(self) -> None:
        """Copy weights and gradients to the clients' generators."""
        for name, stacked in self._stacked.items():
            for place, generator in enumerate(self._generators):
                parameter = generator.get_parameter(name)
                parameter.data.copy_(_turned(stacked.detach()[place], parameter))
                if stacked.grad is not None:
                    parameter.grad = _turned(stacked.grad[place], parameter)


def _turned(values: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a weight (out, in) as (in, out), a bias (out,) as (1, out), or undo that."""
    turned = values.t() if values.dim() == 2 else values[None]
    return turned if like is None else turned.reshape(like.shape)
