from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

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
from flower_fgl.core.model_spec import TYPED
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.methods.fedsageplus import FedSagePlusSettings
from flower_fgl.nn import MODELS, GraphInput, build_model
from flower_fgl.nn.models import backbone_class
from flower_fgl.protocols.fedsageplus import generator_shapes
from tests.support.sparse import sparse


@pytest.mark.parametrize("is_sparse", [False, True])
def test_hiding_a_node_records_the_nodes_that_lost_it(
    toy: NodeDataset, is_sparse: bool
) -> None:
    # node 2 is a neighbour of 0, 1 and 3; of the seven edges three go
    x = sparse(toy.x) if is_sparse else toy.x
    found = hide_nodes(GraphInput(x, toy.edge_index), torch.arange(6) == 2)
    assert found.kept.tolist() == [0, 1, 3, 4, 5]
    assert found.counts.tolist() == [1, 1, 1, 0, 0]
    assert found.centres.tolist() == [0, 1, 2]
    assert found.lost.to_dense().tolist() == [[1], [1], [1]]
    assert torch.equal(found.hidden, toy.x[2:3])
    edges = {(0, 1), (2, 3), (2, 4), (3, 4)}
    both = edges | {(v, u) for u, v in edges}
    assert set(map(tuple, found.inputs.edge_index.T.tolist())) == both
    kept = found.inputs.x.to_dense() if is_sparse else found.inputs.x
    assert torch.equal(kept, toy.x[found.kept])


def test_a_node_may_lose_several_neighbours(toy: NodeDataset) -> None:
    is_hidden = (torch.arange(6) == 4) | (torch.arange(6) == 5)
    found = hide_nodes(GraphInput(toy.x, toy.edge_index), is_hidden)
    assert found.counts.tolist() == [0, 0, 0, 2]
    assert found.lost.to_dense().tolist() == [[1, 1]]
    assert found.wanted(5).tolist() == [2]
    assert found.wanted(1).tolist() == [1]


def test_without_edges_no_node_loses_a_neighbour(toy: NodeDataset) -> None:
    graph = GraphInput(sparse(toy.x), torch.zeros((2, 0), dtype=torch.int64))
    found = hide_nodes(graph, torch.arange(6) < 2)
    assert found.counts.tolist() == [0, 0, 0, 0]
    assert found.centres.numel() == 0
    assert found.hidden.shape == (0, 6)
    assert found.wanted(5).numel() == 0


@pytest.mark.parametrize("name", sorted({*MODELS} - {"gine", *TYPED}))
@pytest.mark.parametrize("is_sparse", [False, True])
def test_backbones_take_a_mended_graph_as_one_with_more_nodes(
    toy: NodeDataset, name: str, is_sparse: bool
) -> None:
    torch.manual_seed(0)
    model = build_model(
        name,
        in_channels=6,
        hidden_channels=4,
        num_outputs=2,
        num_layers=2,
        dropout=0.0,
    ).eval()
    owner = torch.tensor([0, 0, 5])
    generated = torch.randn(3, 6)
    new = torch.tensor([[0, 0, 5, 6, 7, 8], [6, 7, 8, 0, 0, 5]])
    edges = torch.cat([toy.edge_index, new], dim=1)
    plain = model(GraphInput(torch.cat([toy.x, generated]), edges))
    x = sparse(toy.x) if is_sparse else toy.x
    mended = MendedGraph(GraphInput(x, toy.edge_index), owner, generated)
    torch.testing.assert_close(model(mended), plain)


def test_a_gradient_reaches_the_generated_nodes(toy: NodeDataset) -> None:
    model = build_model(
        "graphsage",
        in_channels=6,
        hidden_channels=4,
        num_outputs=2,
        num_layers=2,
        dropout=0.0,
    )
    graph = GraphInput(sparse(toy.x), toy.edge_index)
    mended = MendedGraph(graph, torch.tensor([3]), torch.zeros(1, 0))
    generated = torch.ones(1, 6, requires_grad=True)
    model(mended.with_generated(generated))[3].sum().backward()
    assert generated.grad is not None
    assert generated.grad.abs().sum() > 0


def test_without_generated_nodes_the_graph_is_unchanged(toy: NodeDataset) -> None:
    model = build_model(
        "graphsage",
        in_channels=6,
        hidden_channels=4,
        num_outputs=2,
        num_layers=2,
        dropout=0.0,
    ).eval()
    graph = GraphInput(toy.x, toy.edge_index)
    nobody = torch.zeros(0, dtype=torch.int64)
    mended = MendedGraph(graph, nobody, torch.zeros(0, 6))
    torch.testing.assert_close(model(mended), model(graph))


class Summing(nn.Module):
    """Map the features and add the neighbours' sums, as a module of another library."""

    def __init__(self, *, in_channels: int, hidden_channels: int, **_: object) -> None:
        super().__init__()
        self.map = nn.Linear(in_channels, hidden_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.map(x)
        source, target = edge_index
        found: Tensor = h.index_add(0, target, h[source])
        return found


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_torch_module_takes_a_mended_graph_as_one_with_more_nodes(
    toy: NodeDataset, is_sparse: bool
) -> None:
    model = backbone_class("summing", Summing)(
        in_channels=6, hidden_channels=4, num_outputs=2, num_layers=1, dropout=0.0
    )
    owner, generated = torch.tensor([0, 0, 5]), torch.randn(3, 6)
    new = torch.tensor([[0, 0, 5, 6, 7, 8], [6, 7, 8, 0, 0, 5]])
    whole = torch.cat([toy.x, generated])
    plain = GraphInput(whole, torch.cat([toy.edge_index, new], dim=1))
    x = sparse(toy.x) if is_sparse else toy.x
    mended = MendedGraph(GraphInput(x, toy.edge_index), owner, generated)
    assert torch.equal(mended.dense_features(), whole)
    torch.testing.assert_close(model(mended), model(plain))
    # other generated nodes are not hidden by a cache, and get a gradient
    others = torch.randn(3, 6, requires_grad=True)
    other = mended.with_generated(others)
    assert torch.equal(other.dense_features()[6:], others)
    model(other)[0].sum().backward()
    assert others.grad is not None
    assert others.grad.abs().sum(dim=1).gt(0).tolist() == [True, True, False]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_closest_row_is_that_of_a_slow_loop(
    generator: torch.Generator, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flower_fgl.algorithms.fedsageplus.CHUNK", 20
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
        num_outputs=2,
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
