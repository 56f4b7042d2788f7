from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.client_apps.adpfedgnn import (
    ADPFedGNNClientApp,
    LocalTraining,
    open_networks,
)
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.model_store import card_of
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import parse_config
from flower_fgl.nn.state import state_to_vector, vector_to_state
from flower_fgl.protocols.adpfedgnn import SharedWeights
from flower_fgl.runs.model_file import save_model
from flower_fgl.runs.saved_model import load_model

N, C, WIDTH = 40, 3, 8


def make_client(
    *,
    y: Tensor | None = None,
    edge_index: Tensor | None = None,
    general: dict[str, Any] | None = None,
    **settings: Any,
) -> Client:
    """Make a client with a random graph, half of whose nodes are training nodes."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(0, C, (N,), generator=draw) if y is None else y
    x = torch.randn(N, 6, generator=draw)
    x[torch.arange(N), labels] += 2.0
    upper = torch.rand(N, N, generator=draw).triu(1) > 0.8
    if edge_index is None:
        edge_index = (upper | upper.T).nonzero().T.contiguous()
    masks = {
        name: torch.zeros(N, dtype=torch.bool) for name in ("train", "val", "test")
    }
    masks["train"][::2] = True
    masks["val"][1::4] = True
    masks["test"][3::4] = True
    graph = ClientGraph(
        0, Graph(x, edge_index, labels, masks), Target.classes("abc"), torch.arange(N)
    )
    config = parse_config(
        {
            "method": "adpfedgnn",
            "hidden-channels": WIDTH,
            **(general or {}),
            **{f"adpfedgnn.{key.replace('_', '-')}": v for key, v in settings.items()},
        }
    )
    device = torch.device("cpu")
    return Client(config, 0, 1, ClientData.build(graph, device), ClientState(), device)


def initial(client: Client) -> SharedWeights:
    """Return a first download with random weights."""
    spec = ADPFedGNNClientApp().download_spec(client)
    draw = torch.Generator().manual_seed(8)
    return SharedWeights(
        *(
            {n: 0.3 * torch.randn(s, generator=draw) for n, s in shapes.items()}
            for shapes in (spec.weights, spec.networks)
        )
    )


def answer(client: Client, fit: Fit, before: SharedWeights) -> SharedWeights:
    """Return the next download of a server that has no other client."""
    upload = fit.upload
    flat = torch.where(upload.mask, upload.values, state_to_vector(before.weights))
    shapes = ADPFedGNNClientApp().download_spec(client).weights
    return SharedWeights(vector_to_state(flat, shapes), upload.networks)


def run_rounds(client: Client, rounds: int) -> list[Fit]:
    """Train for some rounds as the only client, keeping its state between rounds."""
    app, download, fits = ADPFedGNNClientApp(), initial(client), []
    for server_round in range(1, rounds + 1):
        fit = app.fit(client, server_round, download)
        client.state.set_group("model", fit.model.state_dict())
        download = answer(client, fit, download)
        fits.append(fit)
    return fits


def test_masks_are_ones_until_the_second_global_model_and_change_afterwards() -> None:
    fits = run_rounds(make_client(), 4)
    first, second, _, fourth = (fit.upload.mask for fit in fits)
    assert bool(first.all())
    # at the end of the second round Δ is known for the first time
    assert not bool(second.all())
    # with one client, Δ is not 0 mainly for weights that were shared before
    assert int((second != fourth).sum()) > 0
    shapes = ADPFedGNNClientApp().download_spec(make_client()).weights
    for name, part in vector_to_state(fourth, shapes).items():
        assert 0 < int(part.sum()) <= part.numel() // 2, name


def test_local_masks_stay_with_the_client() -> None:
    client = make_client()
    fit = run_rounds(client, 3)[-1]
    kept = client.state.group("model")["local_mask"]
    assert not torch.equal(kept, fit.upload.mask)
    assert set(vars(fit.upload)) == {"values", "mask", "networks", "weight"}
    assert torch.equal(fit.upload.values != 0, fit.upload.mask)


def test_gradients_of_effective_weights_equal_autograd_through_the_masks() -> None:
    client = make_client(lambda_reg=0.0, rl=False, mi=False)
    run_rounds(client, 2)
    net, networks = open_networks(Group(client), [initial(client)])
    size = len(net.weights())
    net.global_mask = torch.arange(size) % 2 == 0
    net.local_mask = torch.arange(size) % 3 == 0
    net.backbone.dropout = 0.0
    before = net.weights()
    training = LocalTraining(Group(client, 3), net, networks)
    training.train()
    dense = training.gradients
    assert bool((dense[0][~net.global_mask] != 0).any())
    outside = ~(net.global_mask | net.local_mask)
    grad = state_to_vector({n: p.grad for n, p in net.backbone.named_parameters()})
    assert not grad[outside].any()
    assert grad[~outside].any()
    assert not torch.equal(net.weights(), before)


@pytest.mark.parametrize("weight_decay", [0.0, 0.002])
def test_the_decay_of_a_weight_that_no_branch_uses_is_proportional_to_it(
    weight_decay: float,
) -> None:
    moved = {}
    for reg_step in ("decoupled", "gradient"):
        general = {"weight-decay": weight_decay}
        client = make_client(general=general, reg_step=reg_step, rl=False)
        net, networks = open_networks(Group(client), [initial(client)])
        net.global_mask = net.local_mask = torch.zeros_like(net.local_mask)
        before = net.weights()
        LocalTraining(Group(client, 1), net, networks).train()
        shapes = net.shapes
        moved[reg_step] = vector_to_state(net.weights(), shapes)
        start = vector_to_state(before, shapes)
    steps, decay = client.config.local_epochs, 2 * 0.003 + weight_decay  # one batch
    for name, weight in start.items():
        by = 1.0 if name.endswith("bias") else (1 - 0.01 * decay) ** steps
        torch.testing.assert_close(moved["decoupled"][name], by * weight)
    # Adam's step is its learning rate, whatever the size of the gradient
    name = "encoder.0.lin_l.weight"
    change = (moved["gradient"][name] - start[name]).abs()
    assert float(change.median()) == pytest.approx(0.01 * steps, rel=0.05)


@pytest.mark.parametrize("overlap", ["excluded", "allowed"])
def test_only_masks_that_may_overlap_share_weights(overlap: str) -> None:
    client = make_client(overlap=overlap)
    fit = run_rounds(client, 4)[-1]
    local = client.state.group("model")["local_mask"]
    both = float((local & fit.upload.mask).float().mean())
    assert both == (0 if overlap == "excluded" else pytest.approx(both))
    assert fit.terms["in-both-masks"] == pytest.approx(both)
    if overlap == "allowed":
        assert both > 0.1


def test_weights_that_left_both_masks_do_not_move_on_their_old_moments() -> None:
    client = make_client(rl=False, mi=False, q=0.3)
    download = answer(client, run_rounds(client, 3)[-1], initial(client))
    net, networks = open_networks(Group(client), [download])
    unused = ~(net.global_mask | net.local_mask)
    assert 0.2 < float(unused.float().mean()) < 0.9
    moments = client.state.group("optimizer")
    size = sum(float(t.abs().sum()) for n, t in moments.items() if "exp_avg/" in n)
    assert size > 0
    before = net.weights()
    training = LocalTraining(Group(client, 4), net, networks)
    training.train()
    shapes, steps = net.shapes, client.config.local_epochs
    after, start, rest = (
        vector_to_state(flat, shapes) for flat in (net.weights(), before, unused)
    )
    for name, weight in start.items():
        by = 1.0 if name.endswith("bias") else (1 - 2 * 0.01 * 0.003) ** steps
        torch.testing.assert_close(after[name][rest[name]], by * weight[rest[name]])
    assert not torch.allclose(net.weights()[~unused], before[~unused], atol=1e-3)


def test_statistics_of_agent_and_masks_are_logged() -> None:
    client = make_client(general={"batch-size": 4}, buffer=2000, steps_per_batch=50)
    fit = run_rounds(client, 3)[-1]
    assert fit.terms["distinct-rewards"] > 10
    assert 0 < fit.terms["keep-spread"] < 0.5
    assert fit.terms["in-both-masks"] == 0
    assert client.state.values["keep-spread"] == fit.terms["keep-spread"]


def test_a_client_keeps_the_weights_under_its_local_mask() -> None:
    client = make_client()
    run_rounds(client, 3)
    saved = client.state.group("model")
    download = initial(client)
    net, _ = open_networks(Group(client), [download])
    names = [n for n in net.state_dict() if n.startswith("branch.")]
    own = state_to_vector({name: saved[name] for name in names})
    expected = torch.where(saved["local_mask"], own, state_to_vector(download.weights))
    assert torch.equal(net.weights(), expected)


def test_a_download_brings_its_agent_whatever_agent_the_client_kept() -> None:
    client = make_client()
    run_rounds(client, 2)
    download = initial(client)
    net, _ = open_networks(Group(client), [download])
    assert net.agent is not None
    for name, weight in net.agent.named_parameters():
        assert torch.equal(weight, download.networks[f"agent.{name}"])


@pytest.mark.parametrize("is_new", [True, False])
def test_all_global_weights_are_used_before_training_and_without_decoupling(
    is_new: bool,
) -> None:
    client = make_client(decouple=is_new)
    if not is_new:
        run_rounds(client, 2)
    download = initial(client)
    net, _ = open_networks(Group(client), [download])
    assert torch.equal(net.weights(), state_to_vector(download.weights))
    assert bool(net.local_mask.all())


def test_validation_and_test_labels_do_not_matter() -> None:
    client = make_client()
    graph = client.data.graph.graph
    flipped = torch.where(graph.masks["train"], graph.y, (graph.y + 1) % C)
    features = client.data.graph.graph.x
    other = make_client()
    other.data.labels[0][:] = flipped  # the labels of evaluation, not of training
    assert torch.equal(features, other.data.graph.graph.x)
    for a, b in zip(run_rounds(client, 3), run_rounds(other, 3), strict=True):
        assert torch.equal(a.upload.values, b.upload.values)


def test_a_restored_client_state_reproduces_the_next_round() -> None:
    app = ADPFedGNNClientApp()
    client = make_client()
    fits = run_rounds(client, 2)
    saved = ClientState(dict(client.state.tensors), dict(client.state.values))
    download = answer(client, fits[-1], initial(client))
    first = app.fit(client, 3, download)
    twin = make_client()
    twin.state = saved
    second = app.fit(twin, 3, download)
    assert first.loss == second.loss
    assert torch.equal(first.upload.values, second.upload.values)
    for name, tensor in first.upload.networks.items():
        assert torch.equal(tensor, second.upload.networks[name]), name


def test_evaluation_uses_the_download_and_does_not_change_the_state() -> None:
    app, client = ADPFedGNNClientApp(), make_client()
    run_rounds(client, 3)
    before = {name: t.clone() for name, t in client.state.tensors.items()}
    stale = app.personal_model(client, None)
    fresh = app.refreshed_model(client, 4, initial(client))
    assert stale is not None
    assert fresh is not None
    assert not torch.equal(stale.weights(), fresh.weights())
    assert client.evaluate(fresh) == client.evaluate(fresh)
    assert all(torch.equal(client.state.tensors[n], t) for n, t in before.items())
    assert app.personal_model(make_client(), None) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rl": False},
        {"decouple": False},
        {"decouple": False, "rl": False},
        {"selection": "random-drop"},
        {"selection": "all"},
        {"mi": False},
        {"masked_agg": "literal"},
        {"reward_sign": "literal"},
        {"reward_scale": "round"},
        {"reg_step": "gradient", "eval_actions": "greedy"},
        {"club_norm": "literal"},
        {"mask_score": "neg-abs-diff"},
        {"general": {"model": "gat"}},
        {"general": {"batch-size": 7}},
        {"general": {"batch-size": 0, "optimizer-state": "reset"}},
        {"general": {"check-every": 1, "local-epochs": 2}},
        {"q": 0.0},
        {"q": 1.0},
        {"k": 1000, "eval_fanout": 1000},
        {"beta": 0.0},
        {"buffer": 50},
        {"overlap": "allowed", "steps_per_batch": 0, "reward_norm": "none"},
    ],
)
def test_every_setting_trains(settings: dict[str, Any]) -> None:
    client = make_client(**settings)
    fits = run_rounds(client, 3)
    assert all(torch.tensor(fit.loss).isfinite() for fit in fits)
    assert bool(fits[-1].upload.values.isfinite().all())
    assert set(fits[0].seconds) >= {"sampling", "agent", "forwards", "masks"}
    (row,) = {len(fit.upload.values) for fit in fits}
    assert row == ADPFedGNNClientApp().download_spec(client).num_weights


def test_masks_of_zeros_upload_nothing_and_give_equal_logits() -> None:
    client = make_client(q=0.0)
    fits = run_rounds(client, 3)
    assert not fits[-1].upload.mask.any()
    model = ADPFedGNNClientApp().personal_model(client, None)
    logits = model.eval()(client.data.inputs[0])
    assert float(logits.detach().abs().max()) == 0


def test_a_client_with_one_class_and_one_without_edges_train() -> None:
    for client in (
        make_client(y=torch.zeros(N, dtype=torch.int64)),
        make_client(edge_index=torch.empty(2, 0, dtype=torch.int64)),
    ):
        fits = run_rounds(client, 3)
        assert bool(fits[-1].upload.values.isfinite().all())
        assert all(math.isfinite(number) for number in fits[-1].terms.values())
        model = ADPFedGNNClientApp().personal_model(client, None)
        assert 0 <= client.evaluate(model)["test"].accuracy <= 1


def test_rewards_compare_with_previous_losses() -> None:
    client = make_client(reward_window=4)
    run_rounds(client, 2)
    former = client.state.group("agent")["losses"]
    assert len(former) == 4
    # for the first batch of the first round there is no previous loss
    replay = client.state.group("agent")
    rewards = replay["reward"][: int(replay["cursor"][1])]
    assert float(rewards[0]) == 0
    assert float(rewards.abs().max()) > 0


def test_the_replay_buffer_stores_pairs_of_the_graph() -> None:
    client = make_client()
    run_rounds(client, 1)
    replay = client.state.group("agent")
    size = int(replay["cursor"][1])
    edges = {tuple(pair) for pair in client.data.inputs[0].edge_index.T.tolist()}
    for v, u, ahead in replay["numbers"][:3, :size].T.tolist():
        assert (u, v) in edges
        assert ahead == -1 or (ahead, v) in edges


@pytest.mark.thorough
def test_a_larger_weight_lowers_the_mutual_information() -> None:
    found = []
    for lambda_mi in (0.0, 3.0):
        # a quick estimator: one that knows nothing yet bounds by 0
        client = make_client(
            lambda_mi=lambda_mi,
            q=1.0,
            network_lr=0.01,
            overlap="allowed",
            general={"dropout": 0.0},
        )
        run_rounds(client, 25)
        found.append(float(client.state.values["mutual-information"]))
    assert found[0] > 0.1
    assert found[1] < found[0] / 2


def test_a_saved_model_gives_the_same_predictions(tmp_path: Path) -> None:
    client = make_client()
    model = run_rounds(client, 1)[0].model.eval()
    save_model(tmp_path, model.state_dict(), card_of(client, model, "me", 1, None))
    graph = client.data.training.inputs
    torch.testing.assert_close(load_model(tmp_path).model(graph), model(graph))


@pytest.mark.thorough
def test_adpfedgnn_learns_a_toy_problem(small: dict[str, Any]) -> None:
    settings = {**small, "rounds": 8}
    settings["synthetic"] = {**settings["synthetic"], "feature_noise": 0.5}
    run = simulate("adpfedgnn", **settings)
    assert run.best["test"]["accuracy"] > 0.6


@pytest.mark.slow
def test_without_masks_agent_and_decay_the_accuracy_is_that_of_fedavg(
    real_data: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "clients": 5,
        "partition": "louvain",
        "split": "20/40/40",
        "data_dir": str(real_data),
        "output_dir": str(tmp_path),
        "rounds": 50,
        "evaluate_every": 5,
        "model": "graphsage",
        "participation": 0.25,
    }
    neither = {"decouple": False, "rl": False, "lambda_reg": 0.0}
    found = [
        simulate(method, "cora", **settings, **own).best["test"]["accuracy"]
        for method, own in (
            ("fedavg", {"weight_decay": 0.0}),
            ("adpfedgnn", {"adpfedgnn": neither}),
        )
    ]
    assert abs(found[0] - found[1]) < 0.03
    assert min(found) > 0.75
