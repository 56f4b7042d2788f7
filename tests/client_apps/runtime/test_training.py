from __future__ import annotations

import dataclasses
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.fedprox import proximal_term
from flower_fgl.client_apps.runtime.training import (
    TrainingSet,
    load_state,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    state_of,
    train_and_check,
    train_epochs,
    turn_for_steps,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.regression import regression_loss
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.methods import parse_config
from flower_fgl.nn import Backbone, GraphInput, build_model


@pytest.fixture
def config() -> RunConfig:
    return parse_config({})


@pytest.fixture
def data(toy: NodeDataset) -> TrainingSet:
    index = torch.tensor([0, 1, 4, 5])
    return TrainingSet(GraphInput(toy.x, toy.edge_index), index, toy.y[index])


def model_of(dropout: float = 0.0) -> Backbone:
    torch.manual_seed(0)
    return build_model(
        "gcn",
        in_channels=6,
        hidden_channels=4,
        num_outputs=2,
        num_layers=2,
        dropout=dropout,
    )


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_column_major_weights_are_stepped_in_place_as_row_major_ones(name: str) -> None:
    config = parse_config({"optimizer": name, "clip-gradient": 0.7})
    draw = torch.Generator().manual_seed(0)
    start, pulls = (
        torch.randn(5, 3, generator=draw),
        torch.randn(6, 5, 3, generator=draw),
    )
    found = []
    for is_turned in (False, True):
        model = torch.nn.Linear(3, 5)
        model.weight.data = start.t().contiguous().t() if is_turned else start.clone()
        strides, place = model.weight.stride(), model.weight.data_ptr()
        moments: dict[str, Tensor] = {}
        for half in pulls.chunk(2):  # the second half continues from kept moments
            optimizer = make_optimizer(model, config)
            restore_optimizer(model, optimizer, moments)
            for pull in half:
                optimizer.zero_grad()
                (model.weight * pull).sum().backward()
                optimizer.step()
            moments = optimizer_tensors(model, optimizer)
        assert (model.weight.stride(), model.weight.data_ptr()) == (strides, place)
        assert all(t.stride() == strides for t in moments.values() if t.dim() == 2)
        found.append({**moments, "weight": model.weight.detach()})
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor)


def test_moments_of_weights_without_gradient_become_zero() -> None:
    config = parse_config({"weight-decay": 0.0, "local-epochs": 10, "rounds": 90})
    model = torch.nn.Linear(3, 5)
    optimizer = make_optimizer(model, config)
    for step in range(900):  # those of torch are 1e-42, with which processors are slow
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(step == 0))
        optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], torch.zeros(5, 3))


def test_training_is_plain_cross_entropy_descent(
    data: TrainingSet, config: RunConfig
) -> None:
    ours, plain = model_of(), model_of()
    train_epochs(ours, data, make_optimizer(ours, config), epochs=3)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(data.inputs)[data.index], data.labels).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_loss_is_that_of_the_last_epoch(
    data: TrainingSet, config: RunConfig
) -> None:
    model = model_of()
    assert model.training
    first = F.cross_entropy(model(data.inputs)[data.index], data.labels).item()
    loss = train_epochs(model, data, make_optimizer(model, config), epochs=1)
    assert loss == pytest.approx(first)


def test_data_loss_replaces_the_cross_entropy(
    data: TrainingSet, config: RunConfig
) -> None:
    seen = []

    def halved(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        seen.append((labels.tolist(), index.tolist()))
        return 0.5 * F.cross_entropy(logits, labels)

    plain = train_epochs(model_of(), data, make_optimizer(model_of(), config), epochs=1)
    model = model_of()
    optimizer = make_optimizer(model, config)
    loss = train_epochs(model, data, optimizer, epochs=1, data_loss=halved)
    assert loss == pytest.approx(plain / 2)
    assert seen == [(data.labels.tolist(), data.index.tolist())]


def test_a_batch_without_a_known_number_makes_no_step(
    data: TrainingSet, config: RunConfig
) -> None:
    unknown = torch.full((len(data.index), 2), math.nan)
    nothing = TrainingSet(data.inputs, data.index, unknown)

    def loss_of(output: Tensor, z: Tensor, index: Tensor) -> Tensor:
        if bool(z.isnan().all()):
            return z.new_zeros(())
        return regression_loss(output, z)

    model = model_of()
    before = state_of(model)
    optimizer = make_optimizer(model, config)
    loss = train_epochs(model, nothing, optimizer, epochs=2, data_loss=loss_of)
    assert math.isnan(loss)
    assert not optimizer.state  # no moment, so that weight decay moved nothing either
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    unknown[1, 0] = 0.5  # one number of one item, in one of the two batches
    train_epochs(model, nothing, optimizer, epochs=1, batch_size=2, data_loss=loss_of)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {1}


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_clip_gradient_scales_the_gradient_of_each_step(
    data: TrainingSet, config: RunConfig, name: str
) -> None:
    config = dataclasses.replace(config, optimizer=name, weight_decay=0.0)
    norms = []
    for clip in (0.0, 1e-3, 1e3):
        model = model_of()
        clipped = dataclasses.replace(config, clip_gradient=clip)
        train_epochs(model, data, make_optimizer(model, clipped), epochs=1)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
    plain, small, large = norms
    assert plain > 1e-2
    assert small == pytest.approx(1e-3, rel=1e-3)
    assert large == plain


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_training_with_restored_moments_equals_uninterrupted_training(
    data: TrainingSet, config: RunConfig, name: str
) -> None:
    config = dataclasses.replace(config, optimizer=name)
    straight = model_of()
    train_epochs(straight, data, make_optimizer(straight, config), epochs=6)
    broken = model_of()
    optimizer = make_optimizer(broken, config)
    train_epochs(broken, data, optimizer, epochs=3)
    kept = {k: v.clone() for k, v in optimizer_tensors(broken, optimizer).items()}
    fresh = model_of()
    load_state(fresh, broken.state_dict())
    optimizer = make_optimizer(fresh, config)
    restore_optimizer(fresh, optimizer, kept)
    train_epochs(fresh, data, optimizer, epochs=3)
    for a, b in zip(straight.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_moments_of_another_architecture_are_ignored(config: RunConfig) -> None:
    model = model_of()
    optimizer = make_optimizer(model, config)
    name = next(name for name, p in model.named_parameters() if p.dim() == 2)
    tensors = {f"exp_avg/{name}": torch.zeros(9, 9), "exp_avg/gone": torch.zeros(1)}
    restore_optimizer(model, optimizer, tensors)
    assert optimizer_tensors(model, optimizer) == {}


def test_batches_cover_each_training_node_once_an_epoch(
    data: TrainingSet, config: RunConfig, generator: torch.Generator
) -> None:
    seen: list[Tensor] = []
    model = model_of()
    original = F.cross_entropy

    def spy(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return original(logits, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "cross_entropy", spy)
        train_epochs(
            model,
            data,
            make_optimizer(model, config),
            epochs=2,
            batch_size=3,
            generator=generator,
        )
    assert [len(labels) for labels in seen] == [3, 1, 3, 1]
    assert sorted(torch.cat(seen[:2]).tolist()) == sorted(data.labels.tolist())


def train_sampled(
    data: TrainingSet, config: RunConfig, numbers: tuple[int, ...], seed: int = 0
) -> list[Tensor]:
    model = model_of()
    train_epochs(
        model,
        data,
        make_optimizer(model, config),
        epochs=2,
        batch_size=2,
        generator=torch.Generator().manual_seed(seed),
        num_neighbors=numbers,
    )
    return [p.detach() for p in model.parameters()]


def test_batches_of_all_drawn_neighbours_train_as_whole_batches(
    data: TrainingSet, config: RunConfig
) -> None:
    drawn, whole = (train_sampled(data, config, n) for n in ((99, 99), ()))
    for a, b in zip(drawn, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_drawn_neighbours_follow_the_seed(data: TrainingSet, config: RunConfig) -> None:
    first, again, other, whole = (
        train_sampled(data, config, numbers, seed)
        for numbers, seed in (((1, 1), 0), ((1, 1), 0), ((1, 1), 3), ((), 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, whole, strict=True))


def test_another_number_of_layers_than_num_neighbors_is_an_error(
    data: TrainingSet, config: RunConfig
) -> None:
    with pytest.raises(ConfigError, match=r"has 3 numbers.* network has 2 layers"):
        train_sampled(data, config, (5, 5, 5))


def test_without_training_nodes_nothing_changes(
    data: TrainingSet, config: RunConfig
) -> None:
    none = TrainingSet(data.inputs, data.index[:0], data.labels[:0])
    model = model_of()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    loss = train_epochs(model, none, make_optimizer(model, config), epochs=2)
    assert loss != loss
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_proximal_term_by_hand() -> None:
    # (0.5 / 2) · ((3−1)² + (0−2)²) = 0.25 · 8 = 2
    theta = [torch.tensor([3.0, 0.0], requires_grad=True)]
    term = proximal_term(theta, [torch.tensor([1.0, 2.0])], mu=0.5)
    assert term.item() == pytest.approx(2.0)
    (gradient,) = torch.autograd.grad(term, theta)
    torch.testing.assert_close(gradient, torch.tensor([1.0, -1.0]))  # μ(θ − w)


def checked(
    scores: list[float], *, epochs: int, patience: int = 0, score: str = "accuracy"
) -> tuple[float, list[int], float]:
    """Train a counter two epochs at a time; check ``i`` scores ``scores[i]``."""
    model = torch.nn.Linear(1, 1, bias=False)
    trained: list[int] = []
    left = iter(scores)

    def train(number: int) -> float:
        trained.append(number)
        with torch.no_grad():
            model.weight.fill_(sum(trained))
        return 1 / sum(trained)

    loss = train_and_check(
        model,
        train,
        lambda: next(left),
        epochs=epochs,
        check_every=2,
        patience=patience,
        score=score,
    )
    return model.weight.item(), trained, loss


@pytest.mark.parametrize("epochs", [4, 12])
def test_an_error_is_checked_like_its_negative(epochs: int) -> None:
    values = [0.5, 0.4, 0.6, 0.6, 0.5, 0.9]
    expected = checked(values, epochs=epochs, patience=2)
    errors = [1 - value for value in values]
    assert checked(errors, epochs=epochs, patience=2, score="rmse") == expected


def test_an_error_of_zero_is_kept_and_a_diverged_check_counts_as_worse() -> None:
    values = [0.0, math.nan, math.nan, 0.0]
    weight, trained, _ = checked(values, epochs=8, patience=2, score="rmse")
    assert weight == 2
    assert len(trained) == 3


def test_the_earliest_of_equally_good_checks_is_kept() -> None:
    weight, trained, loss = checked([0.5, 0.7, 0.7, 0.6], epochs=7)
    assert weight == 4
    assert trained == [2, 2, 2, 1]
    assert loss == 1 / 7


def test_training_stops_after_patience_checks_without_improvement() -> None:
    weight, trained, _ = checked([0.5, 0.4, 0.6, 0.6, 0.5, 0.9], epochs=12, patience=2)
    assert weight == 6
    assert len(trained) == 5


def test_without_a_check_above_zero_the_last_weights_are_kept() -> None:
    assert checked([0.0, 0.0], epochs=4)[0] == 4


def test_without_validation_nodes_training_never_stops_early() -> None:
    weight, trained, _ = checked([math.nan] * 4, epochs=8, patience=1)
    assert weight == 8
    assert len(trained) == 4


def test_no_epochs_train_nothing() -> None:
    weight_changes = checked([], epochs=0)
    assert weight_changes[1] == []
    assert math.isnan(weight_changes[2])


def test_an_optimizer_goes_with_its_last_reference() -> None:
    """Its weights and moments would wait for the collector of cycles, in every round."""
    weight = torch.nn.Parameter(torch.zeros(3, 2).t())
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    turn_for_steps(optimizer)
    weight.grad = torch.ones(3, 2).t()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 3), -0.1))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
