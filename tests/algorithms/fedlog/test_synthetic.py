from __future__ import annotations

import pytest
import torch

from flower_fgl.algorithms.fedlog.synthetic import (
    ClassNoise,
    aggregation_weights,
    blend_nodes,
    class_rates,
    disguise_rates,
    permute_slots,
    scale_nodes,
    update_scaling,
)


def test_class_rates_are_shares_of_the_training_labels() -> None:
    rates = class_rates(torch.tensor([0, 2, 2, 2]), 4)
    assert rates.tolist() == [0.25, 0.0, 0.75, 0.0]


def test_equation_4_weights_clients_by_class_rate() -> None:
    # class 0 as in the specification; no client has class 1
    rates = torch.tensor([[0.75, 0.0], [0.25, 0.0]])
    nodes = torch.stack([torch.zeros(4, 1), torch.full((4, 1), 4.0)])
    made = blend_nodes(nodes, aggregation_weights(rates))
    assert made[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_tail_classes_give_rare_clients_more_weight() -> None:
    rates = torch.tensor([[0.75], [0.25]])
    weights = aggregation_weights(rates, tail_classes=True)
    torch.testing.assert_close(
        weights, torch.tensor([[0.25], [0.75]]), atol=1e-5, rtol=0
    )


def test_equation_4_ignores_the_order_of_the_clients(
    generator: torch.Generator,
) -> None:
    rates = torch.rand(3, 2, generator=generator)
    nodes = torch.randn(3, 8, 5, generator=generator)
    order = [2, 0, 1]
    torch.testing.assert_close(
        blend_nodes(nodes, aggregation_weights(rates)),
        blend_nodes(nodes[order], aggregation_weights(rates[order])),
    )


def test_equation_5_keeps_the_nodes_at_0_and_merges_them_at_1() -> None:
    nodes = torch.tensor([[0.0, 2.0], [4.0, 2.0], [8.0, 2.0], [0.0, 6.0]])
    assert torch.equal(scale_nodes(nodes, torch.zeros(2)), nodes)
    mean = torch.tensor([3.0, 3.0])
    torch.testing.assert_close(scale_nodes(nodes, torch.ones(2)), mean.expand(4, 2))
    half = scale_nodes(nodes, torch.tensor([0.0, 0.5]))
    assert half.tolist() == [[0.0, 2.0], [4.0, 2.0], [5.5, 2.5], [1.5, 4.5]]


def test_gamma_rises_where_a_class_is_learnt_and_stays_in_its_range() -> None:
    hits = torch.tensor([True] * 5 + [True] * 4 + [False] + [False] * 5)
    gamma = torch.tensor([0.5, 0.5, 0.0005])
    # shares 1, .8 and 0: .8 is not above the threshold
    up = update_scaling(gamma, hits, step=0.001, threshold=0.8)
    torch.testing.assert_close(up, torch.tensor([0.501, 0.499, 0.0]))
    top = update_scaling(torch.ones(3), hits, step=0.001, threshold=0.8)
    assert top.tolist() == [1.0, pytest.approx(0.999), pytest.approx(0.999)]


def test_slots_are_shuffled_within_class_and_client(
    generator: torch.Generator,
) -> None:
    nodes = torch.arange(2 * 3 * 50.0).view(2, 150, 1)
    shuffled = permute_slots(nodes, 3, generator)
    assert not torch.equal(shuffled, nodes)
    by_class = shuffled.view(2, 3, 50)
    assert torch.equal(by_class.sort(dim=2).values, nodes.view(2, 3, 50))
    assert not torch.equal(by_class[0] % 50, by_class[1] % 50)


def test_permuted_rates_stay_among_head_and_among_tail_classes(
    generator: torch.Generator,
) -> None:
    rates = torch.tensor([0.4, 0.05, 0.3, 0.01, 0.24])
    hidden = disguise_rates(rates, "permute", scale=0, generator=generator)
    assert not torch.equal(hidden, rates)
    heads, tails = [0, 2, 4], [1, 3]  # above 1/5 or not
    assert sorted(hidden[heads].tolist()) == sorted(rates[heads].tolist())
    assert sorted(hidden[tails].tolist()) == sorted(rates[tails].tolist())


@pytest.mark.parametrize("kind", ["none", "permute"])
def test_the_rate_of_a_small_class_is_nowhere(
    generator: torch.Generator, kind: ClassNoise
) -> None:
    rates = torch.tensor([0.6, 0.2, 0.17, 0.03])
    shared = torch.tensor([True, True, True, False])
    for _ in range(20):
        hidden = disguise_rates(
            rates, kind, scale=0, generator=generator, shared=shared
        )
        assert hidden[3] == 0
        # divided by their sum: the missing share would follow from it
        expected = [0.17 / 0.97, 0.2 / 0.97, 0.6 / 0.97]
        assert sorted(hidden[:3].tolist()) == pytest.approx(expected)
    none = disguise_rates(
        rates, kind, scale=0, generator=generator, shared=~shared.new_ones(4)
    )
    assert not none.any()


@pytest.mark.parametrize("kind", ["none", "gauss"])
def test_noise_is_in_proportion_to_the_rate(
    generator: torch.Generator, kind: ClassNoise
) -> None:
    rates = torch.tensor([0.9, 0.1, 0.0]).repeat(4000, 1)
    hidden = disguise_rates(rates, kind, scale=0.1, generator=generator)
    if kind == "none":
        assert torch.equal(hidden, rates)
        return
    torch.testing.assert_close(
        hidden.std(0), torch.tensor([0.09, 0.01, 0.0]), rtol=0.05, atol=0
    )
    wild = disguise_rates(rates, kind, scale=5, generator=generator)
    assert wild.min() == 0
