from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.f2l import AdaptedModel
from flower_fgl.client_apps.f2l import (
    F2LClientApp,
    F2LNetwork,
    draw_episodes,
    ranks_in_class,
)
from flower_fgl.client_apps.runtime import training
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.core.targets import Target
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn import computation_graph
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from tests.support.random_clients import FEATURES, random_client

HEAD = F2LNetwork.head


def server(num_classes: int = 3) -> Any:
    config = parse_config({"method": "f2l", "hidden-channels": 8, "model": "gcn"})
    strategy: Any = METHODS["f2l"].load_strategy()(config)
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


def draw(labels: list[int], **sizes: int) -> Any:
    sizes = {"episodes": 20, "ways": 2, "shots": 2, "queries": 3, **sizes}
    return draw_episodes(
        torch.tensor(labels), 4, generator=torch.Generator().manual_seed(0), **sizes
    )


def test_ranks_count_within_classes() -> None:
    ranks = ranks_in_class(torch.tensor([0, 0, 2, 2, 2, 3]), 4)
    assert ranks.tolist() == [0, 1, 0, 1, 2, 0]


def test_episodes_have_the_requested_sizes() -> None:
    labels = [0] * 9 + [1] * 9 + [3] * 9
    made = draw(labels)
    assert made.index.shape == (20, 2 * (2 + 3))
    classes = torch.tensor(labels)[made.index]
    for b in range(20):
        own = made.classes[b].nonzero().flatten().tolist()
        assert len(own) == 2
        assert 2 not in own
        for c in own:
            assert int((made.is_support[b] & (classes[b] == c)).sum()) == 2
            assert int((made.is_query[b] & (classes[b] == c)).sum()) == 3
        assert len(set(made.index[b].tolist())) == 10
    assert not (made.is_support & made.is_query).any()
    assert len({tuple(row.tolist()) for row in made.classes}) == 3
    assert len({tuple(sorted(row.tolist())) for row in made.index}) == 20


def test_every_node_is_drawn_in_some_episode() -> None:
    made = draw([0] * 5 + [1] * 5, episodes=50)
    for mask in (made.is_support, made.is_query):
        assert set(made.index[mask].tolist()) == set(range(10))


def test_classes_with_few_nodes_leave_one_for_the_queries() -> None:
    labels = torch.tensor([0, 1, 1, 3, 3, 3])
    made = draw(labels.tolist(), ways=4, shots=3)
    used = made.is_support | made.is_query
    assert used.all()  # every node is used and there is no padding
    of = labels[made.index]
    for c, (support, query) in {0: (1, 0), 1: (1, 1), 3: (2, 1)}.items():
        assert ((made.is_support & (of == c)).sum(dim=1) == support).all()
        assert ((made.is_query & (of == c)).sum(dim=1) == query).all()


def test_shorter_episodes_are_padded() -> None:
    made = draw([0, 0, 1, 1, 1, 3, 3, 3, 3])
    used = (made.is_support | made.is_query).sum(dim=1)
    assert used.min() < used.max() == made.index.shape[1]
    # used nodes come before the padding
    position = torch.arange(made.index.shape[1])
    assert torch.equal(made.is_support | made.is_query, position < used[:, None])


def test_model_and_module_are_sent_and_averaged() -> None:
    strategy = server()
    start = strategy.download(1, 0)
    # GCN 6·8 + 8 + 8·3 + 3 = 83; module 3·8² + 8·3 + 3 = 219
    assert start.num_bytes == 4 * (83 + 219)
    client = random_client("f2l")
    shapes = {name: tuple(t.shape) for name, t in start.tensors.items()}
    assert F2LClientApp().download_spec(client) == shapes
    upload = F2LClientApp().fit(client, 1, start).upload
    assert upload.num_bytes == start.num_bytes
    ones = {name: torch.ones_like(t) for name, t in start.tensors.items()}
    fives = {name: 5 * t for name, t in ones.items()}
    strategy.aggregate(
        1, {0: Upload(Weights(ones), 6.0), 1: Upload(Weights(fives), 18.0)}
    )
    assert all((t == 4).all() for t in strategy.download(2, 0).tensors.values())
    assert set(strategy.global_state()) == set(client.state_shapes())


def test_training_changes_model_and_module() -> None:
    client = random_client("f2l")
    start = server().download(1, 0)
    upload = F2LClientApp().fit(client, 1, start).upload
    for name, tensor in upload.tensors.items():
        assert not torch.equal(tensor, start.tensors[name]), name


def test_episodes_train_the_module_without_contrast_distillation_and_inner_steps() -> (
    None
):
    client = random_client(
        "f2l", contrast_weight=0.0, distillation_weight=0.0, inner_steps=0
    )
    start = server().download(1, 0)
    fit = F2LClientApp().fit(client, 1, start)
    assert torch.isfinite(torch.tensor(fit.loss))
    name = "adaptation.query.weight"
    assert not torch.equal(fit.upload.tensors[name], start.tensors[name])


def predictions(model: Any, client: Any) -> Tensor:
    out: Tensor = model.eval()(client.data.inputs[0]).argmax(dim=1)
    return out


def test_an_adapted_client_predicts_its_own_classes_only() -> None:
    client = random_client("f2l", num_classes=5, classes=[1, 4])
    app, start = F2LClientApp(), server(5).download(1, 0)
    model = app.personal_model(client, start)
    assert isinstance(model, AdaptedModel)
    assert set(predictions(model, client).tolist()) <= {1, 4}
    still = {n.removeprefix("adaptation."): t for n, t in start.tensors.items()}
    moved = model.adaptation.state_dict()
    assert not torch.equal(moved["classifier.bias"], still["classifier.bias"])
    assert app.personal_model(client, None) is None


def test_the_trained_model_is_restored_from_the_state() -> None:
    client, app = random_client("f2l"), F2LClientApp()
    fit = app.fit(client, 1, server().download(1, 0))
    assert fit.model is not None
    client.state.set_group("model", state_of(fit.model))
    again = app.personal_model(client, None)
    assert again is not None
    inputs = client.data.inputs[0]
    assert torch.equal(again.eval()(inputs), fit.model.eval()(inputs))


@pytest.mark.thorough
def test_f2l_learns_a_toy_problem() -> None:
    client = random_client("f2l", settings={"local-epochs": 60, "dropout": 0.0})
    fit = F2LClientApp().fit(client, 1, server().download(1, 0))
    data = client.data.training
    found = predictions(fit.model, client)[data.index]
    assert (found == data.labels).float().mean() > 0.85


def test_the_support_set_is_limited_per_class() -> None:
    client = random_client("f2l", support=2)
    model = F2LClientApp().personal_model(client, server().download(1, 0))
    assert isinstance(model, AdaptedModel)
    assert model.support.shape == (3 * 2, 8)


@pytest.mark.parametrize(
    "options", [{"classes": [1]}, {"train": [4]}, {"train": [4, 5]}]
)
def test_one_class_or_too_few_support_nodes_give_finite_values(
    options: dict[str, Any],
) -> None:
    client = random_client("f2l", **options)
    fit = F2LClientApp().fit(client, 1, server().download(1, 0))
    assert torch.isfinite(torch.tensor(fit.loss))
    assert all(torch.isfinite(t).all() for t in fit.upload.tensors.values())
    own = set(client.data.training.labels.tolist())
    assert set(predictions(fit.model, client).tolist()) <= own


def test_a_client_without_training_nodes_predicts_with_the_client_model() -> None:
    client = random_client("f2l", train=[])
    start = server().download(1, 0)
    model = F2LClientApp().personal_model(client, start)
    assert model is not None
    assert set(model.state_dict()) == set(client.state_shapes())


def test_the_averaged_client_model_can_be_evaluated(small: dict[str, Any]) -> None:
    run = simulate("f2l", **small, evaluate="both")
    assert 0 <= run.summary["global"]["best"]["test"]["accuracy"] <= 1


@pytest.mark.parametrize("batch", [0, 4, 15, 64])  # of 15 training nodes
def test_training_on_the_needed_part_equals_training_on_the_whole_graph(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dropout": 0.0, "local-epochs": 3, "batch-size": batch}
    found = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(training, "FIELD_SHARE", share)
        monkeypatch.setattr(training, "BATCH_FIELD_SHARE", share)
        monkeypatch.setattr(computation_graph, "SHARE", 1.0)
        client = random_client("f2l", settings=settings)
        used: list[bool] = []
        monkeypatch.setattr(
            F2LNetwork,
            "head",
            lambda self, h, graph, head=HEAD, used=used: (
                used.append(self.is_part) or head(self, h, graph)
            ),
        )
        fit = F2LClientApp().fit(client, 1, server().download(1, 0))
        assert any(used) == (share == 1.0 and batch == 0)
        found.append((fit.upload.tensors, fit.loss, fit.model.state_dict()))
    torch.testing.assert_close(*found)
