from __future__ import annotations

import torch

from flower_fgl.nn.structure import return_probabilities, without_loops

PATH = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
TRIANGLE = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]])


def test_walks_on_a_path_and_a_triangle() -> None:
    found = return_probabilities(PATH, 4, 4)  # node 3 is isolated
    end = [0, 0.5, 0, 0.5]
    expected = torch.tensor([end, [0.0, 1, 0, 1], end, [0.0] * 4])
    torch.testing.assert_close(found, expected)
    found = return_probabilities(TRIANGLE, 3, 4)
    torch.testing.assert_close(found, torch.tensor([[0, 0.5, 0.25, 0.375]] * 3))


def test_powers_of_a_random_graph() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(30, 30, generator=generator) < 0.2
    a = (drawn | drawn.T).fill_diagonal_(False).double()
    walk = a / a.sum(dim=0).clamp(min=1)
    power, columns = torch.eye(30, dtype=torch.float64), []
    for _ in range(7):
        power = power @ walk
        columns.append(power.diagonal())
    found = return_probabilities(a.nonzero().T, 30, 7)
    torch.testing.assert_close(found, torch.stack(columns, dim=1).float())


def test_loops_and_repetitions_do_not_count() -> None:
    edges = torch.cat([PATH, PATH, torch.tensor([[2], [2]])], dim=1)
    assert torch.equal(without_loops(edges, 3), without_loops(PATH, 3))
    assert torch.equal(
        return_probabilities(edges, 3, 3), return_probabilities(PATH, 3, 3)
    )
