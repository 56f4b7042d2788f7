"""FedIIH's equations, by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.fediih import (
    FedIIHNet,
    factor_similarity,
    jensen_shannon,
    route,
)
from flower_fgl.algorithms.personal_mix import mix_states, softmax_weights
from flower_fgl.methods.fediih import FedIIHSettings
from flower_fgl.nn.models import num_parameters
from flower_fgl.nn.sparse import EdgePattern
from flower_fgl.strategies.personal_mix import factor_parts


def pair(means: list[float], variances: list[float]) -> float:
    mean = torch.tensor(means, dtype=torch.float64)[:, None]
    variance = torch.tensor(variances, dtype=torch.float64)[:, None]
    return float(jensen_shannon(mean, variance.log())[0, 1])


def test_the_divergence_of_two_gaussians_by_hand() -> None:
    assert pair([1.0, 1.0], [2.0, 2.0]) == pytest.approx(0, abs=1e-12)
    assert pair([0.0, 2.0], [1.0, 1.0]) == pytest.approx(0.5)
    assert 1 - pair([0.0, 2.0], [1.0, 1.0]) / math.log(2) == pytest.approx(
        0.2787, abs=1e-4
    )
    assert pair([0.0, 0.5], [1.0, 1.0]) == pytest.approx(0.03125)
    assert pair([0.0, 0.0], [1.0, 4.0]) == pytest.approx(0.1116, abs=1e-4)


def test_similarity_and_weights_of_unit_variances() -> None:
    # ‖Δμ‖ = .5: JS = .5² / 8, S = .9549, weight e^{−.4508} of the own one
    mean = torch.tensor([[[0.0, 0.0]], [[0.3, 0.4]]])
    similarity = factor_similarity(mean, torch.zeros_like(mean))
    assert similarity.shape == (1, 2, 2)
    assert similarity[0, 0, 1].item() == pytest.approx(0.9549, abs=1e-4)
    rows = softmax_weights(similarity, torch.ones(2).double(), scale=10.0)[0]
    assert (rows[0, 1] / rows[0, 0]).item() == pytest.approx(0.6371, abs=1e-4)
    assert math.isclose(float(similarity[0, 0, 0]), 1.0)


def test_routing_layers_by_the_depth() -> None:
    # n_b = max(1, L − 2), n_v = 2, or 1 for L ≤ 2
    for depth, expected in ((1, (1, 1)), (2, (1, 1)), (3, (1, 2)), (4, (2, 2))):
        network = FedIIHNet(
            FedIIHSettings(factors=2, iterations=1), model="gcn", num_features=3,
            num_outputs=2, width=4, num_layers=depth, dropout=0.0,
        )  # fmt: skip
        assert (network.num_routes, network.num_summary_routes) == expected


def test_one_factor_adds_all_neighbours() -> None:
    x = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[3.0, 4.0]]])
    edges = torch.tensor([[1, 2], [0, 0]])
    unit = F.normalize(x, dim=2)
    found = route(x, EdgePattern(edges[1], edges[0], (3, 3)), iterations=4)
    torch.testing.assert_close(found[0], F.normalize(unit.sum(dim=0), dim=1))
    torch.testing.assert_close(found[1:], unit[1:])


def test_two_factors_share_a_neighbour_by_hand() -> None:
    # products with u: factor 0 has 1, factor 1 has 0
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    share = math.e / (math.e + 1)
    edge = EdgePattern(torch.tensor([0]), torch.tensor([1]), (2, 2))
    found = route(x, edge, iterations=1)[0]
    torch.testing.assert_close(found[0], torch.tensor([1.0, 0.0]))
    expected = F.normalize(torch.tensor([1.0, 1 - share]), dim=0)
    torch.testing.assert_close(found[1], expected)


def test_routing_and_its_gradient_equal_vectors_of_every_edge() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    source, target = torch.randint(9, (2, 30), generator=g)
    unit = F.normalize(x, dim=2)
    u = unit
    for _ in range(4):
        share = (unit[source] * u[target]).sum(dim=2).softmax(dim=1)
        messages = share[..., None] * unit[source]
        u = F.normalize(
            unit + torch.zeros_like(x).index_add(0, target, messages), dim=2
        )
    found = route(x, EdgePattern(target, source, (9, 9)), iterations=4)
    torch.testing.assert_close(found, u)
    weight = torch.randn(9, 3, 4, generator=g, dtype=torch.float64)
    expected, gradient = (
        torch.autograd.grad((weight * h).sum(), x, retain_graph=True)[0]
        for h in (u, found)
    )
    torch.testing.assert_close(gradient, expected)


def test_another_second_factor_leaves_the_first_factors_mixtures_alone() -> None:
    torch.manual_seed(0)
    states = [
        {
            "encoder.weight": torch.randn(4, 3),
            "encoder.bias": torch.randn(4),
            "classifier.weight": torch.randn(2, 4),
            "classifier.bias": torch.randn(2),
        }
        for _ in range(2)
    ]
    means = torch.randn(2, 2, 2)
    moved = means.clone()
    moved[1, 1] += 1.0
    mixed = []
    for mean in (means, moved):
        rows = softmax_weights(
            factor_similarity(mean, mean), torch.ones(2).double(), scale=10.0
        )
        mixed.append(mix_states(states, rows.float(), factor_parts(2, 2))[0])
    before, after = mixed
    for name, axis in {
        "encoder.weight": 0,
        "encoder.bias": 0,
        "classifier.weight": 1,
    }.items():
        assert torch.equal(*(m[name].narrow(axis, 0, 2) for m in mixed))
        assert not torch.equal(*(m[name].narrow(axis, 2, 2) for m in mixed))
    equal = (states[0]["classifier.bias"] + states[1]["classifier.bias"]) / 2
    torch.testing.assert_close(before["classifier.bias"], equal)
    torch.testing.assert_close(after["classifier.bias"], equal)


def test_the_number_of_parameters_on_cora() -> None:
    network = FedIIHNet(
        FedIIHSettings(), model="gcn", num_features=1433, num_outputs=7, width=128,
        num_layers=4, dropout=0.3,
    )  # fmt: skip
    assert num_parameters(network) == 368_903
