"""AdaFGL in runs: FedAvg first, then a step that each client takes alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.algorithms.adafgl import AdaFGLNet
from flower_fgl.client_apps.adafgl import AdaFGLClientApp
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.test_fedpg import C, N, make_client


def test_the_rounds_are_fedavg_s_and_the_second_step_sends_nothing(
    small: dict[str, Any],
) -> None:
    settings = {**small, "rounds": 2, "stacked": "false"}
    theirs = simulate("fedavg", **settings)
    off = simulate("adafgl", **settings, adafgl={"finetune_epochs": 0})
    run = simulate("adafgl", **settings, adafgl={"finetune_epochs": 3, "width": 8})
    assert len(off.rounds) == 2
    for one, other, third in zip(theirs.rounds, off.rounds, run.rounds, strict=False):
        assert one["metrics"] == other["metrics"] == third["metrics"]
        assert one["loss"] == other["loss"] == third["loss"]
    last = run.rounds[-1]
    assert last["phase"] == "finetune"
    assert set(last["bytes"]["up"]) == {"metrics"}
    assert last["bytes"]["down"] == run.rounds[-2]["bytes"]["down"]
    assert last["metrics"]["local"] != run.rounds[-2]["metrics"]["local"]
    terms = [row["terms"] for row in run.clients if row["round"] == 3]
    assert terms
    assert all(0 <= row["homophily"] <= 1 for row in terms)
    hidden = simulate(
        "adafgl",
        **settings,
        min_class_count=2,
        adafgl={"finetune_epochs": 1, "width": 8},
    )
    assert not any(row.get("terms") for row in hidden.clients if row["round"] == 3)


def test_a_refused_second_step_is_evaluated_without_stacking(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the stored models are those of the second step, which no stack of backbones can hold
    fit = AdaFGLClientApp.finetune
    monkeypatch.setattr(
        AdaFGLClientApp,
        "finetune",
        lambda *arguments: replace(fit(*arguments), loss=math.nan),
    )
    run = simulate(
        "adafgl",
        **{**small, "clients": 10, "round_timeout": 20.0},
        adafgl={"finetune_epochs": 2, "width": 8},
    )
    assert run.rounds[-1]["phase"] == "finetune"
    assert run.summary["failures"] == {'"loss" must be a finite number, got nan.': 9}
    assert run.summary["finetuned"]["val"] != run.rounds[-2]["metrics"]["local"]["val"]


def test_a_step_that_diverges_keeps_the_best_epoch_and_the_last_finite_loss(
    small: dict[str, Any],
) -> None:
    run = simulate(
        "adafgl", **small, adafgl={"finetune_epochs": 4, "finetune_lr": 1e30}
    )
    assert run.summary["failures"] == {}
    assert run.summary["finetuned"]["val"]["num_nodes"] > 0
    once = simulate(
        "adafgl", **small, adafgl={"finetune_epochs": 1, "finetune_lr": 1e30}
    )
    assert run.rounds[-1]["loss"] == once.rounds[-1]["loss"]  # of the epoch before


def test_the_second_step_trains_by_its_own_rate_and_decay(
    small: dict[str, Any],
) -> None:
    def tuned(rate: float, **settings: float) -> Any:
        step = {"finetune_epochs": 3, "width": 8, **settings}
        run = simulate("adafgl", **small, optimizer="sgd", lr=rate, adafgl=step)
        return run.rounds[-1]["loss"]

    # with a rate near 0 the first step leaves the initial weights as they are
    first = tuned(1e-12)
    assert tuned(1e-12, finetune_lr=0.1) != pytest.approx(first, rel=1e-3)
    assert tuned(1e-12, finetune_weight_decay=0.5) != pytest.approx(first, rel=1e-3)
    assert tuned(1e-13) == pytest.approx(first, rel=1e-6)


def test_the_second_step_freezes_the_federated_model_and_reads_no_other_label() -> None:
    y = torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(3))
    other = y.clone()
    other[3::4] = (y[3::4] + 1) % C  # test nodes; validation nodes choose the epoch
    found = []
    for labels in (y, other):
        client = make_client("adafgl", y=labels, finetune_epochs=4, width=8)
        app = AdaFGLClientApp()
        start = state_of(client.build_model(initialise=True))
        result = app.finetune(client, 2, Weights(start))
        assert isinstance(result.model, AdaFGLNet)
        for name, tensor in start.items():
            assert torch.equal(result.model.extractor.state_dict()[name], tensor)
        state = state_of(result.model)
        client.state.set_group("model", state)
        found.append(state)
        again = app.personal_model(client, None)
        assert again is not None
        logits = again.eval()(client.data.training.inputs)
        assert torch.equal(logits, result.model.eval()(client.data.training.inputs))
    assert all(torch.equal(t, found[1][name]) for name, t in found[0].items())
