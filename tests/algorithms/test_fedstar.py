"""FedStar's structure encodings and network, by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms import fedstar
from flower_fgl.algorithms.fedstar import (
    STRUCTURE,
    FedStarNet,
    degree_encoding,
    return_probabilities,
    structure_encoding,
)
from flower_fgl.methods.fedstar import FedStarSettings
from flower_fgl.nn import GraphInput

PATH = [[0, 1, 1, 2], [1, 0, 2, 1]]
TRIANGLE = [[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]]


def graph_of(edges: list[list[int]], nodes: int) -> GraphInput:
    return GraphInput(torch.randn(nodes, 5), torch.tensor(edges))


def a_batch() -> GraphInput:
    """Return a path of three, a triangle, and a node without edges."""
    shifted = [[v + 3 for v in row] for row in TRIANGLE]
    edges = [PATH[0] + shifted[0], PATH[1] + shifted[1]]
    batch = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    return GraphInput(torch.randn(7, 5), torch.tensor(edges), batch=batch)


def a_network(num_layers: int = 2, *, readout: bool = True) -> FedStarNet:
    torch.manual_seed(0)
    return FedStarNet(
        FedStarSettings(), model="gin", num_features=5, num_outputs=3, width=4,
        num_layers=num_layers, dropout=0.0, readout=readout,
    )  # fmt: skip


def test_return_probabilities_by_hand() -> None:
    path = return_probabilities(graph_of(PATH, 3), 4)
    expected = torch.tensor([[0, 0.5, 0, 0.5], [0, 1, 0, 1], [0, 0.5, 0, 0.5]])
    torch.testing.assert_close(path, expected)
    triangle = return_probabilities(graph_of(TRIANGLE, 3), 4)
    torch.testing.assert_close(
        triangle, torch.tensor([[0, 0.5, 0.25, 0.375]]).expand(3, 4)
    )


@pytest.mark.parametrize("columns", [1, 3, 1024])
def test_return_probabilities_equal_dense_powers(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedstar, "COLUMNS", columns)
    generator = torch.Generator().manual_seed(0)
    upper = (torch.rand(12, 12, generator=generator) < 0.3).triu(1).float()
    adjacency = upper + upper.T
    adjacency[5], adjacency[:, 5] = 0, 0  # isolated
    walk = adjacency / adjacency.sum(dim=0).clamp(min=1)  # A D⁻¹
    powers = [torch.linalg.matrix_power(walk, k).diagonal() for k in range(1, 6)]
    graph = GraphInput(torch.ones(12, 1), adjacency.nonzero().T)
    found = return_probabilities(graph, 5)
    torch.testing.assert_close(found, torch.stack(powers, dim=1))
    assert not found[5].any()


def test_a_batch_has_the_encodings_of_its_graphs() -> None:
    found = structure_encoding(a_batch(), 4, 3)
    torch.testing.assert_close(found[:3], structure_encoding(graph_of(PATH, 3), 4, 3))
    torch.testing.assert_close(
        found[3:6], structure_encoding(graph_of(TRIANGLE, 3), 4, 3)
    )
    assert found[6].tolist() == [0, 0, 0, 0, 1, 0, 0]


def test_selected_graphs_take_their_rows_without_a_second_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = a_batch()
    whole = structure_encoding(batch, 4, 3)
    monkeypatch.setattr(fedstar, "return_probabilities", None)
    some = batch.select(torch.tensor([2, 0])).select(torch.tensor([1]))
    assert torch.equal(structure_encoding(some, 4, 3), whole[:3])


def test_degrees_by_hand() -> None:
    star = graph_of([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]], 5)
    assert degree_encoding(star, 2).tolist() == [[0, 1], [1, 0], [1, 0], [1, 0], [1, 0]]


def test_the_network_equals_its_equations() -> None:
    graph, network = graph_of(PATH, 3), a_network(readout=False)
    e = network.encoder
    adjacency = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]])
    looped = adjacency + torch.eye(3)
    root = looped.sum(1).rsqrt()
    filtered = root[:, None] * looped * root
    x = e["input"](graph.x)
    s = e["structure"]["input"](structure_encoding(graph, 16, 16))
    for gin, gcn in zip(e["layers"], e["structure"]["layers"], strict=True):
        both = torch.cat([x, s], dim=1)
        x = gin.nn(both + adjacency @ both).relu()
        s = (filtered @ s @ gcn.lin.weight.T + gcn.bias).tanh()
    first, last = network.classifier
    expected = last(first(e["joint"](torch.cat([x, s], dim=1))).relu())
    torch.testing.assert_close(network(graph), expected)


def test_a_readout_sums_the_nodes() -> None:
    network, graph = a_network(), a_batch()
    nodes = network.embed_nodes(graph)
    torch.testing.assert_close(network.embed(graph)[1], nodes[3:6].sum(dim=0))


def test_the_shared_part_has_the_papers_size() -> None:
    network = FedStarNet(
        FedStarSettings(), model="gin", num_features=7, num_outputs=2, width=64,
        num_layers=3, dropout=0.5, readout=True,
    )  # fmt: skip
    shared = [t for n, t in network.state_dict().items() if n.startswith(STRUCTURE)]
    assert sum(t.numel() for t in shared) == 14_592


def test_the_loss_reaches_every_parameter() -> None:
    network, graph = a_network(), a_batch()
    F.cross_entropy(network(graph), torch.tensor([0, 1, 2])).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
