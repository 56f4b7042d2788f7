from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.client_apps.fedper import FedPerClientApp
from flower_fgl.client_apps.fedrep import FedRepClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.core.targets import Target
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.state import classifier_state, encoder_state
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from tests.support.random_clients import FEATURES, random_client

BOTH = pytest.mark.parametrize(
    ("method", "app"), [("fedper", FedPerClientApp), ("fedrep", FedRepClientApp)]
)


def server(method: str, num_classes: int = 3) -> Any:
    config = parse_config({"method": method, "hidden-channels": 8, "model": "gcn"})
    strategy: Any = METHODS[method].load_strategy()(config)
    strategy.federation = SimpleNamespace(
        num_edge_features=0,
        schema=None,
        has_parts=False,
        num_classes=num_classes,
        target=Target.classes(tuple(map(str, range(num_classes)))),
        num_features=FEATURES,
        clients={0: SimpleNamespace(model="gcn")},
    )
    strategy.prepare()
    return strategy


def after(app: Any, client: Client, download: Weights, server_round: int = 1) -> Any:
    """Fit, and keep the model as the message handler does."""
    fit = app.fit(client, server_round, download)
    client.state.set_group("model", state_of(fit.model))
    return fit


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


def test_body_and_head_together_are_the_whole_backbone() -> None:
    for model in ("gcn", "gat", "gin", "graphsage", "gamlp", "sgc"):
        shapes = random_client("fedper", settings={"model": model}).state_shapes()
        assert encoder_state(shapes) | classifier_state(shapes) == shapes
        assert encoder_state(shapes)
        assert classifier_state(shapes)


@BOTH
def test_only_the_body_is_sent(method: str, app: Any) -> None:
    client = random_client(method)
    start = server(method).download(1, 0)
    upload = app().fit(client, 1, start).upload
    # GCN: encoder 6·8 + 8, head 8·3 + 3
    assert start.num_bytes == upload.num_bytes == 4 * (6 * 8 + 8)
    assert set(upload.tensors) == set(start.tensors)
    assert all(name.startswith("encoder.") for name in upload.tensors)
    whole = Weights(client.build_model(initialise=True).state_dict()).to_record()
    spec = app().download_spec(client)
    with pytest.raises(PayloadError, match="classifier"):
        Weights.from_record(whole, spec)


@BOTH
def test_the_own_head_is_combined_with_the_received_body(method: str, app: Any) -> None:
    client, half = random_client(method), app()
    start = server(method).download(1, 0)
    first = after(half, client, start)
    kept = classifier_state(state_of(first.model))
    received = Weights({name: 2 * t for name, t in start.tensors.items()})
    joined = state_of(half.assemble(Group(client), [received]))
    assert is_equal(classifier_state(joined), kept)
    assert is_equal(encoder_state(joined), dict(received.tensors))


@BOTH
def test_a_client_that_has_not_trained_has_the_initial_head(
    method: str, app: Any
) -> None:
    client = random_client(method)
    start = server(method).download(1, 0)
    model = app().personal_model(client, start)
    untrained = client.build_model(initialise=True)
    assert is_equal(state_of(model), state_of(untrained))
    assert app().personal_model(client, None) is None


@BOTH
def test_only_a_client_that_has_not_trained_draws_initial_weights(
    method: str, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, half, drawn = random_client(method), app(), []
    build = Client.build_model

    def count(self: Client, *, initialise: bool = False, **more: Any) -> Any:
        drawn.append(initialise)
        return build(self, initialise=initialise, **more)

    monkeypatch.setattr(Client, "build_model", count)
    start = server(method).download(1, 0)
    after(half, client, start)
    assert any(drawn)
    drawn.clear()
    after(half, client, start, server_round=2)
    assert half.personal_model(client, None) is not None
    assert drawn
    assert not any(drawn)


@BOTH
def test_heads_of_different_sizes_train_one_body(method: str, app: Any) -> None:
    strategy = server(method, num_classes=2)
    clients = [
        random_client(method, partition_id=0, num_classes=2),
        random_client(method, partition_id=1, num_classes=5),
    ]
    start = strategy.download(1, 0)
    fits = [after(app(), client, start) for client in clients]
    uploads = {}
    for pid, fit in enumerate(fits):
        spec = strategy.upload_spec(pid)
        record = fit.upload.to_record()
        uploads[pid] = Upload(Weights.from_record(record, spec), [1.0, 3.0][pid])
    strategy.aggregate(1, uploads)
    for name, mean in strategy.download(2, 0).tensors.items():
        one, other = (fit.upload.tensors[name] for fit in fits)
        torch.testing.assert_close(mean, 0.25 * one + 0.75 * other)
    sizes = [
        fit.model(c.data.inputs[0]).shape[1]
        for fit, c in zip(fits, clients, strict=True)
    ]
    assert sizes == [2, 5]


def test_two_bodies_are_averaged_by_training_nodes() -> None:
    strategy = server("fedper")
    ones = {name: torch.ones_like(t) for name, t in strategy.weights.tensors.items()}
    fives = {name: 5 * t for name, t in ones.items()}
    strategy.aggregate(
        1, {0: Upload(Weights(ones), 6.0), 1: Upload(Weights(fives), 18.0)}
    )
    for tensor in strategy.download(2, 0).tensors.values():
        assert (tensor == 4.0).all()  # 0.25 · 1 + 0.75 · 5
    assert strategy.global_state() is None


def test_fedper_trains_both_parts_at_once() -> None:
    client = random_client("fedper", settings={"local-epochs": 1})
    start = server("fedper").download(1, 0)
    before = state_of(FedPerClientApp().assemble(Group(client), [start]))
    trained = state_of(FedPerClientApp().fit(client, 1, start).model)
    assert not any(torch.equal(before[name], trained[name]) for name in before)


@pytest.mark.parametrize(("head", "body"), [(2, 0), (0, 2), (2, 2)])
def test_fedrep_trains_head_and_body_in_turn(head: int, body: int) -> None:
    client = random_client(
        "fedrep", settings={"local-epochs": max(body, 1)}, head_epochs=head
    )
    app = FedRepClientApp()
    start = server("fedrep").download(1, 0)
    before = state_of(app.assemble(Group(client), [start]))
    seen = []
    train = client.train

    def watch(model: Any, *args: Any, **options: Any) -> float:
        names = {n for n, p in model.named_parameters() if p.requires_grad}
        seen.append(names)
        if len(seen) == 2 and body == 0:
            return 0.0
        return train(model, *args, **options)

    client.train = watch  # type: ignore[method-assign]
    model = app.fit(client, 1, start).model
    assert model is not None
    assert [set(classifier_state(before)), set(encoder_state(before))] == seen
    trained = state_of(model)
    assert is_equal(classifier_state(before), classifier_state(trained)) == (head == 0)
    assert is_equal(encoder_state(before), encoder_state(trained)) == (body == 0)
    assert all(p.requires_grad for p in model.parameters())


def test_fedrep_keeps_the_moments_of_both_parts() -> None:
    client = random_client("fedrep")
    FedRepClientApp().fit(client, 1, server("fedrep").download(1, 0))
    kept = {name.partition("/")[2] for name in client.state.group("optimizer")}
    assert kept == set(client.state_shapes())


def test_the_parts_of_fedrep_draw_different_dropout() -> None:
    client = random_client("fedrep")
    assert client.seed(1, "head training") != client.seed(1, "training")


def test_a_refreshed_copy_of_fedrep_trains_its_head_as_long_as_its_body() -> None:
    settings = {"final-local-epochs": 2, "local-epochs": 7}
    client = random_client("fedrep", settings=settings, head_epochs=9)
    twin = random_client("fedrep", settings={"local-epochs": 2}, head_epochs=2)
    start = server("fedrep").download(1, 0)
    refreshed = FedRepClientApp().refreshed_model(client, 3, start)
    assert refreshed is not None
    expected = FedRepClientApp().fit(twin, 3, start).model
    assert expected is not None
    assert is_equal(state_of(refreshed), state_of(expected))
    untouched = random_client("fedrep", settings={"final-local-epochs": 0})
    same = FedRepClientApp().refreshed_model(untouched, 3, start)
    assert same is not None
    first = FedRepClientApp().assemble(Group(untouched), [start])
    assert is_equal(state_of(same), state_of(first))


@BOTH
def test_a_client_with_one_class_or_one_training_node_trains(
    method: str, app: Any
) -> None:
    start = server(method).download(1, 0)
    for options in ({"classes": [1]}, {"train": [4]}):
        fit = after(app(), random_client(method, **options), start)
        assert torch.isfinite(torch.tensor(fit.loss))


@BOTH
def test_disjoint_label_spaces_are_learned_side_by_side(method: str, app: Any) -> None:
    strategy = server(method, num_classes=4)
    clients = [
        random_client(method, partition_id=pid, num_classes=4, classes=own)
        for pid, own in enumerate(([0, 1], [2, 3]))
    ]
    half = app()
    for server_round in range(1, 21):
        start = strategy.download(server_round, 0)
        uploads = {
            pid: Upload(after(half, client, start, server_round).upload, 1.0)
            for pid, client in enumerate(clients)
        }
        strategy.aggregate(server_round, uploads)
    for client, own in zip(clients, ({0, 1}, {2, 3}), strict=True):
        model = half.personal_model(client, None)
        predicted = model.eval()(client.data.inputs[0]).argmax(dim=1)
        assert set(predicted.tolist()) <= own


@BOTH
def test_clients_that_were_not_sampled_are_evaluated_with_the_newest_body(
    method: str, app: Any, small: dict[str, Any]
) -> None:
    run = simulate(method, **small, participation=0.5)
    assert run.config["eval-policy"] == "refresh"
    assert run.best["test"]["num_nodes"] == sum(
        row["num_test"] for row in run.clients if row["round"] == 0
    )
    assert run.rounds[-1]["failures"] == []


def test_global_evaluation_is_rejected(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fedper"):
        simulate("fedper", **small, evaluate="global")
