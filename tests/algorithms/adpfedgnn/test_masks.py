from __future__ import annotations

import pytest
import torch

from flower_fgl.algorithms.adpfedgnn.masks import (
    global_mask,
    local_mask,
    masked_mean,
    per_tensor,
    personalise,
)
from flower_fgl.nn.state import state_to_vector, vector_to_state

SHAPES = {"weight": (4, 5), "bias": (4,)}


@pytest.mark.parametrize(
    ("share", "ones"), [(0.0, 0), (0.3, 6), (0.5, 10), (0.99, 19), (1.0, 20)]
)
def test_a_mask_has_as_many_ones_as_its_share_allows(
    share: float, ones: int, generator: torch.Generator
) -> None:
    gradient, direction = torch.randn(2, 20, generator=generator)
    for mask in (
        local_mask(gradient, share=share),
        global_mask(gradient, direction, share=share),
        global_mask(gradient, direction, share=share, score="neg-abs-diff"),
    ):
        assert mask.shape == (20,)
        assert int(mask.sum()) == ones


def test_the_local_mask_marks_the_largest_gradients() -> None:
    gradient = torch.tensor([0.1, -3.0, 0.0, 2.0, -0.2])
    assert local_mask(gradient, share=0.4).tolist() == [False, True, False, True, False]
    # 0 is no gradient: four of five are marked, not five
    assert local_mask(gradient, share=1.0).tolist() == [True, True, False, True, True]


def topk_mask(values: torch.Tensor, eligible: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the largest entries by torch's sorted selection."""
    flat = values.masked_fill(~eligible, -torch.inf).flatten()
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(min(count, int(eligible.sum()))).indices] = True
    return mask.view(values.shape)


@pytest.mark.parametrize("levels", [0, 3, 40])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_masks_equal_those_of_a_sorted_selection_ties_included(
    levels: int, share: float, generator: torch.Generator
) -> None:
    shape = (1961,)
    gradient = torch.randn(shape, generator=generator)
    if levels:  # many equal entries and zeros
        gradient = torch.randint(-levels, levels, shape, generator=generator).float()
    size, count = gradient.abs(), int(share * gradient.numel() + 1e-9)
    expected = topk_mask(size, size > 0, count)
    assert torch.equal(local_mask(gradient, share=share), expected)
    taken = torch.rand(shape, generator=generator) > 0.4
    expected = topk_mask(size, (size > 0) & ~taken, count)
    assert torch.equal(local_mask(gradient, taken, share=share), expected)


def test_distinct_gradients_are_not_sorted(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = torch.randn(1961, generator=generator)
    expected = topk_mask(gradient.abs(), gradient != 0, gradient.numel() // 2)
    for name in ("topk", "sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, None)
    assert torch.equal(local_mask(gradient, share=0.5), expected)


def test_a_local_mask_takes_the_largest_gradients_outside_another_mask() -> None:
    gradient = torch.tensor([9.0, -8.0, 7.0, 0.0, 1.0])
    taken = torch.tensor([True, False, True, False, False])
    assert local_mask(gradient, taken, share=0.4).tolist() == [
        False, True, False, False, True,
    ]  # fmt: skip
    assert local_mask(gradient, taken, share=1.0).tolist() == [
        False, True, False, False, True,
    ]  # fmt: skip


def test_the_global_mask_marks_weights_whose_descent_agrees_with_the_global_change() -> (
    None
):
    gradient = torch.tensor([-2.0, 2.0, -1.0, -1.0, 0.0])
    direction = torch.tensor([1.0, 1.0, 1.0, -3.0, 9.0])
    # −g·Δ: 2, −2, 1, −3, and the last has no gradient
    assert global_mask(gradient, direction, share=0.4).tolist() == [
        True, False, True, False, False,
    ]  # fmt: skip


def test_the_two_scores_of_the_global_mask_by_hand() -> None:
    gradient, direction = torch.tensor([-3.0, -1, -2]), torch.tensor([1.0, 2, 9])
    # −g·Δ: 3, 2, 18; over their root mean squares −g and Δ differ by 1.2, 0.1 and 0.8
    marked = {"product": 2, "neg-abs-diff": 1}
    for score, place in marked.items():
        mask = global_mask(gradient, direction, share=0.34, score=score)
        assert mask.nonzero().flatten().tolist() == [place]
    assert torch.equal(
        global_mask(gradient, direction, share=0.34),
        global_mask(gradient, direction, share=0.34, score="product"),
    )


def test_the_global_mask_is_filled_by_gradients_where_global_weights_did_not_change() -> (
    None
):
    gradient = torch.tensor([-0.1, 5.0, -7.0, 1.0, 0.0])
    direction = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    assert global_mask(gradient, direction, share=0.6).tolist() == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_the_distance_score_prefers_entries_that_are_tiny_in_both() -> None:
    gradient = torch.tensor([-3.0, -1e-3])
    direction = torch.tensor([1.0, 1e-3])
    assert global_mask(gradient, direction, share=0.5).tolist() == [True, False]
    far = torch.tensor([0.1, 1e-3])
    mask = global_mask(gradient, -far, share=0.5, score="neg-abs-diff")
    assert mask.tolist() == [False, True]


def test_masks_of_several_clients_are_those_of_each(
    generator: torch.Generator,
) -> None:
    gradient, direction = torch.randint(-9, 9, (2, 3, 40), generator=generator).float()
    gradient[0] *= 100  # each client has a scale of its own
    gradient[1, 5:] = 0  # fewer than q have a gradient
    direction[2, 5:] = 0
    for make in (
        lambda g, d: global_mask(g, d, share=0.4),
        lambda g, d: global_mask(g, d, share=0.4, score="neg-abs-diff"),
        lambda g, d: local_mask(g, d > 0, share=0.4),
    ):
        one_by_one = [make(*rows) for rows in zip(gradient, direction, strict=True)]
        assert torch.equal(make(gradient, direction), torch.stack(one_by_one))


def test_masks_are_made_tensor_by_tensor(generator: torch.Generator) -> None:
    flat = torch.randn(24, generator=generator)
    flat[20:] *= 1e-6  # a threshold over all tensors would omit the bias
    mask = per_tensor(lambda g: local_mask(g, share=0.5), SHAPES, flat)
    parts = vector_to_state(mask, SHAPES)
    assert {name: int(part.sum()) for name, part in parts.items()} == {
        "weight": 10,
        "bias": 2,
    }


def test_vector_to_state_undoes_state_to_vector(generator: torch.Generator) -> None:
    flat = torch.randn(24, generator=generator)
    assert torch.equal(state_to_vector(vector_to_state(flat, SHAPES)), flat)
    mixed = {"steps": torch.tensor([1, 2]), "weight": torch.tensor([0.5])}
    assert state_to_vector(mixed).tolist() == [1.0, 2.0, 0.5]


def masked_mean_of(literal: bool) -> list[float]:
    return masked_mean(
        torch.tensor([7.0, 7.0]),
        torch.tensor([[2.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[True, False], [False, False]]),
        torch.tensor([100.0, 300.0], dtype=torch.float64),
        is_literal=literal,
    ).tolist()


def test_each_weight_is_averaged_over_the_clients_that_share_it() -> None:
    # only the first client shares the first weight, no client the second
    assert masked_mean_of(literal=False) == [2.0, 7.0]
    # printed: 100 · 2 / 400, and 0
    assert masked_mean_of(literal=True) == [0.5, 0.0]
    # a client of one node, by default
    one = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    assert masked_mean(torch.tensor([7.0]), torch.tensor([[2.0]]), *one).tolist() == [2]
    none = torch.zeros(1, 1, dtype=torch.bool), one[1]
    assert masked_mean(torch.tensor([7.0]), torch.tensor([[2.0]]), *none).tolist() == [
        7
    ]


def test_full_masks_give_the_weighted_mean(generator: torch.Generator) -> None:
    values = torch.randn(3, 6, generator=generator)
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    mean = masked_mean(
        torch.zeros(6), values, torch.ones(3, 6, dtype=torch.bool), weights
    )
    expected = (weights[:, None] * values).sum(0) / 8
    torch.testing.assert_close(mean, expected.float())


def test_local_masks_keep_local_weights_and_take_the_other_global_ones() -> None:
    own, shared = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, -2.0, -3.0])
    ones = torch.ones(3, dtype=torch.bool)
    assert torch.equal(personalise(own, shared, ones), own)
    assert torch.equal(personalise(own, shared, ~ones), shared)
    mixed = personalise(own, shared, torch.tensor([True, False, True]))
    assert mixed.tolist() == [1.0, -2.0, 3.0]
