from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.f2l import (
    Adaptation,
    adapt,
    attend,
    contrast,
    episode_losses,
    masked_cross_entropy,
    teacher_divergence,
)
from flower_fgl.methods.f2l import F2LSettings

WIDTH, CLASSES, ROWS = 4, 3, 7


@pytest.fixture
def module() -> Adaptation:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Adaptation(WIDTH, CLASSES)


@pytest.fixture
def episode(generator: torch.Generator) -> dict[str, Tensor]:
    """Classes 0 and 2; three support rows, three queries, one row of padding."""
    return {
        "h": torch.randn(ROWS, WIDTH, generator=generator),
        "labels": torch.tensor([0, 2, 0, 2, 0, 2, 1]),
        "is_support": torch.tensor([1, 1, 1, 0, 0, 0, 0]).bool(),
        "classes": torch.tensor([1, 0, 1]).bool(),
    }


def test_attention_mixes_the_values_of_the_support() -> None:
    eye = torch.eye(2)
    parameters = {
        "query.weight": eye,
        "key.weight": eye,
        "value.weight": 10 * eye,
        "classifier.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        "classifier.bias": torch.tensor([0.0, 0.0, 1.0]),
    }
    root = math.sqrt(2)
    h = torch.tensor([[root * math.log(3), 0.0]])
    support = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])
    counts = torch.tensor([True, True, False])
    # scores ln 3 and 0: weights 3/4 and 1/4, so r = h + 10 · (3/4, 1/4)
    representation, logits = attend(parameters, h, support, counts)
    first = root * math.log(3) + 7.5
    torch.testing.assert_close(representation, torch.tensor([[first, 2.5]]))
    torch.testing.assert_close(logits, torch.tensor([[first, 2.5, first + 3.5]]))


def test_cross_entropy_uses_only_selected_classes_and_rows() -> None:
    logits = torch.tensor([[0.0, 50.0, 0.0], [math.log(3), 50.0, 0.0], [9.0, 9.0, 9.0]])
    labels = torch.tensor([0, 2, 1])
    classes = torch.tensor([True, False, True])
    rows = torch.tensor([True, True, False])
    # −ln 1/2 and −ln 1/4
    value = masked_cross_entropy(logits, labels, rows, classes)
    assert float(value) == pytest.approx((math.log(2) + math.log(4)) / 2)


def test_contrast_compares_a_node_with_the_other_selected_nodes() -> None:
    one = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    other = torch.tensor([[5.0, 0.0], [0.0, 1.0], [7.0, 7.0]])
    rows = torch.tensor([True, True, False])
    # each cosine is 1 with itself and 0 with the other: −ln(e² / (e² + 1))
    value = contrast(one, other, rows, tau=0.5)
    assert float(value) == pytest.approx(math.log(1 + math.exp(-2)))
    swapped = contrast(one, other[[1, 0, 2]], rows, tau=0.5)
    assert float(swapped) == pytest.approx(math.log(1 + math.exp(2)))


def test_distillation_is_the_divergence_over_the_classes_of_the_episode() -> None:
    teacher = torch.tensor([[math.log(3), 99.0, 0.0], [1.0, 2.0, 3.0]])
    student = torch.tensor([[0.0, -99.0, 0.0], [7.0, 7.0, 7.0]])
    classes = torch.tensor([True, False, True])
    rows = torch.tensor([True, False])
    # teacher (3/4, 1/4), student (1/2, 1/2)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    value = teacher_divergence(teacher, student, rows, classes)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert float(teacher_divergence(teacher, teacher, rows, classes)) == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, rows, classes: masked_cross_entropy(
            x, torch.zeros(3, dtype=torch.int64), rows, classes
        ),
        lambda x, rows, classes: contrast(x, x.flip(0), rows, tau=0.5),
        lambda x, rows, classes: teacher_divergence(
            x.detach().flip(0), x, rows, classes
        ),
    ],
)
def test_losses_and_their_gradients_are_finite_with_and_without_rows(
    loss: Callable[..., Tensor], generator: torch.Generator
) -> None:
    classes = torch.tensor([True, False, True])
    for rows in ([1, 1, 1], [1, 0, 0], [0, 0, 0]):
        x = torch.randn(3, 3, generator=generator, requires_grad=True)
        value = loss(x, torch.tensor(rows).bool(), classes)
        value.backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert bool(x.grad.any()) == (sum(rows) > 1 or (sum(rows) == 1 and value > 0))


def test_a_step_of_adaptation_is_a_gradient_step(
    module: Adaptation, episode: dict[str, Tensor]
) -> None:
    start = dict(module.named_parameters())
    adapted = adapt(start, **episode, steps=1, lr=0.1)
    _, logits = attend(start, episode["h"], episode["h"][:3], torch.ones(3).bool())
    own = logits[:3][:, [0, 2]]
    loss = F.cross_entropy(own, torch.tensor([0, 1, 0]))
    slopes = torch.autograd.grad(loss, list(start.values()))
    for (name, value), slope in zip(start.items(), slopes, strict=True):
        torch.testing.assert_close(adapted[name], value - 0.1 * slope)
    assert torch.equal(adapted["classifier.bias"][1], start["classifier.bias"][1])


def test_zero_steps_change_nothing(
    module: Adaptation, episode: dict[str, Tensor]
) -> None:
    start = dict(module.named_parameters())
    assert adapt(start, **episode, steps=0, lr=0.1) == start


def test_more_steps_fit_the_support_set_better(
    module: Adaptation, episode: dict[str, Tensor]
) -> None:
    start = dict(module.named_parameters())
    losses = []
    for steps in (0, 1, 5, 25):
        adapted = adapt(start, **episode, steps=steps, lr=0.1)
        _, logits = attend(adapted, episode["h"], episode["h"], episode["is_support"])
        loss = masked_cross_entropy(
            logits, episode["labels"], episode["is_support"], episode["classes"]
        )
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def weights(**changes: float) -> F2LSettings:
    return F2LSettings(inner_steps=2, **changes)  # type: ignore[arg-type]


def batch(episode: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The episode, and one with other embeddings whose last query is left out."""
    one = {
        **episode,
        "is_query": torch.tensor([0, 0, 0, 1, 1, 1, 0]).bool(),
        "teacher": torch.randn(ROWS, CLASSES, generator=generator),
    }
    other = {**one, "h": torch.randn(ROWS, WIDTH, generator=generator)}
    other["is_query"] = torch.tensor([0, 0, 0, 1, 1, 0, 0]).bool()
    return {name: torch.stack([one[name], other[name]]) for name in one}


def test_a_batch_of_episodes_gives_the_losses_of_single_episodes(
    module: Adaptation, episode: dict[str, Tensor], generator: torch.Generator
) -> None:
    both = batch(episode, generator)
    together = episode_losses(module, weights(), **both)
    alone = [
        episode_losses(module, weights(), **{n: t[k : k + 1] for n, t in both.items()})
        for k in range(2)
    ]
    torch.testing.assert_close(together, torch.cat(alone))
    slow = []
    for k in range(2):
        one = {name: tensor[k] for name, tensor in both.items()}
        adapted = adapt(
            dict(module.named_parameters()),
            one["h"],
            one["labels"],
            one["is_support"],
            one["classes"],
            steps=2,
            lr=0.1,
        )
        made, logits = attend(adapted, one["h"], one["h"], one["is_support"])
        asked, classes = one["is_query"], one["classes"]
        slow.append(
            masked_cross_entropy(logits, one["labels"], asked, classes)
            + 0.1 * contrast(made, one["h"], one["is_support"], tau=0.5)
            + 0.1 * teacher_divergence(one["teacher"], logits, asked, classes)
        )
    torch.testing.assert_close(together, torch.stack(slow))


@pytest.mark.parametrize("term", ["contrast_weight", "distillation_weight"])
def test_contrast_and_distillation_add_their_weight_times_their_value(
    module: Adaptation,
    episode: dict[str, Tensor],
    generator: torch.Generator,
    term: str,
) -> None:
    both = batch(episode, generator)
    none, once, twice = (
        episode_losses(
            module,
            weights(
                **{"contrast_weight": 0.0, "distillation_weight": 0.0, term: value}
            ),
            **both,
        )
        for value in (0.0, 1.0, 2.0)
    )
    torch.testing.assert_close(twice - once, once - none)
    assert (once > none).all()


def test_gradients_flow_through_the_steps_of_adaptation(
    module: Adaptation, episode: dict[str, Tensor], generator: torch.Generator
) -> None:
    both = batch(episode, generator)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def total(value: Tensor, at: int) -> Tensor:
        shifted = dict(zip(names, parameters, strict=True))
        shifted[names[at]] = value
        copies = {n: t.expand(2, *t.shape) for n, t in shifted.items()}
        adapted = adapt(
            copies,
            both["h"],
            both["labels"],
            both["is_support"],
            both["classes"],
            steps=2,
            lr=0.1,
        )
        _, logits = attend(adapted, both["h"], both["h"], both["is_support"])
        return masked_cross_entropy(
            logits, both["labels"], both["is_query"], both["classes"]
        ).sum()

    loss = episode_losses(
        module, weights(contrast_weight=0.0, distillation_weight=0.0), **both
    ).sum()
    slopes = torch.autograd.grad(loss, parameters)
    step = 1e-3
    for at, slope in enumerate(slopes):
        direction = torch.randn(slope.shape, generator=generator)
        ends = [
            total((parameters[at] + sign * step * direction).requires_grad_(), at)
            for sign in (1, -1)
        ]
        measured = (ends[0] - ends[1]) / (2 * step)
        expected = (slope * direction).sum()
        torch.testing.assert_close(measured, expected, atol=2e-3, rtol=2e-2)


def test_a_blank_module_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    module = Adaptation.blank(WIDTH, CLASSES, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    numbers = sum(p.numel() for p in module.parameters())
    assert numbers == 3 * WIDTH**2 + WIDTH * CLASSES + CLASSES
