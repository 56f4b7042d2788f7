"""Temperatures, reliability, and conformal sets and intervals, against numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from flower_fgl.algorithms import calibration as c
from flower_fgl.core.calibration import Calibration, least_items

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], dtype=torch.float64)
U = torch.tensor([0.5, 1.0], dtype=torch.float64)


def draw(n: int, generator: torch.Generator, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Return logits, scaled by a factor, and classes drawn from those unscaled."""
    logits = 1.5 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    return scale * logits, y, u


# ------------------------------------------------------------------------- temperature
def test_nll_of_two_items_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    nll = c.temperature_nll(logits, torch.tensor([0, 1]))
    # T = 1 is in the middle: −log σ(2) + log 2; T = 2: −log σ(1) + log 2
    expected = [math.log(1 + math.exp(-m)) + math.log(2) for m in (2, 1)]
    places = [c.TEMPERATURES.index(t) for t in (1.0, 2.0)]
    assert nll[places].tolist() == pytest.approx(expected, rel=1e-12)


def test_nll_of_labels_ignores_unknown_ones() -> None:
    logits = torch.tensor([[2.0, 9.0], [0.0, 1.0]])
    y = torch.tensor([[1.0, math.nan], [0.0, 1.0]])
    found = c.temperature_nll(logits, y)[c.TEMPERATURES.index(1.0)]
    expected = sum(math.log(1 + math.exp(-m)) for m in (2, 0, 1))
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_best_temperature_undoes_a_factor_of_the_logits(
    scale: float, generator: torch.Generator
) -> None:
    logits, y, _ = draw(20_000, generator, scale)
    found = c.TEMPERATURES[c.best_place(c.temperature_nll(logits, y))]
    assert found == pytest.approx(scale, rel=0.1)  # the grid is 9 % apart


def test_equal_losses_choose_the_temperature_nearest_to_one() -> None:
    nll = c.temperature_nll(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    assert c.TEMPERATURES[c.best_place(nll)] == 1


# ------------------------------------------------------------------ reliability, Brier
def test_calibration_error_by_hand() -> None:
    confidence = torch.tensor([0.95, 0.97, 0.55, 0.55])
    sums = c.reliability(confidence, torch.tensor([True, False, True, True]))
    # bin (14/15, 1]: |1 − 1.92|; bin (8/15, 9/15]: |2 − 1.1|; over 4 items
    assert c.calibration_error(sums) == pytest.approx((0.92 + 0.9) / 4, abs=1e-6)
    assert sums[0].sum() == 4


def test_confidence_on_an_edge_and_of_zero_have_a_bin() -> None:
    sums = c.reliability(torch.tensor([0.0, 1 / c.BINS, 1.0]), torch.ones(3))
    assert sums[0, 0] == 2
    assert sums[0, -1] == 1


def test_calibration_error_without_items_is_undefined() -> None:
    assert math.isnan(c.calibration_error(torch.zeros(3, c.BINS)))


def test_brier_by_hand() -> None:
    # ½(0.5² + 0.3² + 0.2²) = 0.19, and ½(0.1² + 0.6² + 0.7²) = 0.43
    assert c.brier(P, torch.tensor([0, 2])) == pytest.approx((0.19 + 0.43) / 2)
    y = torch.tensor([[1.0, 0.0, math.nan], [0.0, 1.0, math.nan]])
    expected = (0.25 + 0.09 + 0.01 + 0.16) / 4
    assert c.brier(P, y) == pytest.approx(expected)


# ---------------------------------------------------------------------- scores and sets
@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("lac", [[0.5, 0.7, 0.8], [0.9, 0.4, 0.7]]),
        # 0.5·0.5; 0.5 + 0.5·0.3; 0.8 + 0.5·0.2; second row with u = 1: running sums
        ("aps", [[0.25, 0.65, 0.9], [1.0, 0.6, 0.9]]),
        ("raps", [[0.25, 0.75, 1.1], [1.2, 0.6, 1.0]]),
    ],
)
def test_scores_of_classes_by_hand(score: str, expected: list[list[float]]) -> None:
    found = c.class_scores(P, score, U)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("n", "k"), [(9, 9), (10, 10), (19, 18), (99, 90), (100, 91)])
def test_threshold_is_the_right_order_statistic(n: int, k: int) -> None:
    scores = torch.randperm(n).to(torch.float64) + 1
    assert c.threshold(scores, 0.9) == k


@pytest.mark.parametrize("is_shared", [False, True])
def test_coverage_of_a_draw_has_the_beta_distribution_of_its_number_of_items(
    is_shared: bool, generator: torch.Generator
) -> None:
    # of uniform scores the threshold is the coverage: the 54th of 59 is Beta(54, 6)
    scores = torch.rand(2000, 59, generator=generator, dtype=torch.float64)
    if is_shared:
        edges = torch.arange(1, c.SCORE_BINS + 1) / c.SCORE_BINS
        counts = [c.score_histogram(row, 1.0) for row in scores]
        found = [c.histogram_threshold(each, edges, 0.9) for each in counts]
        found = [value - 0.5 / c.SCORE_BINS for value in found]  # middle of the bin
    else:
        found = [c.threshold(row, 0.9) for row in scores]
    assert scipy.stats.kstest(found, scipy.stats.beta(54, 6).cdf).pvalue > 0.01


def test_too_few_scores_have_an_infinite_threshold() -> None:
    assert least_items(0.9) == 9
    assert least_items(0.95) == 19
    assert c.threshold(torch.ones(8), 0.9) == math.inf
    assert c.histogram_threshold(torch.ones(8), torch.ones(8), 0.9) == math.inf


def test_histogram_threshold_is_at_most_one_bin_too_large(
    generator: torch.Generator,
) -> None:
    scores = torch.rand(500, generator=generator, dtype=torch.float64)
    edges = torch.arange(1, c.SCORE_BINS + 1) / c.SCORE_BINS
    parts = [c.score_histogram(part, 1.0) for part in scores.split(90)]
    found = c.histogram_threshold(torch.stack(parts).sum(0), edges, 0.9)
    exact = c.threshold(scores, 0.9)
    assert exact <= found < exact + 1 / c.SCORE_BINS


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_sets_cover_the_share_that_was_asked_for(
    score: str, is_shared: bool, generator: torch.Generator
) -> None:
    covered = []
    for _ in range(20):
        logits, y, u = draw(400, generator, scale=3.0)
        if is_shared:
            parts = [
                c.class_sums(*each, score)
                for each in zip(
                    logits.split(150), y.split(150), u.split(150), strict=True
                )
            ]
            sums = {name: sum(part[name] for part in parts) for name in parts[0]}
            found = c.shared_classes(sums, num_classes=4, coverage=0.9, score=score)  # type: ignore[arg-type]
        else:
            found = c.fit(logits, y, u, coverage=0.9, score=score)
        logits, y, u = draw(4000, generator, scale=3.0)
        p = c.probabilities(logits, found.temperature, is_free=False)
        own = c.class_scores(p, score, u).gather(1, y[:, None])
        covered.append(float((own <= found.thresholds[0]).double().mean()))
    # a mean of 20 draws of Beta(361, 40) has a standard deviation of 0.0034
    assert np.mean(covered) == pytest.approx(0.9, abs=0.012)


def test_shared_calibration_equals_that_of_all_items_together(
    generator: torch.Generator,
) -> None:
    logits, y, u = draw(300, generator, scale=2.0)
    sums = c.class_sums(logits, y, u, "aps")
    found = c.shared_classes(sums, num_classes=4, coverage=0.8, score="aps")
    own = c.fit(logits, y, u, coverage=0.8, score="aps")
    assert found.temperature == own.temperature
    assert 0 <= found.thresholds[0] - own.thresholds[0] < 1 / c.SCORE_BINS
    place = c.TEMPERATURES.index(1.0)
    p = logits.softmax(1)
    assert float(sums["brier"][place]) / 300 == pytest.approx(c.brier(p, y))
    assert {n: tuple(t.shape) for n, t in sums.items()} == c.sum_shapes(is_free=False)


# --------------------------------------------------------------------------- intervals
def test_intervals_of_numbers_by_hand() -> None:
    values = torch.arange(10, dtype=torch.float64)[:, None].repeat(1, 2)
    values[2:, 1] = math.nan
    predicted = values + torch.arange(1, 11, dtype=torch.float64)[:, None]
    u = torch.zeros(10)
    found = c.fit(predicted, values, u, coverage=0.8, score="aps", has_numbers=True)
    # ⌈11·0.8⌉ = 9th smallest of the errors 1 … 10; two values are too few
    assert found == Calibration("owner", 10, 1.0, 0.8, "residual", (9.0, math.inf))
    is_in, known = c.in_intervals(predicted, values.nan_to_num(0.0), found)
    assert is_in[:, 0].sum() == 9
    assert known.all()


def test_shared_intervals_are_at_most_one_bin_wider(generator: torch.Generator) -> None:
    values = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    values[::3, 1] = math.nan
    predicted = torch.zeros_like(values)
    std = torch.tensor([1.0, 2.0], dtype=torch.float64)
    parts = [c.number_sums(torch.zeros_like(v), v, std) for v in values.split(200)]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    found = c.shared_numbers(sums, std, coverage=0.9)  # type: ignore[arg-type]
    exact = c.fit(predicted, values, std, coverage=0.9, score="", has_numbers=True)
    for wide, narrow in zip(found.thresholds, exact.thresholds, strict=True):
        assert 1 <= wide / narrow < 2 ** (1 / c.ERROR_STEPS) + 1e-9


def test_errors_beyond_the_last_bin_give_no_interval() -> None:
    values = torch.zeros(20, 1, dtype=torch.float64)
    sums = c.number_sums(values + 1e9, values, torch.ones(1))
    assert c.shared_numbers(sums, torch.ones(1), coverage=0.9) == Calibration(
        "shared", 20
    )
    exact = c.number_sums(values, values, torch.ones(1))
    assert c.shared_numbers(exact, torch.ones(1), coverage=0.9).thresholds == (2**-12,)


# --------------------------------------------------------------------- too few, several
def test_too_few_items_have_a_temperature_and_no_sets(
    generator: torch.Generator,
) -> None:
    logits, y, u = draw(8, generator)
    found = c.fit(logits, y, u, coverage=0.9, score="aps")
    assert (found.items, found.coverage, found.thresholds) == (8, 0.0, ())
    none = c.fit(logits[:0], y[:0], u[:0], coverage=0.9, score="aps")
    assert none == Calibration("owner", 0)
    sums = c.class_sums(logits[:0], y[:0], u[:0], "aps")
    shared = c.shared_classes(sums, num_classes=4, coverage=0.9, score="aps")
    assert shared == Calibration("shared", 0)


def test_labels_have_a_threshold_each_by_hand() -> None:
    # ⌈11·0.8⌉ = 9th smallest of 1 − p of the ten items that have a label
    p = torch.arange(1, 11, dtype=torch.float64) / 20
    logits = torch.stack([p.logit(), p.logit(), p.logit()], dim=1)
    y = torch.ones(10, 3, dtype=torch.float64)
    y[:, 1] = torch.tensor([1.0] * 2 + [0.0] * 4 + [math.nan] * 4)
    y[:5, 2] = 0
    found = c.fit(logits, y, torch.zeros(10), coverage=0.8, score="aps")
    q = c.calibrated(logits, found, is_free=True)[:, 0].sort(descending=True).values
    limits = [float(1 - q[8]), math.inf, float(1 - q[4])]
    assert found.score == "label"
    assert found.thresholds == pytest.approx(limits)
    held = c.in_sets(c.calibrated(logits, found, is_free=True), found, p)
    assert held.sum(dim=0).tolist() == [9, 10, 5]  # of 5 items the 5th of ⌈6·0.8⌉


def test_sets_of_labels_hold_each_label_as_often_as_asked(
    generator: torch.Generator,
) -> None:
    covered = []
    for _ in range(20):
        logits = 2 * torch.randn(4000, 3, generator=generator, dtype=torch.float64)
        y = (torch.rand(4000, 3, generator=generator) < logits.sigmoid()).double()
        u = torch.zeros(800)
        found = c.fit(logits[:800], y[:800], u, coverage=0.9, score="aps")
        p = c.calibrated(logits[800:], found, is_free=True)
        held, has = c.in_sets(p, found, u), y[800:] == 1
        covered.append(
            [float(h[k].double().mean()) for h, k in zip(held.T, has.T, strict=True)]
        )
    assert np.mean(covered, axis=0) == pytest.approx([0.9] * 3, abs=0.012)


def test_labels_that_few_items_have_get_no_sets_and_sums_neither() -> None:
    logits = torch.tensor([[3.0, -1.0]] * 20)
    y = torch.tensor([[1.0, math.nan]] * 8 + [[0.0, 0.0]] * 12)
    found = c.fit(logits, y, torch.zeros(20), coverage=0.9, score="aps")
    assert found.temperature > 1
    assert found.coverage == 0
    sums = c.class_sums(logits, y, torch.zeros(20), "aps")
    shared = c.shared_classes(sums, num_classes=2, coverage=0.9, score="aps")
    assert shared.temperature == found.temperature
    assert {n: tuple(t.shape) for n, t in sums.items()} == c.sum_shapes(is_free=True)


# ------------------------------------------------------------------ scores of neighbours
PATH = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


def test_diffused_scores_of_a_path_by_hand() -> None:
    scores = torch.tensor([[0.0, 1.0], [0.4, 0.6], [0.8, 0.0], [0.3, 0.3]])
    found = c.diffused(scores, PATH, 0.25)
    expected = [[0.1, 0.9], [0.4, 0.575], [0.7, 0.15], [0.3, 0.3]]  # node 3 is alone
    torch.testing.assert_close(found, torch.tensor(expected))
    assert torch.equal(c.diffused(scores, PATH, 0.0), scores)


def test_diffused_scores_equal_a_loop_over_nodes(generator: torch.Generator) -> None:
    scores = torch.rand(30, 4, generator=generator, dtype=torch.float64)
    edges = torch.randint(0, 30, (2, 60), generator=generator)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    expected = scores.clone()
    for node in range(30):
        around = [scores[int(a)] for a, b in edges.T if int(b) == node]
        if around:
            expected[node] = 0.3 * scores[node] + 0.7 * sum(around) / len(around)
    torch.testing.assert_close(c.diffused(scores, edges, 0.7), expected)


def graph_of_classes(
    n: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, c.Surroundings]:
    """Draw logits that say little, and a graph in which neighbours share their class."""
    y = torch.randint(0, 4, (n,), generator=generator)
    logits = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    logits[torch.arange(n), y] += 1.0
    order = y.argsort(stable=True)
    edges = torch.stack([order[:-3], order[3:]])
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    rows = torch.randperm(n, generator=generator)
    return logits, y, c.Surroundings(logits, edges, u, rows)


def test_diffused_sets_cover_as_asked_and_are_smaller(
    generator: torch.Generator,
) -> None:
    covered, sizes, weights = [], {"aps": [], "daps": []}, []
    for _ in range(20):
        logits, y, graph = graph_of_classes(2000, generator)
        known, test = graph.rows[:600], graph.rows[600:]
        for score, each in sizes.items():
            some = graph._replace(rows=known) if score == "daps" else None
            u = graph.u[known]
            found = c.fit(
                logits[known], y[known], u, coverage=0.9, score=score, around=some
            )
            p = c.calibrated(logits[test], found, is_free=False)
            some = graph._replace(rows=test) if score == "daps" else None
            held = c.in_sets(p, found, graph.u[test], some)
            each.append(float(held.double().sum(dim=1).mean()))
        weights.append(found.diffusion)
        covered.append(float(held.gather(1, y[test][:, None]).double().mean()))
    # a mean of 20 draws of Beta(271, 30) has a standard deviation of 0.004
    assert np.mean(covered) == pytest.approx(0.9, abs=0.013)
    assert np.mean(sizes["daps"]) < 0.8 * np.mean(sizes["aps"])
    assert min(weights) > 0


def test_the_weight_of_neighbours_and_the_threshold_come_from_different_items(
    generator: torch.Generator,
) -> None:
    logits, y, graph = graph_of_classes(400, generator)
    graph = graph._replace(rows=torch.arange(100))
    found = c.fit(logits[:100], y[:100], graph.u[:100], coverage=0.8, score="daps",
                  around=graph)  # fmt: skip
    kept = (graph.u[:100] * 2**20).long() % 2 == 1
    every = c.class_scores(c.calibrated(logits, found, is_free=False), "aps", graph.u)
    every = c.diffused(every, graph.edge_index, found.diffusion)
    own = every[:100][kept].gather(1, y[:100][kept][:, None])[:, 0]
    assert found.thresholds == (c.threshold(own, 0.8),)


# ---------------------------------------------------------------- locally scaled intervals
def test_local_errors_are_means_of_items_with_a_similar_prediction() -> None:
    predicted = torch.arange(60, dtype=torch.float64).flip(0)
    error = torch.where(predicted < 30, 1.0, 3.0).double()
    x, y = c.local_errors(predicted, error)
    assert x == (14.5, 44.5)
    assert y == (1.0, 3.0)
    assert c.local_errors(predicted[:0], error[:0]) == ((0.0,), (1.0,))
    # no error at all is no reason for an empty interval: 5 % of the mean error of 0.5
    _, y = c.local_errors(predicted, (predicted >= 30).double())
    assert y == (0.025, 1.0)


def test_scaled_intervals_by_hand() -> None:
    found = Calibration(
        "owner", 9, 1.0, 0.9, "scaled", (2.0,), (((0.0, 10.0), (1.0, 3.0)),)
    )
    predicted = torch.tensor([[-5.0], [5.0], [10.0]], dtype=torch.float64)
    assert c.half_widths(predicted, found)[:, 0].tolist() == [2.0, 4.0, 6.0]
    assert Calibration.from_dict(found.as_dict()) == found


def test_scaled_intervals_cover_where_errors_are_large_and_small(
    generator: torch.Generator,
) -> None:
    covered, widths = [], []
    for _ in range(20):
        predicted = 4 * torch.rand(4000, 1, generator=generator, dtype=torch.float64)
        noise = torch.randn(4000, 1, generator=generator, dtype=torch.float64)
        values = predicted + (0.1 + predicted) * noise
        u = torch.rand(800, generator=generator, dtype=torch.float64)
        for score in ("aps", "scaled"):
            found = c.fit(
                predicted[:800], values[:800], u, coverage=0.9, score=score,
                has_numbers=True,
            )  # fmt: skip
            held, _ = c.in_intervals(predicted[800:], values[800:], found)
            low = predicted[800:] < 1
            covered.append(
                [float(held[k].double().mean()) for k in (low, ~low, low | 1)]
            )
            widths.append(float(c.half_widths(predicted[800:], found).mean()))
    plain, scaled = np.mean(covered[::2], axis=0), np.mean(covered[1::2], axis=0)
    assert plain[0] > 0.98
    assert plain[1] < 0.88
    assert scaled[:2] == pytest.approx([0.9, 0.9], abs=0.03)
    assert scaled[2] == pytest.approx(0.9, abs=0.012)
    assert np.mean(widths[1::2]) < 0.95 * np.mean(widths[::2])


# ------------------------------------------------------------------------ its JSON form
def test_calibration_survives_its_json_form() -> None:
    one = Calibration("owner", 10, 1.0, 0.8, "residual", (9.0, math.inf))
    assert one.as_dict()["thresholds"] == [9.0, None]
    assert Calibration.from_dict(one.as_dict()) == one


@pytest.mark.parametrize(
    "change",
    [
        {"source": "none"}, {"items": 1.5}, {"items": -1}, {"temperature": 0},
        {"temperature": math.inf}, {"coverage": 1}, {"score": "x"}, {"score": ""},
        {"thresholds": [-1.0]}, {"thresholds": "a"}, {"thresholds": []},
        {"thresholds": [math.nan]}, {"thresholds": [1.0] * 10_001}, {"more": 1},
        {"coverage": 0.0}, {"items": True}, {"diffusion": 1.0}, {"diffusion": "a"},
        {"score": "scaled"}, {"score": "scaled", "knots": [[[0.0], [0.0]]]},
    ],
)  # fmt: skip
def test_odd_calibrations_are_refused(change: dict[str, object]) -> None:
    good = Calibration("owner", 10, 1.5, 0.8, "lac", (0.3,)).as_dict()
    with pytest.raises(ValueError, match="calibration"):
        Calibration.from_dict(good | change)


# ------------------------------------------------------------------------------ isotonic
def test_an_isotonic_map_pools_violators_by_hand() -> None:
    # of class 1: probabilities 0.1 … 0.5 with hits 0, 1, 0, 1, 1: the second and third pool
    p1 = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    p, y = torch.stack([1 - p1, p1], dim=1), torch.tensor([0, 1, 0, 1, 1])
    knots = c.isotonic_map(p, y)
    found = Calibration("owner", 5, knots=knots)
    at = torch.tensor([0.1, 0.2, 0.25, 0.3, 0.35, 0.5, 0.99], dtype=torch.float64)
    logits = torch.stack([(1 - at).log(), at.log()], dim=1)
    mapped = c.calibrated(logits, found, is_free=False)[:, 1]
    expected = [0.0, 0.5, 0.5, 0.5, 0.75, 1.0, 1.0]
    torch.testing.assert_close(mapped, torch.tensor(expected, dtype=torch.float64))
    assert Calibration.from_dict(found.as_dict()) == found


def test_an_isotonic_map_repairs_what_no_temperature_can(
    generator: torch.Generator,
) -> None:
    p1 = torch.rand(20_000, generator=generator, dtype=torch.float64)
    y = (torch.rand(20_000, generator=generator) < p1**3).long()
    u = torch.rand(20_000, generator=generator, dtype=torch.float64)
    logits = torch.stack([(1 - p1).log(), p1.log()], dim=1)
    errors = {}
    for is_isotonic in (False, True):
        found = c.fit(
            logits[:8000], y[:8000], u[:8000], coverage=0.9, score="lac",
            is_isotonic=is_isotonic,
        )  # fmt: skip
        p = c.calibrated(logits[8000:], found, is_free=False)
        errors[is_isotonic] = c.calibration_error(c.reliability(p[:, 1], y[8000:]))
        own = c.class_scores(p, "lac", u[8000:]).gather(1, y[8000:, None])
        covered = float((own <= found.thresholds[0]).double().mean())
        assert covered == pytest.approx(0.9, abs=0.015)
    assert errors[True] < 0.02 < errors[False]


def test_sets_after_an_isotonic_map_of_few_items_still_cover(
    generator: torch.Generator,
) -> None:
    covered = []
    for _ in range(60):
        logits, y, u = draw(200, generator, scale=2.0)
        found = c.fit(logits, y, u, coverage=0.9, score="lac", is_isotonic=True)
        logits, y, u = draw(2000, generator, scale=2.0)
        p = c.calibrated(logits, found, is_free=False)
        own = c.class_scores(p, "lac", u).gather(1, y[:, None])
        covered.append(float((own <= found.thresholds[0]).double().mean()))
    # many scores are equal after the map, so that coverage may only be too high
    assert np.mean(covered) > 0.9 - 0.012


def test_labels_that_are_unknown_everywhere_keep_their_probability() -> None:
    y = torch.tensor([[1.0, math.nan], [0.0, math.nan]])
    knots = c.isotonic_map(torch.tensor([[0.9, 0.3], [0.2, 0.6]]), y)
    assert knots[1] == ((0.0, 1.0), (0.0, 1.0))
    logits = torch.tensor([[5.0, 0.0]])
    found = Calibration("owner", 2, knots=knots)
    p = c.calibrated(logits, found, is_free=True)
    assert p.tolist() == [[1.0, 0.5]]


@pytest.mark.parametrize(
    "knots",
    [
        "a", [1], [[[0.1], [0.2, 0.3]]], [[[], []]], [[[0.2, 0.1], [0.1, 0.2]]],
        [[[0.1], [1.2]]], [[["0.1"], [0.2]]], [[[math.nan], [0.2]]], [[[0.1]]],
    ],
)  # fmt: skip
def test_odd_knots_are_refused(knots: object) -> None:
    good = Calibration("owner", 10, 1.5, 0.8, "lac", (0.3,)).as_dict()
    with pytest.raises(ValueError, match="knots"):
        Calibration.from_dict(good | {"knots": knots})
