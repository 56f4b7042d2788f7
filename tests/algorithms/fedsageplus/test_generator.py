from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedsageplus import (
    FeatureGenerator,
    HiddenNodes,
    MendedGraph,
    NeighbourGenerator,
    closest_rows,
    generator_loss,
    group_means,
    hide_nodes,
    match_loss,
)
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.fedsageplus import generator_shapes
from tests.algorithms.fedsageplus.test_graph_mending import sparse


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_closest_row_is_that_of_a_slow_loop(
    generator: torch.Generator, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flower_fgl.algorithms.fedsageplus.generator.CHUNK", 20
    )  # three at a time
    x = torch.randn(6, 4, generator=generator)
    made = torch.randn(7, 4, generator=generator)
    expected = [
        min(range(6), key=lambda u: float((m - x[u]).square().sum())) for m in made
    ]
    found = closest_rows(made, sparse(x) if is_sparse else x)
    assert found.tolist() == expected


def test_only_allowed_rows_are_matched() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0]])
    allowed = sparse(torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    made = torch.tensor([[0.1], [1.9], [1.9]])
    found = closest_rows(made, x, (allowed, torch.tensor([0, 0, 1])))
    assert found.tolist() == [1, 2, 0]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_feature_loss_of_two_vectors_by_hand(is_sparse: bool) -> None:
    # (1, 1) is nearest to (1, 0): 1; (0, 3) to (0, 2): 1; mean over 2 · 2 numbers
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    made = torch.tensor([[1.0, 1.0], [0.0, 3.0]], requires_grad=True)
    loss = match_loss(made, sparse(x) if is_sparse else x)
    loss.backward()
    assert loss.item() == pytest.approx(2 / 4)
    # derivative 2·(made − nearest) / 4
    torch.testing.assert_close(made.grad, torch.tensor([[0.0, 0.5], [0.0, 0.5]]))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_group_means_are_those_of_consecutive_rows(
    generator: torch.Generator, is_sparse: bool
) -> None:
    x = torch.randn(7, 4, generator=generator)
    x[x < 0] = 0
    found = group_means(sparse(x) if is_sparse else x, 3)
    torch.testing.assert_close(found, x.mean(dim=0, keepdim=True))
    found = group_means(sparse(x) if is_sparse else x, 2)
    expected = torch.stack([x[:2].mean(0), x[2:4].mean(0), x[4:].mean(0)])
    torch.testing.assert_close(found, expected)
    assert group_means(x, 8).shape == (0, 4)


@pytest.mark.parametrize("size", [5, 23, 64, 71])
def test_groups_of_two_sizes_never_differ_by_a_few_rows(size: int) -> None:
    # row i is the unit vector i, so a mean names the rows of its group
    rows = torch.eye(size)
    groups = {least: group_means(rows, least) > 0 for least in range(2, size + 1)}
    for small in groups:
        for large in range(small, size + 1):
            for group in groups[large]:
                inside = [g for g in groups[small] if bool((g & group).any())]
                assert torch.equal(torch.stack(inside).any(dim=0), group)
                assert int(group.sum()) >= large


def test_without_vectors_the_feature_loss_is_zero() -> None:
    assert match_loss(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0


def network_of(most: int = 5) -> NeighbourGenerator:
    torch.manual_seed(0)
    return NeighbourGenerator(
        FeatureGenerator(4, (3, 7), most, 6),
        num_features=6,
        hidden_channels=4,
        num_classes=2,
    )


def test_fgen_has_the_widths_of_the_agreed_shapes() -> None:
    method_config = FedSagePlusSettings(
        gen_channels=3, gen_wide_channels=7, max_neighbours=2
    )
    made = FeatureGenerator(4, (3, 7), 2, 6)
    found = {name: tuple(t.shape) for name, t in made.state_dict().items()}
    assert found == generator_shapes(method_config, in_channels=4, num_features=6)


def test_the_first_neighbours_of_each_node_are_generated() -> None:
    made = network_of(3).features
    inputs = torch.randn(2, 4)
    every = made(inputs).view(2, 3, 6)
    some = made.generate(inputs, torch.tensor([1, 3]))
    torch.testing.assert_close(some, torch.cat([every[0, :1], every[1]]))
    assert some.abs().max().item() <= 1  # tanh


def hidden_pair(toy: NodeDataset) -> tuple[HiddenNodes, MendedGraph]:
    """Hide nodes 2 and 4: 0, 1 miss node 2; 3 misses 2 and 4; 5 misses 4."""
    is_hidden = (torch.arange(6) == 2) | (torch.arange(6) == 4)
    impaired = hide_nodes(GraphInput(toy.x, toy.edge_index), is_hidden)
    wanted = impaired.wanted(5)
    owner = impaired.centres.repeat_interleave(wanted)
    nothing = torch.zeros(len(owner), 0)
    return impaired, MendedGraph(impaired.inputs, owner, nothing)


def test_the_loss_is_the_sum_of_three_terms_of_a_slow_loop(toy: NodeDataset) -> None:
    impaired, mended = hidden_pair(toy)
    network, noise = network_of(), torch.randn(4, 4)
    index, labels = torch.tensor([0, 3]), torch.tensor([0, 1])
    loss = generator_loss(network, impaired, mended, noise, index, labels)

    missing = {0: [2], 1: [2], 2: [2, 4], 3: [4]}  # nodes 0, 1, 3, 5 of the whole
    z = network.embed(impaired.inputs)
    predicted = network.count(z)
    counts = 0.0
    vectors: list[Tensor] = []
    squares: list[float] = []
    for v, lost in missing.items():
        gap = abs(predicted[v].item() - len(lost))
        counts += 0.5 * gap**2 if gap < 1 else gap - 0.5
        for p in range(len(lost)):
            made = network.features(z[v] + noise[v]).view(5, 6)[p]
            vectors.append(made)
            squares.append(min((made - toy.x[u]).square().mean().item() for u in lost))
    whole = torch.cat([toy.x[[0, 1, 3, 5]], torch.stack(vectors)])
    new = torch.tensor([[0, 1, 2, 2, 3], [4, 5, 6, 7, 8]])
    edges = torch.cat([impaired.inputs.edge_index, new, new.flip(0)], dim=1)
    logits = network.classifier(GraphInput(whole, edges))
    expected = counts / 4 + sum(squares) / 5
    expected += F.cross_entropy(logits[index], labels).item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("num_trained", [2, 0])
def test_every_part_is_trained(toy: NodeDataset, num_trained: int) -> None:
    impaired, mended = hidden_pair(toy)
    network = network_of()
    index, labels = torch.tensor([0, 3])[:num_trained], torch.arange(num_trained)
    noise = torch.zeros(4, 4)
    generator_loss(network, impaired, mended, noise, index, labels).backward()
    total = {
        name: sum(
            float(w.grad.abs().sum())
            for w in getattr(network, name).parameters()
            if w.grad is not None
        )
        for name in ("encoder", "counter", "features", "classifier")
    }
    # without training nodes the feature loss alone trains fGen
    assert min(total[name] for name in ("encoder", "counter", "features")) > 0
    assert (total["classifier"] > 0) == (num_trained > 0)


def test_without_training_nodes_and_lost_neighbours_only_the_counts_are_left(
    toy: NodeDataset,
) -> None:
    lonely = GraphInput(toy.x, torch.zeros((2, 0), dtype=torch.int64))
    impaired = hide_nodes(lonely, torch.arange(6) == 0)
    mended = MendedGraph(impaired.inputs, impaired.centres, torch.zeros(0, 0))
    network, none = network_of(), torch.zeros(0, dtype=torch.int64)
    loss = generator_loss(network, impaired, mended, torch.zeros(0, 4), none, none)
    predicted = network.count(network.embed(impaired.inputs))
    torch.testing.assert_close(loss, F.smooth_l1_loss(predicted, torch.zeros(5)))


def test_dgen_determines_the_number_of_generated_nodes_up_to_five(
    toy: NodeDataset,
) -> None:
    network = network_of()
    graph = GraphInput(toy.x, toy.edge_index)
    with torch.no_grad():
        network.counter.weight.zero_()
        for bias, each in ((1.4, 1), (2.6, 3), (99.0, 5), (-3.0, 0)):
            network.counter.bias.fill_(bias)
            owner, x = network.mend(graph, torch.Generator().manual_seed(0))
            assert owner.tolist() == [v for v in range(6) for _ in range(each)]
            assert x.shape == (6 * each, 6)


def test_a_generator_learns_the_missing_neighbours(toy: NodeDataset) -> None:
    impaired, mended = hidden_pair(toy)
    network = network_of()
    none = torch.zeros(0, dtype=torch.int64)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    noise = torch.zeros(4, 4)
    for _ in range(300):
        optimizer.zero_grad()
        loss = generator_loss(network, impaired, mended, noise, none, none)
        loss.backward()
        optimizer.step()
    assert network.count(network.embed(impaired.inputs)).round().tolist() == [
        1,
        1,
        2,
        1,
    ]
    assert loss.item() < 0.05
