from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.fedlog.network import FedLogBranchNet
from flower_fgl.algorithms.fedlog.synthetic import class_rates, disguise_rates
from flower_fgl.client_apps import fedlog
from flower_fgl.client_apps.fedlog import (
    FedLogClientApp,
    LocalLearner,
    initial_nodes,
    pretrain_encoder,
)
from flower_fgl.client_apps.runtime import training
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.runtime.training import TrainingSet, load_state
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.errors import FglError, PayloadError, RunError
from flower_fgl.core.seeds import torch_generator
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.fedlog import FedLogDownload
from flower_fgl.runs.model_file import ModelCard, save_model
from flower_fgl.runs.saved_model import load_model

N, C, D, S = 30, 3, 6, 4
SHORT = {
    "nodes_per_class": S,
    "encoder_channels": 8,
    "prompt_epochs": 2,
    "prompt_networks": 2,
}


def new_network(client: Client) -> FedLogBranchNet:
    """Build a network with the initial learnable nodes."""
    network = FedLogClientApp().build(client)
    nodes = initial_nodes(client, network)
    load_state(network, {f"nodes.{name}": x for name, x in nodes.items()})
    return network


def make_client(y: Tensor | None = None, **settings: Any) -> Client:
    """Make a client with a random graph whose last node has no neighbour."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=draw)
    upper = torch.rand(N, N, generator=draw).triu(1) > 0.8
    upper[:, -1] = False
    edges = (upper | upper.T).nonzero().T.contiguous()
    labels = torch.arange(N) % C if y is None else y
    masks = {
        name: torch.zeros(N, dtype=torch.bool) for name in ("train", "val", "test")
    }
    masks["train"][:20] = True
    masks["train"][-1] = True
    masks["val"][20:25] = True
    masks["test"][25:] = True
    names = tuple("abc")
    graph = ClientGraph(
        0, Graph(x, edges, labels, masks), Target.classes(names), torch.arange(N)
    )
    general = {k: v for k, v in settings.items() if "-" in k or k == "lr"}
    method_config = {**SHORT, **{k: v for k, v in settings.items() if k not in general}}
    config = parse_config(
        {
            "method": "fedlog",
            "hidden-channels": 8,
            **general,
            **{f"fedlog.{k.replace('_', '-')}": v for k, v in method_config.items()},
        }
    )
    device = torch.device("cpu")
    data = ClientData.build(graph, device)
    return Client(config, 0, 1, data, ClientState(), device)


def downloads(client: Client, app: FedLogClientApp) -> list[FedLogDownload]:
    """Return the downloads of rounds 1 and 2 from a server with one client."""
    weights = new_network(client).shared_state()
    first = FedLogDownload({n: t.clone() for n, t in weights.items()})
    shapes = app.download_spec(client)
    if shapes.nodes is None:
        return [first, first]
    nodes = torch.randn(shapes.nodes, generator=torch.Generator().manual_seed(1))
    prompts: dict[str, Tensor] = {}
    if shapes.prompts is not None:
        made = app.act(client, 0, FedLogDownload()).upload.prompts
        prompts = {n: t.expand(C, *t.shape).clone() for n, t in made.items()}
    return [first, FedLogDownload(first.weights, nodes, prompts)]


def run_rounds(client: Client, rounds: int = 2) -> list[Any]:
    """Train for some rounds and keep the model as the message handler does."""
    app, fits = FedLogClientApp(), []
    first, later = downloads(client, app)
    for server_round in range(1, rounds + 1):
        fit = app.fit(client, server_round, first if server_round == 1 else later)
        state = {n: t.detach().clone() for n, t in fit.model.state_dict().items()}
        client.state.set_group("model", state)
        fits.append(fit)
    return fits


VARIANTS: list[dict[str, Any]] = [
    {},
    {"lg": False},
    {"pg": False},
    {"fs": False},
    {"alpha_fixed": 0.5},
    {"classifier_update": False},
    {"loss_mix": "mixture"},
    {"msg_input": "neighbor"},
    {"norm": "sum"},
    {"second_silu": False},
    {"lg_mode": "sequential"},
    {"synthetic_mode": "TT", "permute_slots": True},
    {"local_pretrain_epochs": 3},
    {"class_rate_noise": "gauss"},
    {"class_rate_noise": "permute"},
]


@pytest.mark.parametrize("stacked", ["true", "false"])
def test_a_checkpoint_holds_the_prompt_generators_of_all_clients_once(
    stacked: str, small: dict[str, Any]
) -> None:
    run = simulate(
        "fedlog", **small, fedlog=SHORT, stacked=stacked, keep_checkpoint=True
    )
    states = run.path / "checkpoint" / f"round-{small['rounds']:06d}" / "clients"
    assert len([*states.glob("*.safetensors")]) == small["clients"]
    assert len([*states.glob("groups/*.safetensors")]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_runs(settings: dict[str, Any], small: dict[str, Any]) -> None:
    run = simulate("fedlog", **small, fedlog={**SHORT, **settings})
    assert run.status == "completed"
    assert run.summary["failures"] == {}


@pytest.mark.thorough
@pytest.mark.parametrize("settings", VARIANTS[1:13], ids=str)
def test_every_variant_trains_differently(settings: dict[str, Any]) -> None:
    plain = {"gamma_step": 0.5, "gamma_threshold": 0.0}
    one = run_rounds(make_client(**plain), 3)
    other = run_rounds(make_client(**plain, **settings), 3)
    same = all(
        torch.equal(tensor, theirs.model.state_dict()[name])
        for mine, theirs in zip(one, other, strict=True)
        for name, tensor in mine.model.state_dict().items()
    )
    # the choice of the uploaded nodes does not affect the client's own training
    assert same == ("synthetic_mode" in settings)


def test_messages_get_a_gradient_except_in_the_published_variant() -> None:
    for updates in (True, False):
        client = make_client(classifier_update=updates)
        network = new_network(client).train()
        learner = LocalLearner(Group(client, 1), network, None)
        loss = learner.fitting_loss(
            learner.group.rows.select(torch.arange(4)), network.prototypes()
        )
        loss.backward()
        slopes = [
            layer.trans[0].weight.grad
            for branch in network.classifier.values()
            for layer in branch.layers
        ]
        assert all((slope is not None) == updates for slope in slopes)
        assert not updates or all(slope.norm() > 0 for slope in slopes)


def test_every_part_of_the_network_learns() -> None:
    client = make_client()
    fits = run_rounds(client)
    start = new_network(client).state_dict()
    for name, tensor in fits[-1].model.state_dict().items():
        assert not torch.equal(tensor, start[name]), name


@pytest.mark.thorough
def test_local_generalisation_reaches_classes_without_a_training_node() -> None:
    # the client has classes 0 and 1 only
    client = make_client(y=torch.arange(N) % 2, lr=0.01, **{"local-epochs": 60})
    fits = run_rounds(client)
    labels = torch.arange(C).repeat_interleave(S)
    later = downloads(client, FedLogClientApp())[1]

    def share_of_class_2(fit: Any) -> float:
        learner = LocalLearner(Group(client, 1), fit.model.eval(), later.nodes)
        with torch.no_grad():
            _, hits = learner.general_loss(fit.model.prototypes())
        return float(hits[labels == 2].float().mean())

    assert share_of_class_2(fits[1]) > 0.7


@pytest.mark.thorough
def test_gamma_moves_from_the_second_round_on_and_stays_in_its_range() -> None:
    client = make_client(gamma_step=0.3, **{"local-epochs": 30}, lr=0.01)
    run_rounds(client, 1)
    assert client.state.group("scaling")["gamma"].tolist() == [0.0] * C
    run_rounds(client, 3)
    gamma = client.state.group("scaling")["gamma"]
    assert gamma.max() > 0
    assert gamma.min() >= 0
    assert gamma.max() <= 1


def test_without_scaling_gamma_stays_at_zero() -> None:
    client = make_client(gamma_step=0.3, fs=False, gamma_threshold=0.0)
    run_rounds(client, 3)
    assert not client.state.group("scaling")["gamma"].any()


@pytest.mark.parametrize(("mode", "branch"), [("HH", "head"), ("HT", "tail")])
def test_the_nodes_of_the_selected_branch_are_uploaded(mode: str, branch: str) -> None:
    fit = run_rounds(make_client(synthetic_mode=mode))[-1]
    assert torch.equal(fit.upload.nodes, fit.model.nodes[branch])


def test_an_epoch_uses_whole_batches_and_one_for_small_clients() -> None:
    for size, mode, steps in ((64, "joint", 1), (8, "joint", 2), (8, "sequential", 4)):
        client = make_client(lg_mode=mode, **{"batch-size": size})
        app = FedLogClientApp()
        later = downloads(client, app)[1]
        run_rounds(client, 1)
        client.state.set_group("prompts", dict(later.prompts))
        learner = LocalLearner(Group(client, 1), new_network(client), later.nodes)
        optimizer = torch.optim.SGD(learner.network.parameters(), lr=0)
        count = 0

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1

        optimizer.register_step_post_hook(counted)
        order = [torch.Generator().manual_seed(0)]
        batches = learner.group.batches(size, order, only_whole=True)
        learner.epoch(optimizer, [*batches])
        assert count == steps  # ⌊21 / 8⌋ = 2; twice as many in sequential mode


def test_with_check_every_the_epoch_best_on_validation_nodes_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = iter([0.9, 0.1, 0.5])
    monkeypatch.setattr(Client, "validate", lambda *_: next(scores))
    checked = make_client(**{"local-epochs": 3, "check-every": 1})
    kept = run_rounds(checked, 1)[0].model.state_dict()
    assert next(scores, None) is None
    short = run_rounds(make_client(**{"local-epochs": 1}), 1)[0].model.state_dict()
    long = run_rounds(make_client(**{"local-epochs": 3}), 1)[0].model.state_dict()
    assert all(torch.equal(kept[name], short[name]) for name in kept)
    assert not torch.equal(kept["nodes.head"], long["nodes.head"])


def test_the_encoder_is_pretrained_in_the_first_round_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make_client(local_pretrain_epochs=40, lr=0.05)
    network = new_network(client)
    before = {n: t.clone() for n, t in network.state_dict().items()}
    pretrain_encoder(client, network)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith("encoder."), name
    scores = iter([0.1, 0.6, *[0.5] * 10])
    monkeypatch.setattr(Client, "validate", lambda *_: next(scores))
    network = new_network(client)
    pretrain_encoder(client, network)
    assert next(scores, None) is None  # stopped after ten epochs without improvement
    monkeypatch.undo()
    short = make_client(local_pretrain_epochs=2, lr=0.05)
    expected = new_network(short)
    monkeypatch.setattr(Client, "validate", lambda *_: float("nan"))
    pretrain_encoder(short, expected)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name
    rounds: list[int] = []
    monkeypatch.setattr(fedlog, "pretrain_encoder", lambda *_: rounds.append(1))
    run_rounds(make_client(local_pretrain_epochs=1), 3)
    assert rounds == [1]
    run_rounds(make_client(), 2)
    assert rounds == [1]
    late = make_client(local_pretrain_epochs=1)
    app = FedLogClientApp()
    first = downloads(late, app)[0]
    app.fit(late, 7, FedLogDownload(first.weights))
    assert rounds == [1, 1]


def test_optimizer_moments_are_dropped_unless_the_settings_keep_them() -> None:
    client = make_client()
    run_rounds(client, 1)
    assert not client.state.group("optimizer")
    client = make_client(**{"optimizer-state": "keep"})
    run_rounds(client, 2)
    moments = client.state.group("optimizer")
    assert {name.partition("/")[0] for name in moments} >= {"exp_avg", "exp_avg_sq"}
    assert "exp_avg/nodes.head" in moments


def test_learnable_nodes_are_not_decayed() -> None:
    # a weight decay this large would be visible in the nodes
    client = make_client(beta=0.0, **{"weight-decay": 1e6})
    fit = run_rounds(client, 1)[0]
    start, end = new_network(client).nodes["head"], fit.model.nodes["head"]
    assert (end - start).abs().max() < 0.005
    assert not (start - end).sign().equal(start.sign())


def test_clients_start_from_the_same_nodes_and_keep_their_own() -> None:
    client = make_client()
    first, second = run_rounds(client)
    twin = make_client()
    twin.partition_id, twin.num_partitions = 5, 6
    starts = [new_network(c).nodes["tail"] for c in (client, twin)]
    assert torch.equal(*starts)
    kept = FedLogClientApp().personal_model(client, None)
    assert kept is not None
    assert torch.equal(kept.nodes["tail"], second.model.nodes["tail"])
    assert not torch.equal(first.model.nodes["tail"], starts[0])


def test_synthetic_nodes_without_generators_are_rejected() -> None:
    client = make_client()
    app = FedLogClientApp()
    first, later = downloads(client, app)
    with pytest.raises(PayloadError, match="no prompt generators"):
        app.fit(client, 2, FedLogDownload(later.weights, later.nodes))
    with pytest.raises(PayloadError, match="no weights"):
        app.fit(client, 1, FedLogDownload())
    assert app.fit(client, 1, first).loss > 0


def test_a_class_without_training_nodes_and_an_isolated_node_give_finite_values() -> (
    None
):
    client = make_client(y=torch.arange(N) % 2)
    fits = run_rounds(client, 3)
    with torch.inference_mode():
        log_p = fits[-1].model.eval()(client.data.inputs[0])
    assert log_p.isfinite().all()
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(N))
    assert all(fit.upload.nodes.isfinite().all() for fit in fits)


def test_class_rates_count_training_labels_only() -> None:
    y = torch.cat([torch.zeros(20), torch.full((9,), 2.0), torch.ones(1)]).long()
    rates = FedLogClientApp().act(make_client(y=y), 0, FedLogDownload())
    torch.testing.assert_close(rates.upload.rates, torch.tensor([20 / 21, 1 / 21, 0]))


@pytest.mark.parametrize("kind", ["none", "gauss", "permute"])
def test_uploaded_class_rates_have_the_configured_noise(kind: str) -> None:
    y = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2]).repeat(3)
    app = FedLogClientApp()
    rates = app.act(make_client(y=y), 0, FedLogDownload()).upload.rates
    client = make_client(y=y, class_rate_noise=kind, pg=False)
    # a random permutation may be the identity, 40 of them are not
    draws = [app.act(client, 0, FedLogDownload()).upload.rates for _ in range(40)]
    assert all(torch.equal(found, rates) for found in draws) == (kind == "none")
    if kind == "permute":
        for found in draws:
            assert torch.equal(found.sort().values, rates.sort().values)


@pytest.mark.parametrize("kind", ["gauss", "permute"])
def test_the_noise_of_class_rates_does_not_come_from_the_seed(kind: str) -> None:
    """A server that knows the seed drew the same noise and undid it exactly."""
    y = torch.tensor([0] * 14 + [1] * 10 + [2] * 6)
    app, client = FedLogClientApp(), make_client(y=y, class_rate_noise=kind, pg=False)
    client.config = replace(client.config, seed=3)
    rates = class_rates(client.data.training.labels, C)
    draws = [app.act(client, 0, FedLogDownload()).upload.rates for _ in range(40)]
    assert len({tuple(draw.tolist()) for draw in draws}) > 1
    guess = disguise_rates(
        rates,
        client.config.method_config.class_rate_noise,
        scale=client.config.method_config.noise_scale,
        generator=torch_generator(3, 0, client.partition_id, "rates"),
    )
    assert any(not torch.equal(draw, guess) for draw in draws)


def test_no_learnable_nodes_of_a_small_class_are_uploaded() -> None:
    y = torch.tensor([0] * 14 + [1] * 13 + [2] * 3)
    counts = make_client(y=y).data.graph.class_counts("train")
    assert 0 < int(counts[2]) < 4 <= int(counts[:2].min())
    fits = {}
    for least in (1, 4):
        client = make_client(y=y)
        client.config = replace(client.config, min_class_count=least)
        fits[least] = run_rounds(client)[-1]
    client = make_client(y=y)
    start = initial_nodes(client, new_network(client))["head"]
    slots = client.config.method_config.nodes_per_class
    open_, kept = (fits[least].upload.nodes.view(C, slots, -1) for least in (1, 4))
    start = start.view(C, slots, -1)
    assert not torch.equal(open_[2], start[2])  # they were trained, but stay here
    assert torch.equal(kept[2], start[2])
    assert torch.equal(kept[:2], open_[:2])
    # the client itself predicts with the nodes that it trained
    own = {least: fit.model.nodes["head"] for least, fit in fits.items()}
    assert torch.equal(own[1], own[4])


def test_generators_start_from_the_same_weights_on_all_clients() -> None:
    # at this learning rate the weights differ only if the initial weights differ
    one, other = make_client(prompt_lr=1e-9), make_client(prompt_lr=1e-9)
    other.partition_id, other.num_partitions = 5, 6
    app = FedLogClientApp()
    found = [app.act(c, 0, FedLogDownload()).upload.prompts for c in (one, other)]
    torch.testing.assert_close(*found)


def test_only_large_clients_train_their_generator_on_batches() -> None:
    settings = make_client().config.method_config
    assert [settings.prompt_batch(n) for n in (20, 2048, 2049)] == [0, 0, 256]
    smaller = make_client(prompt_batch_size=4)
    assert smaller.config.method_config.prompt_batch(20) == 4
    states = [
        FedLogClientApp().act(c, 0, FedLogDownload()).upload.prompts
        for c in (make_client(), make_client(prompt_batch_size=99), smaller)
    ]
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor)
    assert any(not torch.equal(states[2][n], t) for n, t in states[0].items())


def test_the_error_of_a_diverged_generator_names_its_learning_rate() -> None:
    client = make_client(prompt_lr=1e30)
    with pytest.raises(FglError, match=r"non-finite.*smaller fedlog\.prompt-lr"):
        FedLogClientApp().act(client, 0, FedLogDownload())


def test_a_saved_network_is_not_loaded_as_a_plain_backbone(tmp_path: Path) -> None:
    client = make_client()
    state = run_rounds(client)[-1].model.state_dict()
    card = ModelCard("fedlog", "graphsage", D, 8, 2, tuple("abc"), False, "none", 2)
    save_model(tmp_path / "m", state, card)
    with pytest.raises(RunError, match="its weights do not match graphsage"):
        load_model(tmp_path / "m")


def test_a_small_batch_is_embedded_from_its_computation_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(200, D, generator=draw)
    edges = torch.randint(0, 199, (2, 150), generator=draw)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    client = make_client()
    inputs, index = GraphInput(x, edges), torch.arange(190, 200)  # 199: no neighbour
    data = TrainingSet(inputs, index, torch.arange(10) % C)
    client = replace(client, data=replace(client.data, training=data))
    network = new_network(client).eval()
    learner = LocalLearner(Group(client, 1), network, None)
    found = []
    for few in (0.05, 0.0):
        monkeypatch.setattr(training, "BATCH_FIELD_SHARE", few)
        assert (data.field_of(3, index[3:]) is None) == (few == 0)
        network.zero_grad()
        h, around = learner.embed_nodes(index[3:])
        (h * around.sin()).sum().backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.clone() for p in network.encoder.parameters()]
        found.append((h, around, grads))
    torch.testing.assert_close(*found)
    assert not found[0][1][-1].any()
    assert all(g.any() for g in found[0][2])
