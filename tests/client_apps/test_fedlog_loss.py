"""Comparison of FedLoG's training loss with a loop over nodes and prototypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedlog.network import BRANCH_NAMES, FedLogBranchNet
from flower_fgl.client_apps.fedlog import FedLogClientApp, new_network
from flower_fgl.client_apps.fedlog_training import LocalLearner
from tests.client_apps.test_fedlog import C, D, S, downloads, make_client

Edges = list[tuple[int, int]]
GAMMA = torch.tensor([0.1, 0.4, 0.7])
BATCH = torch.tensor([0, 3, 7, 20])  # the last one has no neighbour
THRESHOLD, BETA = 3, 0.5


def learner(**settings: Any) -> LocalLearner:
    """Make a client in its second round, with random weights in the message layers."""
    client = make_client(beta=BETA, **settings)
    later = downloads(client, FedLogClientApp())[1]
    network = new_network(client).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for branch in network.classifier.values():
            for layer in branch.layers:
                torch.nn.init.normal_(layer.scale.weight, std=0.3)
    client.state.set_group("prompts", dict(later.prompts))
    client.state.set_group("scaling", {"gamma": GAMMA})
    return LocalLearner(client, network, later.nodes)


def neighbours(node: int, edges: Edges) -> list[int]:
    return [u for u, v in edges if v == node]


def mean_of(rows: list[Tensor], width: int) -> Tensor:
    return torch.stack(rows).mean(0) if rows else torch.zeros(width)


def sage(layer: Any, x: Tensor, edges: Edges) -> Tensor:
    """One GraphSAGE layer, node by node."""
    out = []
    for v in range(len(x)):
        around = mean_of([x[u] for u in neighbours(v, edges)], x.shape[1])
        out.append(layer.lin_l(around) + layer.lin_r(x[v]))
    return torch.stack(out)


def embed(network: FedLogBranchNet, x: Tensor, edges: Edges) -> Tensor:
    """Eq. (1)."""
    first, second = network.encoder.encoder[0], network.encoder.classifier
    return sage(second, sage(first, x, edges).relu(), edges)


def log_p(network: FedLogBranchNet, name: str, h: Tensor, n: Tensor) -> Tensor:
    """Eqs. (2) and (6) to (10) of one node."""
    branch, nodes = network.classifier[name], network.nodes[name]
    prototypes = embed(network, nodes, [(j, j) for j in range(len(nodes))])
    h = branch.norm(h)
    for layer in branch.layers:
        moved = torch.zeros_like(h)
        for p in prototypes:
            d = (torch.cat([h, n]) - torch.cat([p, p])).square().sum()
            message = F.silu(
                layer.second(F.silu(layer.first(torch.cat([h, n, d[None]]))))
            )
            moved = moved + (h - p) * layer.scale(layer.trans(message))
        h = h + moved / len(prototypes)
    means = torch.stack([prototypes[c * S : (c + 1) * S].mean(0) for c in range(C)])
    return (-(h - means).square().sum(1)).log_softmax(0)


def loop_fitting(one: LocalLearner) -> Tensor:
    """L_cls + β L_norm."""
    network, graph = one.network, one.client.data.graph.graph
    edges = [(u, v) for u, v in graph.edge_index.T.tolist()]
    h = embed(network, graph.x, edges)
    total = torch.zeros(())
    for place in BATCH.tolist():
        v, y = int(one.data.index[place]), int(one.data.labels[place])
        around = [h[u] for u in neighbours(v, edges)]
        n = mean_of(around, h.shape[1])
        alpha = 1 / (1 + torch.tensor(THRESHOLD + 1.0 - len(around)).exp())
        head, tail = (log_p(network, name, h[v], n)[y] for name in BRANCH_NAMES)
        total = total - alpha * head - (1 - alpha) * tail
    norms = [0.5 * network.nodes[name].square().sum().sqrt() for name in BRANCH_NAMES]
    return total / len(BATCH) + BETA * (norms[0] + norms[1])


def loop_general(one: LocalLearner) -> tuple[Tensor, list[bool]]:
    """Return L_g and a mask of the correctly classified synthetic nodes; Eq. (5).

    Without generators a node is its own neighbour.
    """
    assert one.nodes is not None
    total, hits = torch.zeros(()), []
    names = sorted({name.rpartition(".")[0] for name in one.prompts})
    layers = [one.prompts[f"{n}.{kind}"] for n in names for kind in ("weight", "bias")]
    for row in range(C * S):
        c = row // S
        x = one.nodes[row] + GAMMA[c] * (one.nodes.mean(0) - one.nodes[row])
        z = x
        for k in range(0, len(layers), 2):
            z = layers[k][c] @ (z.relu() if k else z) + layers[k + 1][c]
        if layers:
            pair, edges = torch.stack([x, z.tanh()]), [(0, 1), (1, 0)]
        else:
            pair, edges = x[None], [(0, 0)]
        h = embed(one.network, pair, edges)
        head, tail = (log_p(one.network, name, h[0], h[-1]) for name in BRANCH_NAMES)
        total = total - 0.5 * head[c] - 0.5 * tail[c]
        hits.append(int((head.exp() + tail.exp()).argmax()) == c)
    return total / (C * S), hits


def slopes(one: LocalLearner, loss: Tensor) -> dict[str, Tensor]:
    named = dict(one.network.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(named.items(), found, strict=True)
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "pg"), [("fitting", True), ("general", True), ("general", False)]
)
def test_a_step_matches_the_loss_and_gradient_of_a_loop(part: str, pg: bool) -> None:
    one = learner(pg=pg)
    assert one.data.inputs.num_features == D
    assert not neighbours(
        int(one.data.index[BATCH[-1]]),
        [(u, v) for u, v in one.client.data.graph.graph.edge_index.T.tolist()],
    )
    prototypes = one.network.prototypes()
    if part == "fitting":
        loss, expected = one.fitting_loss(BATCH, prototypes), loop_fitting(one)
    else:
        loss, hits = one.general_loss(prototypes)
        expected, right = loop_general(one)
        assert hits.tolist() == right
        assert 0 < sum(right) < C * S
    torch.testing.assert_close(loss, expected)
    found, wanted = slopes(one, loss), slopes(one, expected)
    for name, tensor in found.items():
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(tensor, wanted[name], atol=1e-4 * scale, rtol=1e-3)
        assert scale > 0, name
