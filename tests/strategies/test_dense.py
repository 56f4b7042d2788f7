"""Distillation on the server: generated nodes, the student, and the run of DENSE."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl import simulate
from flower_fgl.algorithms.dense import ensemble_logits, nearest_neighbors
from flower_fgl.methods.dense import DenseSettings
from flower_fgl.nn import Backbone, GraphInput, build_model
from flower_fgl.strategies.dense import Distiller
from tests.support.methods.dense import SHORT

QUICK = {
    "server_epochs": 10,
    "generator_steps": 15,
    "generator_lr": 0.01,
    "generator_channels": 16,
    "noise_channels": 8,
    "batch": 40,
    "tau": 1.0,
    "feature_length": 3.0,
    "student_lr": 0.05,
}


def network() -> Backbone:
    return build_model(
        "gcn",
        in_channels=5,
        hidden_channels=8,
        num_outputs=3,
        num_layers=2,
        dropout=0.0,
    )


def distiller_of(**changes: Any) -> Distiller:
    torch.manual_seed(0)
    models = [network() for _ in range(3)]
    # clear predictions: a fresh network says the same about all nodes
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.6)
    settings = DenseSettings(**{**QUICK, **changes})
    return Distiller(
        [model.state_dict() for model in models], network(), (5, 3), settings,
        generator=torch.Generator().manual_seed(1), seed=2,
    )  # fmt: skip


def test_the_generator_makes_nodes_of_the_asked_classes() -> None:
    distiller = distiller_of(generator_steps=100, adversarial_weight=0.0)
    batch = distiller.generate()
    ensemble = ensemble_logits(batch.logits, distiller.weights)
    assert float((ensemble.argmax(dim=1) == batch.labels).float().mean()) > 0.7
    torch.testing.assert_close(ensemble, distiller.predict(batch.graph).mean(dim=0))


def test_the_adversarial_term_asks_for_nodes_on_which_the_student_is_wrong() -> None:
    shares = []
    for weight in (0.0, 10.0):
        distiller = distiller_of(generator_steps=50, adversarial_weight=weight)
        batch = distiller.generate()
        said = distiller.student(batch.graph).argmax(dim=1)
        truth = ensemble_logits(batch.logits, distiller.weights).argmax(dim=1)
        shares.append(float((said != truth).float().mean()))
    assert shares[1] >= shares[0]
    assert shares[1] > 0.5


def test_the_student_comes_to_predict_what_the_ensemble_does() -> None:
    distiller = distiller_of()
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(3))
    x = 3 * F.normalize(x, dim=1)
    graph = GraphInput(x, nearest_neighbors(x, 5))  # nodes that nobody generated
    truth = ensemble_logits(distiller.predict(graph), distiller.weights).argmax(dim=1)

    def agreement() -> float:
        said = distiller.student.eval()(graph).argmax(dim=1)
        return float((said == truth).float().mean())

    before = agreement()
    distiller.run()
    assert len(distiller.pool) == 10
    assert agreement() > before + 0.4


def test_the_clients_models_do_not_change() -> None:
    distiller = distiller_of(server_epochs=2)
    generator = torch.Generator().manual_seed(3)
    graph = GraphInput(torch.randn(9, 5, generator=generator), torch.zeros(2, 0).long())
    before = distiller.predict(graph)
    student = {n: t.clone() for n, t in distiller.student.state_dict().items()}
    distiller.run()
    assert torch.equal(distiller.predict(graph), before)
    changed = distiller.student.state_dict()
    assert not all(torch.equal(t, student[n]) for n, t in changed.items())


def test_the_loss_of_the_generator_reaches_features_through_edges_too() -> None:
    distiller = distiller_of()
    features = torch.randn(2, 5, requires_grad=True)
    graph = GraphInput(features, torch.tensor([[0, 1], [1, 0]]))
    distiller.generator_loss(graph, torch.tensor([0, 1])).backward()
    assert features.grad is not None
    assert features.grad.abs().min() > 0


def test_a_run_scores_the_fine_tuned_and_the_distilled_model(
    small: dict[str, Any],
) -> None:
    run = simulate("dense", **{**small, **SHORT, "check_every": 10, "evaluate": "both"})
    row = run.rounds[-1]
    assert {"student_loss", "generated_accuracy"} <= row["numbers"].keys()
    assert 0 <= run.summary["global"]["best"]["test"]["accuracy"] <= 1
