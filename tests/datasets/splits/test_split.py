from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.splits.split import parse_split, published_split, split_nodes


def rng(seed=0):
    return np.random.default_rng(seed)


def counts(mask, labels, num_classes):
    return torch.bincount(labels[mask], minlength=num_classes).tolist()


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("20/40/40", (20, 40, 40)),
        ("10/5/85", (10, 5, 85)),
        ("90/10", (90, 0, 10)),
        (" 80 / 10 / 10 ", (80, 10, 10)),
    ],
)
def test_a_split_is_read_as_exact_shares(text, percent):
    assert parse_split(text) == tuple(Fraction(share, 100) for share in percent)


def test_percentages_may_have_decimals():
    assert parse_split("0.5/33.5/66") == (
        Fraction(1, 200),
        Fraction(67, 200),
        Fraction(66, 100),
    )


def test_the_published_split_has_a_name():
    assert parse_split("public") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid. Give percentages"),
        ("default", "is not valid"),
        ("20", "is not valid"),
        ("20/40/20/20", "is not valid"),
        ("20/-40/120", "is not valid"),
        ("20/forty/40", "is not valid"),
        ("1e1/50/40", "is not valid"),
        ("20/40/30", "adds up to 90, expected 100"),
        ("0.2/0.4/0.4", "adds up to 1, expected 100"),
        ("0/50/50", "has no training or no test nodes"),
        ("60/40/0", "has no training or no test nodes"),
    ],
)
def test_a_malformed_split_is_refused_with_an_example(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_split(text)
    assert f'"{text}"' in str(caught.value)
    assert '"20/40/40"' in str(caught.value)


@pytest.mark.parametrize(
    ("fractions", "size", "expected"),
    [
        ((0.2, 0.4, 0.4), 5, (1, 2, 2)),
        ((0.2, 0.4, 0.4), 4, (0, 1, 3)),
        ((0.2, 0.4, 0.4), 2, (0, 0, 2)),
        ((0.29, 0.57, 0.14), 100, (29, 57, 14)),  # int(0.29 * 100) is 28
        ((1 / 3, 1 / 3, 1 / 3), 9, (3, 3, 3)),
        ((0.9, 0, 0.1), 10, (9, 0, 1)),
        ((0.8, 0.1, 0.1), 19, (15, 1, 3)),
    ],
)
def test_sizes_are_rounded_down_exactly_and_the_rest_is_for_testing(
    fractions, size, expected
):
    masks = split_nodes(
        torch.zeros(size, dtype=torch.int64), fractions, generator=rng()
    )
    assert tuple(int(mask.sum()) for mask in masks.values()) == expected


@given(
    labels=st.lists(st.integers(-1, 4), max_size=120),
    train=st.integers(0, 100),
    val=st.integers(0, 100),
    seed=st.integers(0, 9),
    as_float=st.booleans(),
)
def test_masks_are_disjoint_cover_known_nodes_and_have_rounded_sizes(
    labels, train, val, seed, as_float
):
    val = min(val, 100 - train)
    kind = float if as_float else Fraction
    shares = [kind(share) / 100 for share in (train, val, 100 - train - val)]
    y = torch.tensor(labels, dtype=torch.int64)
    masks = split_nodes(y, shares, generator=rng(seed))
    assert list(masks) == ["train", "val", "test"]
    assert all(m.dtype == torch.bool and m.shape == y.shape for m in masks.values())
    assert torch.equal(sum(mask.int() for mask in masks.values()), (y >= 0).int())
    sizes = counts(y >= 0, y, 5)
    assert counts(masks["train"], y, 5) == [n * train // 100 for n in sizes]
    assert counts(masks["val"], y, 5) == [n * val // 100 for n in sizes]


def test_the_split_depends_only_on_the_generator():
    y = torch.arange(100) % 4
    first, again, other = (
        split_nodes(y, (0.2, 0.4, 0.4), generator=rng(seed))["train"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    chosen = sum(
        split_nodes(y, (0.2, 0.4, 0.4), generator=rng(seed))["train"].int()
        for seed in range(400)
    )
    # binomial(400, 1/5): mean 80, standard deviation 8
    assert 40 < int(chosen.min()) < int(chosen.max()) < 120


def test_labels_may_be_a_numpy_array_of_graph_labels():
    labels = np.repeat([0, 1], [63, 125])
    masks = split_nodes(labels, (0.8, 0.1, 0.1), generator=rng())
    # 50 + 100 train, 6 + 12 validate, 7 + 13 test
    assert [int(mask.sum()) for mask in masks.values()] == [150, 18, 20]


@pytest.mark.parametrize(
    "fractions", [(0.2, 0.4), (0.2, 0.4, 0.5), (-0.2, 0.6, 0.6), (0.2, 0.4, 0.3)]
)
def test_invalid_shares_are_rejected(fractions):
    with pytest.raises(ValueError, match="three shares of at least 0 that add up to 1"):
        split_nodes(torch.zeros(4, dtype=torch.int64), fractions, generator=rng())


def test_a_published_split_is_restricted_to_the_nodes_of_the_client():
    masks = {
        "train": torch.tensor([True, False, True, False, False]),
        "val": torch.tensor([False, True, False, False, False]),
        "test": torch.tensor([False, False, False, True, False]),
        "extra": torch.ones(5, dtype=torch.bool),
    }
    own = published_split(masks, np.array([1, 2, 4]))
    assert {name: mask.tolist() for name, mask in own.items()} == {
        "train": [False, True, False],
        "val": [True, False, False],
        "test": [False, False, False],
    }


def test_a_dataset_without_a_published_split_is_an_error_with_the_missing_masks():
    masks = {"train": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(DataError, match="without a val or test mask"):
        published_split(masks, torch.tensor([0]))
