"""Prompt generators: generated neighbours of synthetic nodes, FedLoG Eqs. (11)-(13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedlog.matching import HIDDEN, PromptTask, RandomNets
from flower_fgl.nn import GraphInput

__all__ = [
    "apply_generators",
    "blend_generators",
    "make_generator",
    "prompt_pairs",
    "train_prompt_generator",
]

WIDTHS = (256, 512)
DROPOUT = 0.5
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


def train_prompt_generator(
    generator: nn.Module,
    task: PromptTask,
    *,
    epochs: int,
    networks: int,
    lr: float,
    batch_size: int = 0,
) -> float:
    """Train PG_k by ``L_feat + L_grad``, FedLoG Eqs. (11)-(13), one step per epoch.

    The generator is trained in place, by Adam, then left in evaluation mode.
    ``networks`` is N, newly initialised in each epoch. ``batch_size`` is the number of
    training nodes with neighbours on which an epoch computes both losses, drawn anew in
    each; 0, or at least their number: all of them. Returns the loss of the last epoch.
    If no training node has a neighbour, nothing is trained and the loss is 0.

    Notes
    -----
    1. The paper sums Eq. (11) over all nodes of the graph. Here the sum covers training
       nodes with neighbours: labels of validation and test nodes are unknown, and nodes
       without neighbours have no target.
    2. With ``batch_size`` both sides of Eq. (12) use the same nodes, and ℓ_true all
       their neighbours. Time and memory of an epoch then depend on the batch and its
       neighbours, not on the size of the graph.
    3. Draws from torch's global generator.
    """
    task = task.with_fast_features()
    x, around, labels = task.features()
    places = task.has_neighbours.nonzero().squeeze(1)
    width = task.graph.num_features
    is_sampled = 0 < batch_size < len(x)
    optimizer = torch.optim.Adam(generator.parameters(), lr=lr, fused=True)
    loss = torch.zeros(())
    generator.train()
    for epoch in range(epochs if len(x) else 0):
        some, inputs, targets, classes = task, x, around, labels
        if is_sampled:
            drawn = torch.randperm(len(x))[:batch_size].to(places.device)
            some = task.batch(places[drawn])
            inputs, targets, classes = x[drawn], around[drawn], labels[drawn]
        rows = max(some.num_rows, 2 * len(inputs))
        at_once = max(1, min(networks, BUDGET // (rows * HIDDEN)))
        optimizer.zero_grad(set_to_none=True)
        prompts = generator(inputs)
        # networks run in groups to bound memory; gradients accumulate at the prompts
        leaf = prompts.detach().requires_grad_()
        loss = (leaf - targets).square().sum(1).mean()  # Eq. (11)
        slope = torch.autograd.grad(loss, leaf)[0]
        for start in range(0, networks, at_once):
            number = min(at_once, networks - start)
            nets = RandomNets.draw(number, width, task.num_classes, x.device)
            part = nets.mismatch(
                some, inputs, leaf, classes, is_whole=epoch == epochs - 1
            )
            part = part / networks
            slope = slope + torch.autograd.grad(part, leaf)[0]
            loss = loss + part
        prompts.backward(slope)
        optimizer.step()
        loss = loss.detach()
    generator.eval()
    return float(loss)
