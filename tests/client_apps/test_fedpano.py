from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedpano import NodeGenerator, SharedParts
from flower_fgl.client_apps.fedpano import training
from flower_fgl.client_apps.fedpano.client_app import LOSSES, FedPANOClientApp
from flower_fgl.client_apps.fedpano.training import (
    Trainer,
    assemble_modules,
    build_parts,
    training_part,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.stacked.cohort import Cohort, StackedData
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import parse_config
from flower_fgl.nn import computation_graph
from flower_fgl.nn.models import num_parameters
from flower_fgl.protocols.fedavg import Weights

N, D, C, WIDTH = 24, 6, 5, 8
OWN = [1, 3, 4]
"""Classes of the training nodes."""


def make_client(
    *,
    train: int = 12,
    own: list[int] | None = None,
    general: dict[str, Any] | None = None,
    **settings: Any,
) -> Client:
    """Make a client that trains on its first nodes; node 0 has no neighbours."""
    draw = torch.Generator().manual_seed(3)
    upper = torch.rand(N, N, generator=draw).triu(1) > 0.8
    upper[0] = False
    x = torch.randn(N, D, generator=draw)
    own = own or OWN
    y = torch.tensor(own * (N // len(own)))
    masks = {name: torch.zeros(N, dtype=torch.bool) for name in ("train", "test")}
    masks["train"][:train], masks["test"][train:] = True, True
    edge_index = (upper | upper.T).nonzero().T.contiguous()
    graph = ClientGraph(
        0, Graph(x, edge_index, y, masks), Target.classes("abcde"), torch.arange(N)
    )
    config = parse_config(
        {
            "method": "fedpano",
            "hidden-channels": WIDTH,
            **(general or {}),
            **{f"fedpano.{key.replace('_', '-')}": v for key, v in settings.items()},
        }
    )
    device = torch.device("cpu")
    data = ClientData.build(graph, device)
    return Client(config, 0, 1, data, ClientState(), device)


def download_of(client: Client, seed: int = 1) -> Weights:
    """Return a download with random weights."""
    config = client.config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = SharedParts(
            config.model,
            in_channels=D,
            hidden_channels=WIDTH,
            num_classes=C,
            num_layers=2,
            dropout=0.0,
            method_config=config.method_config,
        )
    return Weights({n: t.detach() for n, t in parts.state_dict().items()})


def values(module: Any) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def changed(before: dict[str, Tensor], module: Any) -> bool:
    return any(not torch.equal(t, before[n]) for n, t in module.state_dict().items())


def trainer_of(client: Client) -> Trainer:
    return Trainer(Group(client, 1), assemble_modules(client, download_of(client)))


def test_shapes_match_the_specification() -> None:
    client = make_client(rep_norm="l2")
    trainer = trainer_of(client)
    h = trainer.represent()
    assert h.shape == (N, WIDTH)
    nodes = h[client.data.training.index]
    assert trainer.parts.own(nodes).shape == (12, len(OWN))
    assert trainer.parts.shared.classifier(nodes).shape == (12, C)
    assert trainer.parts.generator[0].in_features == 2 * WIDTH
    assert trainer.draw_noise().shape == (12, 5, 2 * WIDTH)
    torch.testing.assert_close(h.norm(dim=1), torch.ones(N))


def test_local_labels_are_positions_among_the_own_classes() -> None:
    client = make_client()
    parts = build_parts(client)
    trainer = Trainer(Group(client, 1), parts)
    assert parts.classes.tolist() == OWN
    assert torch.equal(parts.classes[trainer.own_labels], trainer.labels)


def test_each_step_changes_only_its_own_modules() -> None:
    trainer = trainer_of(make_client())
    parts = trainer.parts
    modules = {
        "encoder": parts.shared.encoder,
        "generic": parts.shared.classifier,
        "own": parts.own,
        "generator": parts.generator,
    }
    h = trainer.represent()
    nodes = h.detach()[trainer.part.index]
    around = trainer.part.around.matmul(h.detach())
    steps = [
        (lambda: trainer.step_parts(h), {"encoder", "generic", "own"}),
        (lambda: trainer.step_generator(nodes, around), {"generator"}),
        (lambda: trainer.step_classifier(nodes[:, None].repeat(1, 5, 1)), {"own"}),
    ]
    for step, expected in steps:
        before = {name: values(module) for name, module in modules.items()}
        step()
        assert {n for n, m in modules.items() if changed(before[n], m)} == expected


@pytest.mark.parametrize("model", ["graphsage:linear", "gcn:linear"])
def test_training_reads_only_the_neighbourhood_of_the_training_nodes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    general = {"model": model, "dropout": 0.0}
    monkeypatch.setattr(computation_graph, "SHARE", 1.0)
    found = []
    for is_part in (True, False):
        client = make_client(train=2, general=general)
        trainer = trainer_of(client)
        assert (trainer.part.inputs is not client.data.training.inputs) == is_part
        terms = trainer.train(3)
        parts = trainer.parts
        found.append((terms, values(parts.shared), values(parts.own)))
        monkeypatch.setattr(training, "receptive_field", lambda *_: None)
    torch.testing.assert_close(*found)


def test_the_graphs_of_a_stack_are_counted_once_in_its_memory() -> None:
    clients = [make_client(), make_client()]
    data = StackedData(clients)
    before = data.num_bytes
    part = training_part(Cohort(clients, data, 1), 2)
    assert part.inputs is data.inputs[0]
    assert data.num_bytes == before + 16 * part.around.matrix.values().numel()


def test_without_own_classifier_synthetic_nodes_train_the_generic_one() -> None:
    trainer = trainer_of(make_client(use_client_classifier=False))
    before = values(trainer.parts.shared)
    nodes = trainer.represent().detach()[trainer.group.clients[0].data.training.index]
    trainer.step_classifier(nodes[:, None].repeat(1, 5, 1))
    names = {
        n for n, t in trainer.parts.shared.state_dict().items()
        if not torch.equal(t, before[n])
    }  # fmt: skip
    assert names == {"classifier.weight", "classifier.bias"}


def test_losses_match_a_loop() -> None:
    trainer = trainer_of(make_client())
    h = trainer.represent()
    parts, data = trainer.parts, trainer.group.clients[0].data.training
    generic = own = 0.0
    for u, label in zip(data.index.tolist(), data.labels.tolist(), strict=True):
        of_all = parts.shared.classifier(h[u]).detach().double()
        of_own = parts.own(h[u]).detach().double()
        generic -= float(of_all.log_softmax(0)[label]) / len(data.index)
        own -= float(of_own.log_softmax(0)[OWN.index(label)]) / len(data.index)
    terms = trainer.step_parts(h)
    assert float(terms["generic"]) == pytest.approx(generic, rel=1e-5)
    assert float(terms["own"]) == pytest.approx(own, rel=1e-5)


def test_the_loss_of_synthetic_nodes_is_the_mean_over_all_copies() -> None:
    trainer = trainer_of(make_client(m=3))
    made = torch.randn(12, 3, WIDTH)
    total = 0.0
    for u, label in enumerate(trainer.own_labels.tolist()):
        for j in range(3):
            logits = trainer.parts.own(made[u, j]).detach().double()
            total -= float(logits.log_softmax(0)[label])
    terms = trainer.step_classifier(made)
    assert float(terms["synthetic"]) == pytest.approx(total / 36, rel=1e-5)


def test_noise_can_be_restricted_to_the_neighbour_half() -> None:
    noise = trainer_of(make_client(noise_on="agg", noise_std=2.0)).draw_noise()
    assert not noise[..., :WIDTH].any()
    assert 1.5 < float(noise[..., WIDTH:].std()) < 2.5
    copies = trainer_of(make_client(augment="gaussian")).draw_noise()
    assert copies.shape == (12, 5, WIDTH)
    assert 0.05 < float(copies.std()) < 0.15


VARIANTS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "full": ({}, {"encoder", "classifier", "generator"}, {*LOSSES, "spread"}),
    "nT": (
        {"use_client_classifier": False},
        {"encoder", "classifier", "generator"},
        {"generic", "generator", "synthetic", "spread"},
    ),
    "nS": (
        {"use_shared_classifier": False},
        {"encoder", "generator"},
        {"own", "generator", "synthetic", "spread"},
    ),
    "nN": ({"use_generator": False}, {"encoder", "classifier"}, {"generic", "own"}),
    "nN, two steps": (
        {"use_generator": False, "classifier_steps": 2},
        {"encoder", "classifier"},
        {"generic", "own"},
    ),
    "nF": (
        {"aggregate_generator": False},
        {"encoder", "classifier"},
        {*LOSSES, "spread"},
    ),
    "nG": (
        {"augment": "gaussian"},
        {"encoder", "classifier"},
        {"generic", "own", "synthetic", "spread"},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_refreshed_copy_of_a_variant_takes_all_its_steps(variant: str) -> None:
    app, settings = FedPANOClientApp(), VARIANTS[variant][0]
    some = {"final-local-epochs": 2, "local-epochs": 7}
    client = make_client(general=some, **settings)
    refreshed = app.refreshed_model(client, 3, download_of(client))
    twin = make_client(general={"local-epochs": 2}, **settings)
    expected = app.fit(twin, 3, download_of(twin)).model
    assert refreshed is not None
    assert expected is not None
    assert changed(
        values(assemble_modules(client, download_of(client)).personal), refreshed
    )
    assert not changed(values(expected), refreshed)


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_sends_its_parts_and_reports_its_losses(
    variant: str, model: str
) -> None:
    settings, parts, terms = VARIANTS[variant]
    client = make_client(general={"model": model}, **settings)
    fit = FedPANOClientApp().fit(client, 1, download_of(client))
    upload = fit.upload
    assert isinstance(upload, Weights)
    assert {name.partition(".")[0] for name in upload.tensors} == parts
    assert set(fit.terms) == terms
    assert all(bool(t.isfinite().all()) for t in upload.tensors.values())
    expected = sum(value for name, value in fit.terms.items() if name != "spread")
    assert fit.loss == pytest.approx(expected)
    # no upload contains the own classifier, which has 3 outputs
    assert all(t.shape[0] != len(OWN) for t in upload.tensors.values())
    assert ("generator/0.weight" in client.state.tensors) == (variant == "nF")
    assert fit.model is not None
    predicted = fit.model.eval()(client.data.inputs[0]).argmax(dim=1)
    assert variant == "nT" or set(predicted.tolist()) <= set(OWN)


def test_the_bytes_match_the_formula() -> None:
    client = make_client()
    fit = FedPANOClientApp().fit(client, 1, download_of(client))
    network = (2 * D * WIDTH + WIDTH) + (2 * WIDTH * WIDTH + WIDTH)
    generic, generator = WIDTH * C + C, 3 * WIDTH * WIDTH + 2 * WIDTH
    assert fit.upload.num_bytes == 4 * (network + generic + generator)
    assert num_parameters(NodeGenerator(128)) == 49_408


def test_without_generator_the_classifier_may_take_as_many_steps_as_with_it() -> None:
    steps: dict[int, Trainer] = {}
    for number in (1, 2):
        trainer = trainer_of(make_client(use_generator=False, classifier_steps=number))
        trainer.train(1)
        steps[number] = trainer
    one, two = steps[1].parts, steps[2].parts
    assert not changed(values(one.shared), two.shared)
    assert one.own is not None
    assert two.own is not None
    # the second step by hand: the gradient of L^c at the representations after the first
    nodes = steps[1].represent().detach()[steps[1].part.index]
    loss = torch.nn.functional.cross_entropy(one.own(nodes), steps[1].own_labels)
    slope = torch.autograd.grad(loss, one.own.weight)[0]
    assert slope.abs().max() > 0
    torch.testing.assert_close(two.own.weight, one.own.weight - 0.1 * slope)
    with pytest.raises(ConfigError, match="classifier-steps counts steps without"):
        make_client(classifier_steps=2)


def test_a_variant_without_any_classifier_is_rejected() -> None:
    with pytest.raises(ConfigError, match="so there is no classifier"):
        make_client(use_client_classifier=False, use_shared_classifier=False)


def test_own_classifiers_start_from_the_same_weights_for_a_class_in_every_variant() -> (
    None
):
    some, other = (
        build_parts(make_client(own=[0, 1])),
        build_parts(make_client(own=[1])),
    )
    alone = build_parts(make_client(own=[0, 1], use_generator=False))
    assert torch.equal(some.own.weight[1], other.own.weight[0])
    assert torch.equal(some.own.bias[1], other.own.bias[0])
    assert torch.equal(some.own.weight, alone.own.weight)
    assert not torch.equal(some.own.weight[0], some.own.weight[1])


def test_a_client_combines_its_classifier_with_the_received_network() -> None:
    app, client = FedPANOClientApp(), make_client()
    first = app.fit(client, 1, download_of(client)).model
    assert first is not None
    client.state.set_group("model", values(first))
    again = assemble_modules(client, download_of(client, seed=2))
    assert torch.equal(again.own.weight, first.classifier.weight)
    received = download_of(client, seed=2).tensors
    for name, tensor in again.shared.state_dict().items():
        assert torch.equal(tensor, received[name])
    kept = app.personal_model(client, None)
    assert kept is not None
    inputs = client.data.inputs[0]
    torch.testing.assert_close(kept.eval()(inputs), first.eval()(inputs))


def test_a_generator_that_is_not_shared_is_restored_from_the_state() -> None:
    app, client = FedPANOClientApp(), make_client(aggregate_generator=False)
    app.fit(client, 1, download_of(client))
    trained = client.state.group("generator")
    again = assemble_modules(client, download_of(client)).generator
    assert again is not None
    assert all(torch.equal(t, trained[n]) for n, t in again.state_dict().items())


def test_a_client_without_training_nodes_predicts_with_the_generic_classifier() -> None:
    client = make_client(train=0)
    model = FedPANOClientApp().personal_model(client, download_of(client))
    assert model is not None
    assert bool(model.eval()(client.data.inputs[0]).isfinite().all())
    assert "classifier.weight" in download_of(client).tensors
    torch.testing.assert_close(
        model.classifier.weight, download_of(client).tensors["classifier.weight"]
    )


def test_a_client_without_download_has_no_model() -> None:
    assert FedPANOClientApp().personal_model(make_client(), None) is None


def test_optimizer_moments_are_kept_with_optimizer_state_keep() -> None:
    general = {"optimizer": "adam", "lr": 0.01, "optimizer-state": "keep"}
    client = make_client(general=general)
    FedPANOClientApp().fit(client, 1, download_of(client))
    kept = set(client.state.group("optimizer"))
    assert {name.split("/")[0] for name in kept} == {"fit", "classifier", "generator"}
    again = trainer_of(client)
    moment = again.optimizers["generator"].moments()["0.bias"][0]
    assert torch.equal(
        moment, client.state.group("optimizer/generator")["exp_avg/0.bias"]
    )
    FedPANOClientApp().fit(other := make_client(), 1, download_of(other))
    assert not other.state.group("optimizer")


def test_training_lowers_all_losses() -> None:
    client = make_client(general={"local-epochs": 60}, noise_std=0.1)
    app = FedPANOClientApp()
    long = app.fit(client, 1, download_of(client)).terms
    short = make_client(general={"local-epochs": 1}, noise_std=0.1)
    start = app.fit(short, 1, download_of(short)).terms
    for name in LOSSES:
        assert long[name] < start[name], name
    assert long["generator"] < 0.5 * start["generator"]
