from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.prototypes.nearest_mean import (
    NearestMean,
    distance_logits,
    held_out_loss,
)
from flower_fgl.client_apps.pfedfsl import WORST, PFedFSLClientApp, loss_of
from flower_fgl.client_apps.runtime import training
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.targets import Target
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn import computation_graph
from flower_fgl.protocols.weights import CandidateModels, ScoredModel
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.pfedfsl import mixing_weights
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.random_clients import FEATURES, random_client

FORWARD = NearestMean.forward
NUMBERS = 6 * 8 + 8 + 8 * 8 + 8
"""Number of weights of a two-layer GCN with 6 features, 8 channels and 8 outputs."""


def server(num_clients: int = 5, **method_config: Any) -> Any:
    values = {"method": "pfedfsl", "hidden-channels": 8, "model": "gcn"}
    values |= {f"pfedfsl.{key}": value for key, value in method_config.items()}
    strategy: Any = METHODS["pfedfsl"].load_strategy()(parse_config(values))
    strategy.federation = SimpleNamespace(
        num_edge_features=0,
        schema=None,
        has_parts=False,
        num_classes=3,
        target=Target.classes(tuple(map(str, range(3)))),
        num_features=FEATURES,
        clients={pid: SimpleNamespace(model="gcn") for pid in range(num_clients)},
    )
    strategy.prepare()
    return strategy


def constant(strategy: Any, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(t, value) for name, t in strategy.initial.items()}


def upload(strategy: Any, value: float, losses: list[float]) -> Upload:
    return Upload(ScoredModel(constant(strategy, value), torch.tensor(losses)), 1.0)


def test_logits_are_minus_ten_distances_to_the_class_means() -> None:
    support = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    labels = torch.tensor([0, 0, 2])
    # means: class 0 at (1, 0), class 2 at (0, 3); class 1 has no support
    logits = distance_logits(torch.tensor([[1.0, 0.1]]), support, labels, 3)
    expected = torch.tensor([[-1.0, -math.inf, -10 * math.sqrt(1 + 2.9**2)]])
    torch.testing.assert_close(logits, expected)
    near = torch.tensor([[1.0, 1.4]], requires_grad=True)  # at 1.4 and sqrt(1 + 1.6²)
    logits = distance_logits(near, support, labels, 3)
    loss = F.cross_entropy(logits, torch.tensor([0]))
    gap = 10 * (1.4 - math.sqrt(1 + 1.6**2))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(gap)), rel=1e-3)
    (slope,) = torch.autograd.grad(loss, near)
    assert 0 < float(slope.norm()) <= 20  # the difference of two unit vectors over τ


def test_the_loss_stays_finite_at_a_high_learning_rate() -> None:
    client = random_client("pfedfsl", settings={"optimizer": "sgd", "lr": 10.0})
    for server_round in range(1, 6):
        fit = PFedFSLClientApp().fit(client, server_round, server().download(1, 0))
        # logits of unit vectors lie between -20 and 0: at most ln(1 + 2e²⁰)
        assert float(fit.upload.losses[0]) < math.log(1 + 2 * math.exp(20))
        assert all(bool(t.isfinite().all()) for t in fit.upload.tensors.values())


def test_the_loss_does_not_depend_on_the_length_of_embeddings() -> None:
    client, app = random_client("pfedfsl"), PFedFSLClientApp()
    model = app.build(client)
    load_state(model.network, server().download(1, 0).model(0))
    before = loss_of(client, model)
    head = model.network.classifier
    with torch.no_grad():
        for parameter in head.parameters():
            parameter *= (
                7  # the last layer is linear: embeddings become 7 times as long
            )
    torch.testing.assert_close(loss_of(client, model), before)


def test_the_loss_pulls_nodes_to_their_own_mean_and_away_from_others() -> None:
    points = torch.tensor([[0.0], [0.1], [0.3], [0.4]], requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1])
    loss = F.cross_entropy(distance_logits(points, points, labels, 2), labels)
    (slope,) = torch.autograd.grad(loss, points)
    # a gradient step moves the classes apart and the nodes of each class together
    moved = (points - 0.001 * slope).detach().flatten()
    assert moved[2:].mean() - moved[:2].mean() > 0.3
    assert slope[1] > 0  # node 1 is nearest to the other class
    assert slope[2] < 0


def test_a_held_out_node_is_not_part_of_its_class_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(6, 3, generator=draw)
    labels = torch.tensor([0, 0, 0, 2, 2, 3])  # the node of class 3 cannot be held out
    total = 0.0
    for u in range(5):
        rest = torch.arange(6) != u
        logits = distance_logits(h[u][None], h[rest], labels[rest], 4)
        total += float(F.cross_entropy(logits, labels[u][None]))
    assert float(held_out_loss(h, labels, 4)) == pytest.approx(total / 5, rel=1e-5)


def test_single_nodes_of_all_classes_are_scored_with_their_own_mean() -> None:
    h, labels = torch.eye(3), torch.tensor([0, 1, 2])
    expected = F.cross_entropy(distance_logits(h, h, labels, 3), labels)
    torch.testing.assert_close(held_out_loss(h, labels, 3), expected)


def test_a_model_that_memorised_its_shots_is_scored_like_an_ignorant_one() -> None:
    # two shots a class: each at the place of a shot of the other class
    h = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    good = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1]])
    bad_loss, good_loss = held_out_loss(h, labels, 2), held_out_loss(good, labels, 2)
    assert float(bad_loss) > 1
    assert float(good_loss) < 0.01
    weights = mixing_weights(torch.stack([bad_loss, good_loss]))
    assert float(weights[1]) > 0.7


def test_tau_decides_how_much_the_best_model_counts() -> None:
    losses = torch.tensor([0.5, 0.4])
    assert float(mixing_weights(losses, 1.0)[1]) == pytest.approx(0.525, abs=1e-3)
    assert float(mixing_weights(losses, 0.01)[1]) > 0.999
    strategy = server(3, tau=1e-3)
    strategy.loop.log = RoundLog(1)
    strategy.aggregate(1, {p: upload(strategy, float(p), [0.3]) for p in range(3)})
    assert strategy.loop.log.numbers == {}  # no candidates yet
    strategy.aggregate(2, {0: upload(strategy, 5.0, [0.3, 0.1, 0.9])})
    assert float(strategy.download(3, 0).model(0)["encoder.0.bias"][0]) == 1.0
    assert strategy.loop.log.numbers["own_weight"] == pytest.approx(0.0, abs=1e-6)
    assert strategy.loop.log.numbers["heaviest_candidate"] == pytest.approx(1.0)


def test_a_client_reports_the_loss_of_held_out_nodes_for_every_model(
    generator: torch.Generator,
) -> None:
    strategy = server(3)
    states = [
        {
            n: torch.randn(t.shape, generator=generator)
            for n, t in strategy.initial.items()
        }
        for _ in range(3)
    ]
    strategy.aggregate(
        1,
        {p: Upload(ScoredModel(s, torch.ones(1)), 1.0) for p, s in enumerate(states)},
    )
    client, app = random_client("pfedfsl"), PFedFSLClientApp()
    download = strategy.download(2, 0)
    fit = app.fit(client, 2, download)
    labels, classes = client.data.training.labels, client.data.num_classes
    assert len(fit.upload.losses) == 3  # the trained model, and two candidates
    for number, loss in enumerate(fit.upload.losses.tolist()):
        model = fit.model if number == 0 else app.build(client)
        if number:
            load_state(model.network, download.model(number))
        with torch.no_grad():
            h = model.eval().embed_training()
        assert loss == pytest.approx(float(held_out_loss(h, labels, classes)), rel=1e-5)
        memorised = F.cross_entropy(distance_logits(h, h, labels, classes), labels)
        assert loss > float(memorised) + 0.01


def test_a_candidate_that_overflows_has_no_weight() -> None:
    client, app = (
        random_client("pfedfsl", settings={"model": "gin"}),
        PFedFSLClientApp(),
    )
    shapes, _ = app.download_spec(client)
    draw = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    huge = {name: torch.full_like(t, 1e15) for name, t in state.items()}
    both = {name: torch.stack([state[name], huge[name]]) for name in state}
    fit = app.fit(client, 1, CandidateModels(both))
    losses = fit.upload.losses  # type: ignore[attr-defined]
    assert losses[1] == WORST
    assert losses[0] < 40
    assert mixing_weights(losses, 1.0)[1] < 1e-30


@pytest.mark.parametrize("batch", [0, 3])
def test_training_on_the_needed_part_equals_training_on_the_whole_graph(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dropout": 0.0, "local-epochs": 3, "batch-size": batch}
    found = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(training, "FIELD_SHARE", share)
        monkeypatch.setattr(training, "BATCH_FIELD_SHARE", share)
        monkeypatch.setattr(computation_graph, "SHARE", 1.0)
        monkeypatch.setattr(computation_graph, "SHARE_IN_BATCH", 1.0)
        client = random_client("pfedfsl", settings=settings)
        model = PFedFSLClientApp().build(client)
        assert (model.part is not None) == (share == 1.0)
        used: list[bool] = []
        monkeypatch.setattr(
            NearestMean,
            "forward",
            lambda self, graph, used=used: (
                used.append(graph is self.part) or FORWARD(self, graph)
            ),
        )
        fit = PFedFSLClientApp().fit(client, 1, server().download(1, 0))
        assert any(used) == (share == 1.0 and batch == 0)
        found.append((fit.upload.tensors, fit.upload.losses, fit.loss))
    torch.testing.assert_close(*found)


def test_models_are_weighted_by_the_softmax_of_their_negative_losses() -> None:
    weights = mixing_weights(torch.tensor([0.0, math.log(2), math.log(4)]))
    # exp(−loss) = 1, 1/2, 1/4
    torch.testing.assert_close(weights, torch.tensor([4 / 7, 2 / 7, 1 / 7]))


def test_a_client_gets_the_mixture_of_its_model_and_its_candidates() -> None:
    strategy = server(3)
    start = strategy.download(1, 0)
    assert start.num_candidates == 0
    strategy.aggregate(
        1, {p: upload(strategy, v, [0.3]) for p, v in enumerate((1.0, 5.0, 9.0))}
    )
    second = strategy.download(2, 0)
    assert second.num_candidates == 2
    for tensor in second.tensors.values():  # its own model, then those of 1 and 2
        flat = tensor.flatten(1)
        assert torch.equal(flat, torch.tensor([[1.0], [5.0], [9.0]]).expand_as(flat))
    # weights 4/7, 2/7, 1/7: (4 · 2 + 2 · 5 + 1 · 9) / 7 = 27/7
    losses = [0.0, math.log(2), math.log(4)]
    strategy.aggregate(2, {0: upload(strategy, 2.0, losses)})
    for tensor in strategy.download(3, 0).model(0).values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, 27 / 7))
    # an unsampled client keeps its start and gets the newest model of client 0
    other = strategy.download(3, 1)
    assert float(other.model(0)["encoder.0.bias"][0]) == 5.0
    assert float(other.model(1)["encoder.0.bias"][0]) == 2.0


def test_candidates_are_q_other_clients_redrawn_each_round() -> None:
    strategy = server(6)
    strategy.aggregate(1, {p: upload(strategy, float(p), [0.0]) for p in range(6)})
    drawn = [strategy.candidates(number, 2) for number in range(2, 30)]
    assert all(len(set(peers)) == 3 and 2 not in peers for peers in drawn)
    assert {peer for peers in drawn for peer in peers} == {0, 1, 3, 4, 5}
    assert len({tuple(peers) for peers in drawn}) > 5
    assert drawn[0] == strategy.candidates(2, 2)
    assert strategy.candidates(2, 1) != strategy.candidates(2, 2)


def test_without_candidates_every_client_continues_from_its_own_model() -> None:
    strategy = server(3, candidates=0)
    strategy.aggregate(1, {p: upload(strategy, float(p), [0.7]) for p in range(3)})
    down = strategy.download(2, 1)
    assert down.num_candidates == 0
    assert (down.model(0)["encoder.0.bias"] == 1.0).all()


def test_the_upload_has_the_loss_of_every_candidate() -> None:
    strategy, client, app = server(3), random_client("pfedfsl"), PFedFSLClientApp()
    start = strategy.download(1, 0)
    assert start.num_bytes == 4 * NUMBERS
    first = app.fit(client, 1, start).upload
    assert first.num_bytes == 4 * (NUMBERS + 1)
    strategy.aggregate(1, {p: upload(strategy, 0.1 * p, [0.0]) for p in range(3)})
    second = strategy.download(2, 0)
    assert second.num_bytes == 4 * NUMBERS * 3
    fit = app.fit(client, 2, second)
    assert fit.upload.num_bytes == 4 * (NUMBERS + 3)
    model = app.build(client)
    for number, weights in enumerate(
        [fit.upload.tensors, second.model(1), second.model(2)]
    ):
        load_state(model.network, weights)
        assert loss_of(client, model) == fit.upload.losses[number]


def test_training_lowers_the_loss_and_the_model_is_restored() -> None:
    settings = {"local-epochs": 100, "dropout": 0.0}
    client, app = random_client("pfedfsl", settings=settings), PFedFSLClientApp()
    start = server().download(1, 0)
    before = app.personal_model(client, start)
    assert before is not None
    fit = app.fit(client, 1, start)
    assert fit.upload.losses[0] < 0.8 * loss_of(client, before)
    assert fit.model is not None
    client.state.set_group("model", state_of(fit.model))
    again = app.personal_model(client, None)
    assert again is not None
    inputs = client.data.inputs[0]
    assert torch.equal(again.eval()(inputs), fit.model.eval()(inputs))
    assert app.personal_model(random_client("pfedfsl"), None) is None


def test_a_client_predicts_its_own_classes_only() -> None:
    client = random_client("pfedfsl", num_classes=5, classes=[1, 4])
    fit = PFedFSLClientApp().fit(client, 1, server().download(1, 0))
    assert fit.model is not None
    predicted = fit.model.eval()(client.data.inputs[0]).argmax(dim=1)
    assert set(predicted.tolist()) <= {1, 4}


def test_clients_with_disjoint_label_spaces_share_one_embedding() -> None:
    strategy, app = server(2), PFedFSLClientApp()
    clients = [
        random_client("pfedfsl", partition_id=0, num_classes=2),
        random_client("pfedfsl", partition_id=1, num_classes=7, classes=[4, 5, 6]),
    ]
    for server_round in (1, 2, 3):
        strategy.loop.log = RoundLog(server_round)
        uploads = {}
        for pid, client in enumerate(clients):
            spec = app.download_spec(client)
            record = strategy.download(server_round, pid).to_record()
            fit = app.fit(
                client, server_round, CandidateModels.from_record(record, spec)
            )
            spec = strategy.upload_spec(pid)
            read = ScoredModel.from_record(fit.upload.to_record(), spec)
            uploads[pid] = Upload(read, 1.0)
        strategy.aggregate(server_round, uploads)
    assert strategy.download(4, 0).num_candidates == 1


@pytest.mark.parametrize("options", [{"classes": [1]}, {"train": [4]}])
def test_with_one_class_the_loss_is_zero(options: dict[str, Any]) -> None:
    client = random_client("pfedfsl", **options)
    start = server().download(1, 0)
    fit = PFedFSLClientApp().fit(client, 1, start)
    assert fit.loss == 0
    assert fit.upload.losses.tolist() == [0.0]
    assert all(torch.isfinite(t).all() for t in fit.upload.tensors.values())


def test_another_input_is_classified_by_the_means_of_the_training_graph() -> None:
    client, app = random_client("pfedfsl"), PFedFSLClientApp()
    model = app.personal_model(client, server().download(1, 0))
    assert model is not None
    # for another graph object the class means still come from the training graph
    data = client.data.training
    twin = random_client("pfedfsl").data.training.inputs
    model.eval()
    torch.testing.assert_close(model(twin), model(data.inputs))


def whole(strategy: Any, count: int) -> dict[str, Tensor]:
    return {n: torch.zeros(count, *shape) for n, shape in strategy.shapes.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("encoder.0.bias"), "missing or unexpected"),
        (lambda t: t.update(x=torch.zeros(2, 1)), "missing or unexpected"),
        (lambda t: t.update({"encoder.0.bias": torch.zeros(3, 8)}), "must have shape"),
        (lambda t: t.update({"encoder.0.bias": torch.zeros(2, 7)}), "must have shape"),
        (lambda t: t.update({"encoder.0.bias": torch.zeros(())}), "must have shape"),
        (lambda t: t["encoder.0.bias"].fill_(torch.nan), "non-finite"),
    ],
)
def test_invalid_candidates_are_rejected(change: Any, message: str) -> None:
    strategy = server()
    tensors = whole(strategy, 2)
    change(tensors)
    record = CandidateModels(tensors).to_record()
    with pytest.raises(PayloadError, match=message):
        CandidateModels.from_record(record, (strategy.shapes, 3))


@pytest.mark.parametrize("count", [0, 5])
def test_a_wrong_number_of_candidates_is_rejected(count: int) -> None:
    strategy = server()
    record = CandidateModels(whole(strategy, count)).to_record()
    with pytest.raises(PayloadError, match="1 to 4 models"):
        CandidateModels.from_record(record, (strategy.shapes, 3))


def test_a_missing_or_non_finite_loss_is_rejected() -> None:
    strategy = server()
    for losses, message in (([0.1], "shape"), ([0.1, math.nan], "non-finite")):
        payload = ScoredModel(constant(strategy, 1.0), torch.tensor(losses))
        record = payload.to_record()
        with pytest.raises(PayloadError, match=message):
            ScoredModel.from_record(record, (strategy.shapes, (2,)))


def test_the_server_state_is_complete() -> None:
    strategy, twin = server(3), server(3)
    strategy.aggregate(1, {p: upload(strategy, float(p), [0.1]) for p in range(3)})
    twin.load_server_state(strategy.server_state())
    for pid in range(3):
        one, other = strategy.download(2, pid), twin.download(2, pid)
        assert all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)


def test_bytes_follow_the_formula(small: dict[str, Any]) -> None:
    # the downloads of training alone, without those before a client is scored
    settings = {"evaluate_every": 3, "eval_policy": "refresh"}
    run = simulate("pfedfsl", **{**small, "rounds": 3}, **settings)
    sizes = [row["bytes"]["down"]["models"] for row in run.rounds]
    # 3 clients, P = 2 · (8 · 8 + 8); from round 2 on each gets 2 candidates
    assert sizes[1] - sizes[0] == 3 * 2 * 4 * 144
    assert sizes[2] == sizes[1]
