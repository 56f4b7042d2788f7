from __future__ import annotations

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano.generator import (
    NodeGenerator,
    gaussian_copies,
    mean_distance,
    mean_rows,
    spread,
    synthesise,
)


def test_the_distance_of_equation_7_by_hand() -> None:
    # h = (0, 0), two copies at (3, 4) and (0, 0): (5 + 0) / 2; squared it would be 12.5
    nodes = torch.zeros(1, 2)
    synthetic = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    torch.testing.assert_close(mean_distance(nodes, synthetic), torch.tensor(2.5))


def test_the_distance_has_a_finite_gradient_where_it_is_zero() -> None:
    synthetic = torch.zeros(2, 3, 4, requires_grad=True)
    mean_distance(torch.zeros(2, 4), synthetic).backward()
    assert synthetic.grad is not None
    assert bool(synthetic.grad.isfinite().all())


def test_synthetic_nodes_are_those_of_a_loop(generator: torch.Generator) -> None:
    n, m, width = 4, 3, 5
    phi = NodeGenerator(width)
    nodes = torch.randn(n, width, generator=generator)
    around = torch.randn(n, width, generator=generator)
    noise = torch.randn(n, m, 2 * width, generator=generator)
    made = synthesise(phi, nodes, around, noise)
    assert made.shape == (n, m, width)
    assert bool((made.abs() < 1).all())
    first, second = phi[0], phi[2]
    for u in range(n):
        for j in range(m):
            context = torch.cat([nodes[u], around[u]]) + noise[u, j]
            hidden = (first.weight @ context + first.bias).clamp(min=0)
            expected = torch.tanh(second.weight @ hidden + second.bias)
            torch.testing.assert_close(made[u, j], expected)


def test_a_generator_has_the_stated_number_of_parameters() -> None:
    # 3·128² + 2·128 = 49,408
    assert sum(p.numel() for p in NodeGenerator(128).parameters()) == 49_408
    assert NodeGenerator(7)[0].in_features == 14


def test_gaussian_copies_add_their_noise() -> None:
    noise = torch.tensor([[[0.5, 0.0], [0.0, -1.0]]])
    made = gaussian_copies(torch.tensor([[1.0, 2.0]]), noise)
    assert made.tolist() == [[[1.5, 2.0], [1.0, 1.0]]]


def test_the_spread_is_the_distance_of_two_copies_and_0_for_one() -> None:
    made = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]])
    assert float(spread(made)) == 2.5  # (5 + 0) / 2
    assert float(spread(made[:, :1])) == 0.0


def test_a_generator_that_ignores_its_noise_has_no_spread() -> None:
    class Copy(nn.Module):
        def forward(self, context: Tensor) -> Tensor:
            return torch.zeros(*context.shape[:-1], 2)

    made = synthesise(Copy(), torch.ones(3, 2), torch.ones(3, 2), torch.randn(3, 4, 4))
    assert float(spread(made)) == 0.0


def test_the_mean_over_neighbours_is_that_of_a_loop(
    generator: torch.Generator,
) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 1, 1, 2]])  # node 4 is isolated
    h = torch.randn(5, 3, generator=generator)
    nodes = torch.tensor([1, 4, 0])
    out = mean_rows(edge_index, nodes, 5).matmul(h)
    for row, u in enumerate(nodes.tolist()):
        found = [h[a] for a, b in edge_index.T.tolist() if b == u]
        expected = torch.stack(found).mean(dim=0) if found else torch.zeros(3)
        torch.testing.assert_close(out[row], expected)


def test_the_mean_over_neighbours_of_a_graph_without_edges_is_0() -> None:
    empty = torch.empty(2, 0, dtype=torch.int64)
    out = mean_rows(empty, torch.tensor([0, 2]), 3).matmul(torch.ones(3, 2))
    assert out.tolist() == [[0.0, 0.0], [0.0, 0.0]]
