"""FedGen's losses, by hand, and its generator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.fedgen import (
    LatentGenerator,
    class_shares,
    diversity_loss,
    ensemble_loss,
    generator_shapes,
    mean_divergence,
)
from flower_fgl.client_apps.fedgen import FedGenClientApp
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.weights import GeneratorDownload
from tests.support.random_clients import random_client

LN3 = math.log(3)


def test_shares_of_the_classes_by_hand() -> None:
    found = class_shares(torch.tensor([[3.0, 0, 0], [1, 2, 0]]))
    assert found.tolist() == [[0.75, 0, 0], [0.25, 1, 0]]


def test_the_ensembles_loss_by_hand() -> None:
    weights = torch.tensor([[0.75, 0.0], [0.25, 1.0]])
    labels = torch.tensor([0, 1])
    first = torch.tensor(
        [[LN3, 0.0], [5.0, 0.0]]
    )  # −log p of the labels: ln 4/3, unused
    second = torch.tensor([[0.0, 0.0], [0.0, LN3]])  # ln 2, ln 4/3
    expected = 0.75 * math.log(4 / 3) + 0.25 * math.log(2) + math.log(4 / 3)
    found = ensemble_loss(torch.stack([first, second]), labels, weights)
    assert found.item() == pytest.approx(expected / 2)


def test_the_diversity_loss_by_hand() -> None:
    noise = torch.tensor([[0.0, 0.0], [1.0, 3.0]])  # mean of squares 5
    made = torch.tensor([[0.0, 0.0], [0.2, 0.6]])  # mean distance .4
    # of the four pairs two are equal: mean 5 · .4 / 2 = 1
    assert diversity_loss(noise, made).item() == pytest.approx(math.exp(-1))


def test_the_diversity_loss_equals_the_sum_over_all_pairs() -> None:
    torch.manual_seed(0)
    noise, x = torch.randn(7, 3), torch.randn(7, 5)
    x[2] = x[4]  # equal rows
    exact = x.clone().requires_grad_()
    total = torch.zeros(())
    for a in range(7):
        for b in range(7):
            apart = (noise[a] - noise[b]).square().mean()
            total = total + apart * (exact[a] - exact[b]).abs().mean()
    direct = (-total / 49).exp()
    direct.backward()
    made = x.clone().requires_grad_()
    found = diversity_loss(noise, made)
    found.backward()
    torch.testing.assert_close(found, direct)
    torch.testing.assert_close(made.grad, exact.grad)


def test_the_divergence_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0]], requires_grad=True)
    found = mean_divergence(logits, torch.tensor([[LN3, 0.0]]))
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.item() == pytest.approx(expected)
    found.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.25]]))


@pytest.mark.parametrize("term", ["ensemble", "diversity"])
def test_both_losses_reach_the_whole_generator(term: str) -> None:
    torch.manual_seed(0)
    generator = LatentGenerator(3, 4, noise_channels=2, hidden_channels=8)
    head = torch.nn.Linear(4, 3)
    labels, noise = torch.arange(12) % 3, torch.randn(12, 2)
    made = generator(labels, noise)
    if term == "ensemble":
        ensemble_loss(head(made)[None], labels, torch.ones(1, 3)).backward()
    else:
        diversity_loss(noise, made).backward()
    for name, parameter in generator.named_parameters():
        assert parameter.grad is not None, name
        # BatchNorm removes the first bias; the last one moves all embeddings alike
        is_level = name == "layers.0.bias"
        is_level |= term == "diversity" and name == "layers.3.bias"
        assert is_level or parameter.grad.abs().max() > 1e-6, name


def test_the_generator_learns_embeddings_that_a_head_recognises() -> None:
    torch.manual_seed(0)
    generator = LatentGenerator(3, 4, noise_channels=2, hidden_channels=16)
    head = torch.nn.Linear(4, 3).requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    labels, noise = torch.arange(60) % 3, torch.randn(60, 2)
    for _ in range(100):
        logits = head(generator(labels, noise))[None]
        loss = ensemble_loss(logits, labels, torch.ones(1, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = head(generator.eval()(labels, noise)).argmax(dim=1)
    assert float((found == labels).float().mean()) > 0.9


def test_the_shapes_are_those_of_the_sent_state() -> None:
    made = LatentGenerator(3, 4, noise_channels=2, hidden_channels=8)
    state = torch.get_rng_state()
    shapes = generator_shapes(3, 4, 2, 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert shapes == {n: tuple(t.shape) for n, t in made.sent_state().items()}
    assert sum(map(math.prod, shapes.values())) == 5 * 8 + 8 + 4 * 8 + 8 * 4 + 4


def test_negative_probabilities_are_refused() -> None:
    payload = GeneratorDownload({}, {}, torch.tensor([1.5, -0.5]))
    content: RecordDict = payload.to_record()
    with pytest.raises(PayloadError, match="negative"):
        GeneratorDownload.from_record(content, ({}, {}, 2))


def test_clients_do_not_use_a_generator_that_was_never_trained(
    small: dict[str, Any],
) -> None:
    settings = {**small, "stacked": "false"}
    short = {"generator_channels": 16, "server_steps": 0}
    plain = simulate("fedavg", **settings)
    found = simulate("fedgen", **settings, fedgen=short)
    pairs = list(zip(plain.rounds, found.rounds, strict=True))
    assert all(one["metrics"] == other["metrics"] for one, other in pairs)
    taught = simulate("fedgen", **settings, fedgen={**short, "server_steps": 3})
    assert taught.rounds[-1]["loss"] != plain.rounds[-1]["loss"]


def test_clients_that_hide_their_class_counts_take_part(small: dict[str, Any]) -> None:
    short = {"generator_channels": 16, "server_steps": 3}
    run = simulate("fedgen", **{**small, "fedgen": short}, share_class_counts=False)
    assert not any(row["failures"] for row in run.rounds)
    assert run.rounds[-1]["numbers"]["ensemble"] > 0


def test_a_client_generates_each_row_apart_from_the_others(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    settings = {"local-epochs": 1}
    client = random_client(
        "fedgen", settings=settings, generator_channels=8, generated=5
    )
    app = FedGenClientApp()
    _, shapes, classes = app.download_spec(client)
    # above 0, as the variance of BatchNorm must be, and far from the batch's own
    state = {n: torch.rand(s, generator=generator) + 0.5 for n, s in shapes.items()}
    model = state_of(client.build_model(initialise=True))
    received = GeneratorDownload(model, state, torch.full((classes,), 1 / classes))
    forward = LatentGenerator.forward
    made: list[tuple[Tensor, Tensor, Tensor]] = []

    def recorded(self: LatentGenerator, labels: Tensor, noise: Tensor) -> Tensor:
        rows = forward(self, labels, noise)
        made.append((labels, noise, rows))
        return rows

    with monkeypatch.context() as context:
        context.setattr(LatentGenerator, "forward", recorded)
        app.fit(client, 2, received)
    assert [len(rows) for _, _, rows in made] == [5, 15]  # drawn, and of training nodes
    alone = LatentGenerator(
        classes, client.config.hidden_channels, noise_channels=32, hidden_channels=8
    )
    alone.load_state_dict(state, strict=False)  # all but BatchNorm's counter
    alone.eval()
    for labels, noise, rows in made:
        for number, row in enumerate(rows):
            one = slice(number, number + 1)
            torch.testing.assert_close(alone(labels[one], noise[one])[0], row)
