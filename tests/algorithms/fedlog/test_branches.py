from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedlog.branches import (
    Branch,
    PairLayer,
    branch_loss,
    class_means_of,
    degree_weights,
    distance_log_probs,
    mean_shift,
    mix_log_probs,
    node_norm,
    square_distances,
)

E, C, S, N = 6, 3, 2, 5


@pytest.fixture
def rows(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """h_v, n_v and prototypes."""
    draw = [torch.randn(n, E, generator=generator) for n in (N, N, C * S)]
    return draw[0], draw[1], draw[2]


def loud(layer: PairLayer) -> PairLayer:
    """Make the outputs of MLP_trans large enough to change the results."""
    torch.nn.init.normal_(layer.scale.weight)
    return layer


def test_two_prototypes_pull_the_node_of_the_specification_to_their_middle() -> None:
    h, n = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    prototypes = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    d = square_distances(prototypes, h, n)
    assert d.tolist() == [[2.0, 2.0]]
    assert square_distances(prototypes, h).tolist() == [[1.0, 1.0]]
    shift = mean_shift(h, prototypes, torch.full((1, 2), 0.5))
    assert shift.tolist() == [[0.25, -0.25]]
    p = distance_log_probs(h + shift, prototypes).exp()
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.5]]))
    # the whole layer, with MLP_trans giving 0.5 for every pair
    layer = PairLayer(2)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.ones_(layer.trans[2].bias)  # type: ignore[arg-type]
    torch.nn.init.constant_(layer.scale.weight, 0.25 / torch.sigmoid(torch.ones(())))
    torch.testing.assert_close(layer(h, n, prototypes), h + shift)


@pytest.mark.parametrize("neighbours_only", [False, True])
def test_a_pair_layer_equals_a_loop_over_pairs(
    rows: tuple[Tensor, Tensor, Tensor], neighbours_only: bool
) -> None:
    h, around, prototypes = rows
    layer = loud(PairLayer(E, neighbours_only=neighbours_only))
    moved = []
    for v in range(N):
        shift = torch.zeros(E)
        for j in range(C * S):
            d = (h[v] - prototypes[j]).square().sum()
            if neighbours_only:
                message = torch.cat([around[v], d[None]])
            else:
                d = d + (around[v] - prototypes[j]).square().sum()
                message = torch.cat([h[v], around[v], d[None]])
            m = layer.second(layer.first(message).sigmoid() * layer.first(message))
            m = m * m.sigmoid()
            shift = shift + (h[v] - prototypes[j]) * layer.scale(layer.trans(m))
        moved.append(h[v] + shift / (C * S))
    torch.testing.assert_close(
        layer(h, around, prototypes), torch.stack(moved), rtol=1e-4, atol=1e-5
    )


def test_a_pair_layer_gives_the_same_with_and_without_gradient(
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    layer = loud(PairLayer(E))
    with torch.no_grad():
        without = layer(*rows)
    assert torch.equal(layer(*rows), without)


def test_the_head_branch_is_weighted_by_degree() -> None:
    degree = torch.tensor([1, 3, 4, 5, 8])
    expected = torch.tensor([0.0474, 0.2689, 0.5, 0.7311, 0.9820])
    torch.testing.assert_close(degree_weights(degree, 3.0), expected, atol=1e-4, rtol=0)
    for threshold in (0, 5, 20):  # one half at λ + 1, exactly
        assert degree_weights(torch.tensor([threshold + 1]), threshold).item() == 0.5


def test_probabilities_add_up_to_one_even_where_one_branch_has_no_weight() -> None:
    head, tail = (torch.randn(4, C).log_softmax(1) for _ in range(2))
    alpha = torch.tensor([0.0, 0.3, 1.0, degree_weights(torch.tensor(500), 3.0)])
    mixed = mix_log_probs(head, tail, alpha).exp()
    torch.testing.assert_close(mixed.sum(1), torch.ones(4))
    torch.testing.assert_close(mixed[0], tail[0].exp())
    torch.testing.assert_close(mixed[2], head[2].exp())
    torch.testing.assert_close(mixed[1], 0.3 * head[1].exp() + 0.7 * tail[1].exp())


def test_class_means_take_the_nodes_class_by_class() -> None:
    nodes = torch.tensor([[0.0], [2.0], [10.0], [20.0]])
    assert class_means_of(nodes, 2).tolist() == [[1.0], [15.0]]


def test_a_branch_keeps_its_shapes_and_learns_from_messages(
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    h, around, prototypes = rows
    branch = Branch(E)
    log_p = branch(h, around, prototypes, C)
    assert log_p.shape == (N, C)
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(N))
    log_p[:, 0].sum().backward()
    first: PairLayer = branch.layers[0]
    assert all(p.grad.abs().sum() > 0 for p in branch.parameters())
    assert first.trans[0].weight.grad.norm() > 0


def test_without_updates_the_messages_learn_nothing(
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    h, around, prototypes = rows
    branch = Branch(E, updates=False)
    branch(h, around, prototypes, C)[:, 0].sum().backward()
    assert branch.norm.weight.grad.norm() > 0
    assert all(p.grad is None for p in branch.layers.parameters())
    moved = distance_log_probs(branch.norm(h), class_means_of(prototypes, C))
    torch.testing.assert_close(branch(h, around, prototypes, C), moved)


def test_branch_losses_are_those_computed_by_hand() -> None:
    head = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    tail = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log()
    alpha, labels = torch.tensor([0.25, 1.0]), torch.tensor([0, 1])
    # node 0: −.25 ln .5 − .75 ln .8 = .173287 + .167358; node 1: −ln .75 = .287682
    loss = branch_loss(head, tail, alpha, labels)
    assert loss.item() == pytest.approx((0.340645 + 0.287682) / 2, abs=1e-5)
    # node 0: −ln(.25 · .5 + .75 · .8) = −ln .725 = .321584
    mixed = branch_loss(head, tail, alpha, labels, is_mixture=True)
    assert mixed.item() == pytest.approx((0.321584 + 0.287682) / 2, abs=1e-5)


def test_each_branch_gets_a_gradient_in_proportion_to_its_weight() -> None:
    scores = torch.zeros(2, 1, 3, requires_grad=True)
    head, tail = scores.log_softmax(2)
    branch_loss(head, tail, torch.tensor([0.2]), torch.tensor([1])).backward()
    assert scores.grad is not None
    assert scores.grad[0].all()
    torch.testing.assert_close(scores.grad[0] * 4, scores.grad[1])


def test_node_norms_are_those_computed_by_hand() -> None:
    nodes = [torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[6.0, 8.0]])]
    assert node_norm(nodes, kind="fro").item() == pytest.approx(2.5 + 5)
    assert node_norm(nodes, kind="sum").item() == pytest.approx(3 + 4 + 10)
