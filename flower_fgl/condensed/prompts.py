"""Prompt generators: a made-up neighbour for a synthetic node, FedLoG Eqs. (11)-(13).

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn import GraphInput
from flower_fgl.unions import select_rows

__all__ = [
    "PromptTask",
    "RandomNets",
    "apply_generators",
    "blend_generators",
    "make_generator",
    "prompt_pairs",
    "train_generator",
]

WIDTHS = (256, 512)
DROPOUT = 0.5
HIDDEN, OUT = 128, 64
"""Widths of the random networks of Eq. (12), those of the encoder."""
BUDGET = 1 << 24
"""Numbers in one activation of random networks that are computed together: 64 MB."""


def make_generator(num_features: int) -> nn.Sequential:
    """Return a prompt generator PG_k: from a node's features to a neighbour's.

    Parameters
    ----------
    num_features : int
        d.
    """
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

    ``PG^c = Σ_k r_k^c PG_k / Σ_k r_k^c``.

    Parameters
    ----------
    states : sequence of mapping of str to Tensor, float32
        Length K.
    weights : Tensor of shape (K, C), float32
        Columns add up to 1.

    Returns
    -------
    dict of str to Tensor of shape (C, ...), float32
        The states of all C generators, stacked.
    """
    return {
        name: torch.einsum(
            "kc,k...->c...", weights, torch.stack([s[name] for s in states])
        )
        for name in states[0]
    }


def apply_generators(stacked: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Make a prompt for each synthetic node by the generator of its class, at rest.

    Parameters
    ----------
    stacked : mapping of str to Tensor of shape (C, ...), float32
        What :func:`blend_generators` returned.
    x : Tensor of shape (C·s, d), float32
        x̂, class by class.

    Returns
    -------
    Tensor of shape (C·s, d), float32
        In [−1, 1].
    """
    weights = [tensor for name, tensor in stacked.items() if name.endswith("weight")]
    biases = [tensor for name, tensor in stacked.items() if name.endswith("bias")]
    h = x.view(len(weights[0]), -1, x.shape[1])
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        h = torch.baddbmm(bias[:, None], h.relu() if number else h, weight.mT)
    return h.tanh().view_as(x)


def prompt_pairs(x: Tensor, prompts: Tensor) -> GraphInput:
    """Return the graph of pairs: node i and its prompt, node n + i.

    Parameters
    ----------
    x, prompts : Tensor of shape (n, d), float32
    """
    first = torch.arange(len(x), device=x.device)
    second = first + len(x)
    edges = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    return GraphInput(torch.cat([x, prompts]), edges)


@dataclass(frozen=True, eq=False)
class PromptTask:
    """What a client's prompt generator learns from: training nodes with neighbours.

    Parameters
    ----------
    graph : GraphInput
        The client's graph.
    index : Tensor of shape (n,), int64
        All training nodes: those of ℓ_true.
    labels : Tensor of shape (n,), int64
        Their classes.
    num_classes : int
        C.
    """

    graph: GraphInput
    index: Tensor
    labels: Tensor
    num_classes: int

    def features(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is asked of the generator.

        Returns
        -------
        x : Tensor of shape (m, d), float32
            Features of the training nodes that have a neighbour.
        around : Tensor of shape (m, d), float32
            Mean features of their neighbours.
        labels : Tensor of shape (m,), int64
        """
        degree = torch.bincount(
            self.graph.edge_index[1], minlength=self.graph.num_nodes
        )
        has_any = degree[self.index] > 0
        rows = self.index[has_any]
        x = self.graph.x
        mean = self.graph.operator("mean").matmul(_dense(x))
        return _dense(select_rows(x, rows)), mean[rows], self.labels[has_any]


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout == torch.sparse_csr else x


@dataclass(frozen=True, eq=False)
class RandomNets:
    """N randomly initialised GraphSAGE networks with a linear classifier, as one.

    Parameters
    ----------
    number : int
        N.
    own, around : Tensor of shape (N·128, d), float32
        First layer: weights of a node and of its neighbours' mean, network by network.
    bias : Tensor of shape (N·128,), float32
    own_2, around_2 : Tensor of shape (N, 128, 64), float32
        Second layer.
    bias_2 : Tensor of shape (N, 64), float32
    classifier : Tensor of shape (N, 64, C), float32
    classifier_bias : Tensor of shape (N, C), float32
    """

    number: int
    own: Tensor
    around: Tensor
    bias: Tensor
    own_2: Tensor
    around_2: Tensor
    bias_2: Tensor
    classifier: Tensor
    classifier_bias: Tensor

    @classmethod
    def draw(
        cls,
        number: int,
        num_features: int,
        num_classes: int,
        device: torch.device | None = None,
    ) -> RandomNets:
        """Initialise as :class:`torch.nn.Linear` does, uniform in ±1/√(inputs).

        Draws from torch's global generator.
        """

        def uniform(shape: tuple[int, ...], inputs: int) -> Tensor:
            values = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5)
            return values.to(device).requires_grad_()

        d, wide = num_features, number * HIDDEN
        return cls(
            number,
            uniform((wide, d), d),
            uniform((wide, d), d),
            uniform((wide,), d),
            uniform((number, HIDDEN, OUT), HIDDEN),
            uniform((number, HIDDEN, OUT), HIDDEN),
            uniform((number, OUT), HIDDEN),
            uniform((number, OUT, num_classes), OUT),
            uniform((number, num_classes), OUT),
        )

    @property
    def encoder(self) -> tuple[Tensor, ...]:
        """The weights W of GraphSAGE, whose gradients are compared."""
        return (
            self.own,
            self.around,
            self.bias,
            self.own_2,
            self.around_2,
            self.bias_2,
        )

    def second(self, own: Tensor, around: Tensor, labels: Tensor) -> Tensor:
        """Finish the second layer, classify, and add up the N mean cross-entropies.

        Parameters
        ----------
        own : Tensor of shape (n, N, 128), float32
            Hidden representation of each node.
        around : Tensor of shape (n, N, 64), float32
            Mean of its neighbours' ones, mapped by ``around_2``.
        labels : Tensor of shape (n,), int64

        Returns
        -------
        Tensor of shape ()
        """
        out = torch.einsum("vnh,nho->vno", own, self.own_2) + around + self.bias_2
        logits = torch.einsum("vno,noc->vnc", out, self.classifier)
        logits = (logits + self.classifier_bias).transpose(1, 2)  # (n, C, N)
        targets = labels[:, None].expand(-1, self.number)
        return F.cross_entropy(logits, targets, reduction="sum") / len(labels)

    def true_loss(self, task: PromptTask) -> Tensor:
        """Return Σ_n ℓ_true of the training nodes in their graph, FedLoG Eq. (12)."""
        graph = task.graph
        h = graph.filtered_linear(
            None, self.around, self.bias, kind="mean", coefficients=(0.0, 1.0)
        )
        h = (h + graph.linear(None, self.own)).relu()
        h = h.view(-1, self.number, HIDDEN)
        around = torch.einsum("vnh,nho->vno", h, self.around_2).flatten(1)
        around = graph.operator("mean").matmul(around).view(-1, self.number, OUT)
        return self.second(h[task.index], around[task.index], task.labels)

    def pair_loss(self, x: Tensor, prompts: Tensor, labels: Tensor) -> Tensor:
        """Return Σ_n ℓ_syn of nodes whose one neighbour is their prompt, Eq. (12).

        Parameters
        ----------
        x, prompts : Tensor of shape (m, d), float32
        labels : Tensor of shape (m,), int64

        Returns
        -------
        Tensor of shape ()
        """
        plus, minus = self.own + self.around, self.own - self.around
        return self._pair_loss(x, prompts, labels, plus, minus)

    def _pair_loss(
        self, x: Tensor, prompts: Tensor, labels: Tensor, plus: Tensor, minus: Tensor
    ) -> Tensor:
        # what own and around give to x and its prompt, by two products instead of four
        a, b = F.linear(x + prompts, plus), F.linear(x - prompts, minus)
        node, prompt = (a + b) / 2 + self.bias, (a - b) / 2 + self.bias
        node, prompt = (h.relu().view(-1, self.number, HIDDEN) for h in (node, prompt))
        around = torch.einsum("vnh,nho->vno", prompt, self.around_2)
        return self.second(node, around, labels)

    def mismatch(
        self, task: PromptTask, x: Tensor, prompts: Tensor, labels: Tensor
    ) -> Tensor:
        """Return ``Σ_n Σ_W MSE(∇_W ℓ_syn, ∇_W ℓ_true)``, FedLoG Eq. (12).

        Networks share no weight, so that the gradient of the summed loss is that of
        each. MSE is the mean over the entries of a matrix.

        Notes
        -----
        The first layer's two matrices W and W' are compared as W + W' and W − W', whose
        gradients are half the sum and half the difference of theirs:
        ``‖a‖² + ‖b‖² = 2‖(a + b)/2‖² + 2‖(a − b)/2‖²``.
        """
        own, around, *true = torch.autograd.grad(self.true_loss(task), self.encoder)
        # row by row, as the gradients they are compared with
        own, around = own.contiguous(), around.contiguous()
        plus = (self.own + self.around).detach().requires_grad_()
        minus = (self.own - self.around).detach().requires_grad_()
        sums, differences, *made = torch.autograd.grad(
            self._pair_loss(x, prompts, labels, plus, minus),
            (plus, minus, *self.encoder[2:]),
            create_graph=True,
        )
        parts = [F.mse_loss(a, b) for a, b in zip(made, true, strict=True)]
        parts.append(2 * F.mse_loss(sums, (own + around) / 2))
        parts.append(2 * F.mse_loss(differences, (own - around) / 2))
        return self.number * torch.stack(parts).sum()


def train_generator(
    generator: nn.Module,
    task: PromptTask,
    *,
    epochs: int,
    networks: int,
    lr: float,
) -> float:
    """Train PG_k by ``L_feat + L_grad``, FedLoG Eqs. (11)-(13), one step an epoch.

    Parameters
    ----------
    generator : torch.nn.Module
        Trained in place, left in evaluation mode.
    task : PromptTask
        The client's training nodes.
    epochs : int
        Adam steps over all nodes.
    networks : int
        N, fresh initialisations per epoch.
    lr : float
        Learning rate.

    Returns
    -------
    float
        Loss of the last epoch; 0 if no training node has a neighbour, where nothing is
        trained.

    Notes
    -----
    1. The paper sums Eq. (11) over all nodes of the graph; labels of validation and test
       nodes are not known, and a node without neighbours has nothing to imitate.
    2. Draws from torch's global generator.
    """
    x, around, labels = task.features()
    width = task.graph.num_features
    rows = max(task.graph.num_nodes, 2 * len(x))
    at_once = max(1, min(networks, BUDGET // (rows * HIDDEN)))
    optimizer = torch.optim.Adam(generator.parameters(), lr=lr, fused=True)
    loss = torch.zeros(())
    generator.train()
    for _ in range(epochs if len(x) else 0):
        optimizer.zero_grad(set_to_none=True)
        prompts = generator(x)
        # the networks come in groups: the gradient gathers at the prompts meanwhile
        leaf = prompts.detach().requires_grad_()
        loss = (leaf - around).square().sum(1).mean()  # Eq. (11)
        slope = torch.autograd.grad(loss, leaf)[0]
        for start in range(0, networks, at_once):
            number = min(at_once, networks - start)
            nets = RandomNets.draw(number, width, task.num_classes, x.device)
            part = nets.mismatch(task, x, leaf, labels) / networks
            slope = slope + torch.autograd.grad(part, leaf)[0]
            loss = loss + part
        prompts.backward(slope)
        optimizer.step()
        loss = loss.detach()
    generator.eval()
    return float(loss)
