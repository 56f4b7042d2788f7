"""Standardisation of numbers: moments, their combination, owners far from others."""

import math
import random

import pytest
import torch

from flower_fgl.core.errors import RunError
from flower_fgl.core.target_scale import (
    Moments,
    TargetScale,
    agree_scale,
    combine,
    distances,
    moments,
    own_scale,
    robust_combine,
)

NAN = math.nan
MILLIGRAMS = {  # the fourth owner gives mg instead of g
    k: Moments(10, mean, 10 * spread**2)
    for k, (mean, spread) in enumerate(
        [(5.0, 2.0), (5.2, 2.1), (4.9, 1.9), (5200.0, 2000.0)]
    )
}
LABELS = {k: f"owner {name}" for k, name in enumerate("abcd")}


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def agree(
    owners: dict[int, Moments], *, is_robust: bool = False
) -> tuple[TargetScale, list[str]]:
    """Agree on the scale of one target; also return the warnings."""
    said: list[str] = []
    scale = agree_scale(
        ["logS"],
        {pid: [own] for pid, own in owners.items()},
        LABELS,
        min_count=5,
        is_robust=is_robust,
        warn=said.append,
    )
    return scale, said


def test_two_owners_give_the_mean_and_deviation_of_all_their_values() -> None:
    a, b = moments(column(1, 3))[0], moments(column(5, 7, 9))[0]
    assert (a, b) == (Moments(2, 2, 2), Moments(3, 7, 8))
    mean, std = combine({0: a, 1: b})
    assert (mean, std) == (5.0, pytest.approx(math.sqrt(8)))
    z = TargetScale.of([(mean, std)]).standardize(column(1, 3, 5, 7, 9))
    assert z.dtype == torch.float32
    expected = torch.tensor([-1.4142, -0.7071, 0, 0.7071, 1.4142])[:, None]
    torch.testing.assert_close(z, expected, atol=1e-4, rtol=0)


def test_large_values_with_a_small_spread_stay_exact() -> None:
    # Σy²/n − μ² gives 512 here
    parts = [moments(1.7e9 + column(1)), moments(1.7e9 + column(2, 3))]
    mean, std = combine({k: part[0] for k, part in enumerate(parts)})
    assert mean == 1.7e9 + 2
    assert std**2 == pytest.approx(2 / 3)


def test_the_scale_does_not_depend_on_the_order_of_replies() -> None:
    draw = random.Random(0)
    owners = {
        k: moments(column(*(draw.gauss(k, 3) for _ in range(9))))[0] for k in range(20)
    }
    shuffled = dict(draw.sample(list(owners.items()), len(owners)))
    assert combine(owners) == combine(shuffled)


def test_unknown_values_do_not_count_and_a_target_without_values_says_nothing() -> None:
    values = torch.tensor([[1, NAN], [NAN, NAN], [3, NAN]], dtype=torch.float64)
    assert moments(values) == [Moments(2, 2, 2), Moments(0, 0, 0)]


def test_equal_values_have_no_spread_though_their_mean_is_rounded() -> None:
    assert moments(column(0.1, 0.1, 0.1))[0].m2 == 0


def test_predictions_return_to_the_units_and_a_shift_changes_nothing_else() -> None:
    values = column(-3.1, -0.2, 1.7)
    near, far = own_scale(values), own_scale(values + 1e6)
    torch.testing.assert_close(
        near.standardize(values), far.standardize(values + 1e6), atol=1e-4, rtol=0
    )
    output = torch.tensor([[0.5], [-1.25]])
    torch.testing.assert_close(
        far.restore(output) - near.restore(output), column(1e6, 1e6), atol=1e-4, rtol=0
    )
    restored = near.restore(near.standardize(values))
    torch.testing.assert_close(restored, values, atol=1e-6, rtol=0)


def test_unknown_values_stay_unknown() -> None:
    z = TargetScale.of([(2.0, 4.0)]).standardize(column(NAN, 10))
    assert z[0].isnan()
    assert z[1] == 2


def test_the_identity_changes_nothing() -> None:
    values = torch.tensor([[1.5, -2.0]], dtype=torch.float64)
    assert torch.equal(TargetScale.identity(2).standardize(values), values.float())


def test_an_owner_far_from_the_others_is_measured_in_spreads() -> None:
    found = list(distances(MILLIGRAMS).values())
    assert found == pytest.approx([0.9756, 1.0244, 0.9268, 2534.1], rel=1e-4)


def test_an_owner_in_another_unit_is_named_and_left_out() -> None:
    scale, said = agree(MILLIGRAMS)
    assert said == [
        'owner d: the values of "logS" differ from those of most owners (about 2534 '
        "spreads apart). Check the unit. Its values do not count in the scale."
    ]
    rest = {pid: MILLIGRAMS[pid] for pid in (0, 1, 2)}
    assert (float(scale.mean), float(scale.std)) == combine(rest)


def test_an_owner_somewhat_far_is_named_but_counts() -> None:
    owners = MILLIGRAMS | {3: Moments(10, 50.0, 40.0)}
    scale, said = agree(owners)
    assert [text[:8] for text in said] == ["owner d:"]
    assert "do not count" not in said[0]
    assert float(scale.mean) == combine(owners)[0]


def test_of_two_owners_in_different_units_both_are_named_with_the_factor() -> None:
    two = {pid: MILLIGRAMS[pid] for pid in (0, 3)}
    scale, said = agree(two)
    assert said == [
        'owner a and owner d: their values of "logS" differ by a factor of about 1,035. '
        "Check that both have the same unit."
    ]
    assert float(scale.mean) == combine(two)[0]  # one cannot say which is wrong
    assert not agree({pid: MILLIGRAMS[pid] for pid in (0, 1)})[1]
    assert not agree({0: Moments(9, 0.0, 0.0), 1: MILLIGRAMS[1]})[1]  # 0 in any unit


def test_an_owner_in_a_larger_unit_is_named() -> None:
    owners = MILLIGRAMS | {3: Moments(10, 0.0052, 10 * 0.002**2)}  # kg instead of g
    assert max(distances(owners).values()) < 10
    scale, said = agree(owners)
    assert said == [
        'owner d: its values of "logS" are about 955 times smaller than is typical of the '
        "owners. Check the unit."
    ]
    assert float(scale.mean) == combine(owners)[0]


def test_owners_without_any_spread_are_compared_in_units() -> None:
    owners = {k: Moments(5, mean, 0.0) for k, mean in enumerate([1.0, 1.0, 1.0, 30.0])}
    assert distances(owners)[3] == 29


def test_robust_rules_take_medians_without_weights() -> None:
    owners = {
        0: Moments(1000, 1.0, 0.0),
        1: Moments(2, 2.0, 2.0),
        2: Moments(2, 4.0, 8.0),
    }
    mean, std = robust_combine(owners)
    assert mean == 2
    # spreads about 2: 1; 1; √(4 + 4)
    assert std == 1
    assert float(agree(owners, is_robust=True)[0].mean) == 2


def test_equal_values_of_the_only_target_end_the_run() -> None:
    with pytest.raises(RunError) as caught:
        agree({0: Moments(9, 1.7e9, 0.0), 1: Moments(5, 1.7e9, 0.0)})
    assert str(caught.value) == (
        'All training values of "logS" are equal: there is nothing to learn.'
    )


def test_values_in_a_tiny_unit_are_not_equal() -> None:
    tiny = {0: moments(torch.tensor([[1e-10], [3e-10]], dtype=torch.float64))}
    found = agree_scale(["c"], tiny, {}, min_count=1, warn=pytest.fail)
    assert float(found.std) == pytest.approx(1e-10)


def test_equal_values_of_one_of_several_targets_are_not_scaled() -> None:
    said: list[str] = []
    own = [Moments(9, 3.0, 0.0), Moments(9, 1.0, 36.0)]
    scale = agree_scale(["a", "b"], {0: own}, LABELS, min_count=5, warn=said.append)
    assert scale.std.tolist() == [1.0, 2.0]
    assert said == ['All training values of "a" are equal: it is not scaled.']


def test_a_target_that_no_owner_may_share_is_an_error_with_a_remedy() -> None:
    with pytest.raises(RunError) as caught:
        agree({0: Moments(0, 0.0, 0.0)})
    assert str(caught.value) == (
        'No owner has min-target-count = 5 training values of "logS". Lower it, set '
        'target-scale = "given", or leave the target out with target = ….'
    )


def test_an_owners_own_scale_is_one_where_it_has_no_two_values() -> None:
    values = torch.tensor([[1, 4, NAN], [3, 4, NAN]], dtype=torch.float64)
    scale = own_scale(values)
    assert scale.mean.tolist() == [2, 4, 0]
    assert scale.std.tolist() == [1, 1, 1]
