from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl import simulate
from flower_fgl.algorithms.fedsageplus import MendedGraph
from flower_fgl.client_apps import fedsageplus
from flower_fgl.client_apps.fedsageplus import (
    FedSagePlusClientApp,
    feedback_on,
    impaired_of,
    judge_generator,
    keep_mended,
    mended_data,
    open_generator,
    train_generator,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.session import Opened
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.protocols.base import LARGEST, Payload
from flower_fgl.protocols.fedsageplus import FeatureGradient, GeneratorState
from tests.client_apps.runtime.test_client import client_of

SHORT = {"fedsage+.gen-channels": 3, "fedsage+.gen-wide-channels": 7}


def sage_client(toy: NodeDataset, **values: object) -> Client:
    return client_of(toy, method="fedsage+", hidden_channels=4, **{**SHORT, **values})


@pytest.fixture
def client(toy: NodeDataset) -> Client:
    return sage_client(toy)


@pytest.fixture
def lonely(toy: NodeDataset) -> Client:
    return sage_client(replace(toy, edge_index=torch.zeros((2, 0), dtype=torch.int64)))


def shown_by(client: Client) -> GeneratorState:
    return FedSagePlusClientApp().show(client, 1, open_generator(client))


def test_half_of_the_validation_nodes_are_hidden_once(client: Client) -> None:
    first = impaired_of(client)
    assert len(first.kept) == 5  # half of three, rounded down
    assert first.kept[:3].tolist() == [0, 1, 2]  # training nodes are never hidden
    assert impaired_of(client) is first


def test_without_validation_nodes_any_node_is_hidden(toy: NodeDataset) -> None:
    found = impaired_of(
        client_of(toy, has_val=False, method="fedsage+", hidden_channels=4, **SHORT)
    )
    assert len(found.kept) == 3


def test_the_generator_state_contains_weights_and_noisy_embeddings(
    client: Client,
) -> None:
    shown, impaired = shown_by(client), impaired_of(client)
    own = open_generator(client)
    assert all(
        torch.equal(shown.tensors[name], weight)
        for name, weight in own.features.state_dict().items()
    )
    z = own.embed(impaired.inputs)[impaired.centres]
    assert shown.inputs.shape == z.shape
    assert not torch.allclose(shown.inputs, z)  # noise
    assert shown.counts.tolist() == impaired.wanted(5).tolist()


def test_the_gradient_of_a_judge_matches_a_slow_loop(client: Client) -> None:
    shown = shown_by(client)
    features = open_generator(client).features
    x = client.data.graph.graph.x
    total = torch.zeros(())
    for z, count in zip(shown.inputs, shown.counts.tolist(), strict=True):
        for made in features(z).view(5, 6)[:count]:
            total = total + min((made - row).square().mean() for row in x)
    (total / shown.counts.sum()).backward()
    found = judge_generator(client, shown)
    assert set(found) == set(shown.tensors)
    for name, weight in features.named_parameters():
        torch.testing.assert_close(found[name], weight.grad)
        assert found[name].any(), name


def test_an_empty_generator_state_gives_an_empty_gradient(
    client: Client, lonely: Client
) -> None:
    assert judge_generator(client, shown_by(lonely)) == {}


def crafted(num_nodes: int) -> GeneratorState:
    """Show nodes whose last hidden activations are linearly independent.

    Node i has the input i + 1, and unit k of the second layer the activation
    max(0, i + 1 - k).
    """
    inputs = torch.zeros(num_nodes, 4)
    inputs[:, 0] = torch.arange(1.0, num_nodes + 1)
    first, second = torch.zeros(3, 4), torch.zeros(7, 3)
    first[0, 0] = second[:, 0] = 1
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        "0.weight": first,
        "0.bias": torch.zeros(3),
        "2.weight": second,
        "2.bias": -torch.arange(7.0),
        "4.weight": 0.05 * torch.randn(30, 7, generator=drawn),
        "4.bias": torch.zeros(30),
    }
    return GeneratorState(tensors, inputs, torch.ones(num_nodes, dtype=torch.uint8))


def rows_opened(client: Client, shown: GeneratorState) -> torch.Tensor:
    """Compute the rows that a judge compared with, from the answer to one message."""
    gradient = feedback_on(client, shown).tensors["4.weight"][:6]
    network = fedsageplus.feature_generator(client, shown.tensors)
    with torch.no_grad():
        hidden = shown.inputs
        for layer in list(network.children())[:4]:
            hidden = layer(hidden)
        made = network.generate(shown.inputs, shown.counts.long())
    of_outputs = torch.linalg.lstsq(hidden.T.double(), gradient.T.double()).solution
    share = 2 / made.numel() * (1 - made.square())
    return (made - of_outputs / share).float()


@pytest.mark.parametrize("num_nodes", [1, 6])
def test_control_a_gradient_reveals_the_features_of_single_nodes(
    toy: NodeDataset, generator: torch.Generator, num_nodes: int
) -> None:
    # documented in docs/security.md; showing many nodes does not prevent it
    client = sage_client(replace(toy, x=torch.randn(6, 6, generator=generator)))
    found = rows_opened(client, crafted(num_nodes))
    distance = torch.cdist(found, client.data.inputs[0].x).min(dim=1).values
    assert float(distance.max()) < 1e-4


@pytest.mark.parametrize("num_nodes", [1, 6])
def test_with_min_class_count_a_gradient_reveals_means_of_so_many_nodes(
    toy: NodeDataset, generator: torch.Generator, num_nodes: int
) -> None:
    noisy = replace(toy, x=torch.randn(6, 6, generator=generator))
    x = noisy.x
    # groups of a power of two: a server that varies min-class-count learns no difference
    for least, groups in ((2, (x[:2], x[2:4], x[4:])), (3, (x,)), (4, (x,)), (5, (x,))):
        client = sage_client(noisy, min_class_count=least)
        found = rows_opened(client, crafted(num_nodes))
        assert float(torch.cdist(found, x).min()) > 0.5
        means = torch.stack([group.mean(dim=0) for group in groups])
        assert float(torch.cdist(found, means).min(dim=1).values.max()) < 1e-4


def test_a_judge_with_fewer_nodes_than_min_class_count_answers_with_zeros(
    toy: NodeDataset,
) -> None:
    client = sage_client(toy, min_class_count=7)
    found = feedback_on(client, crafted(1)).tensors
    assert set(found) == set(crafted(1).tensors)
    assert not any(bool(part.any()) for part in found.values())


def huge(shown: GeneratorState) -> GeneratorState:
    """Return the largest weights and inputs of a message; fGen's outputs are ∞ − ∞."""
    bad = {name: torch.full_like(t, LARGEST) for name, t in shown.tensors.items()}
    bad["4.weight"][:, ::2] *= -1
    return replace(shown, tensors=bad, inputs=torch.full_like(shown.inputs, LARGEST))


def test_a_judge_returns_no_gradient_that_is_not_finite(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    shown = huge(shown_by(client))
    assert not all(
        bool(g.isfinite().all()) for g in judge_generator(client, shown).values()
    )
    assert feedback_on(client, shown).tensors == {}
    assert "gives no finite gradient" in caplog.text
    usable = feedback_on(client, shown_by(client)).tensors
    assert {n: t.shape for n, t in usable.items()} == {
        n: t.shape for n, t in shown.tensors.items()
    }


def test_a_judge_returns_no_gradient_too_large_for_a_message(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shown_by(client)
    large = {n: torch.full_like(t, 2 * LARGEST) for n, t in shown.tensors.items()}
    monkeypatch.setattr(fedsageplus, "judge_generator", lambda *_: large)
    assert feedback_on(client, shown).tensors == {}


def test_with_noise_a_gradient_that_is_not_finite_becomes_zeros(
    toy: NodeDataset,
) -> None:
    client = sage_client(toy, upload_clip=1.0, upload_noise=1.0)
    shown = huge(shown_by(client))
    found = feedback_on(client, shown).tensors
    assert set(found) == set(shown.tensors)
    assert not any(bool(gradient.any()) for gradient in found.values())


def test_a_generator_without_finite_gradient_names_the_client_that_trains_it(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FedSagePlusClientApp._generate

    def generate(self: Any, opened: Opened) -> Payload:
        reply = original(self, opened)
        if opened.client.partition_id == 1 and isinstance(reply, GeneratorState):
            return huge(reply)
        return reply

    monkeypatch.setattr(FedSagePlusClientApp, "_generate", generate)
    run = simulate(
        "fedsage+",
        **{**small, "rounds": 1},
        **{
            "fedsage+": {
                "gen_rounds": 2,
                "gen_channels": 8,
                "gen_wide_channels": 16,
                "peers": 2,
            }
        },
    )
    reason = "its generator gives no finite gradient at client 0 and client 2"
    assert run.rounds[0]["failures"] == [{"partition_id": 1, "reason": reason}]


def test_the_gradient_of_others_is_added_to_the_own_gradient(client: Client) -> None:
    zero = {n: torch.zeros_like(t) for n, t in shown_by(client).tensors.items()}
    push = {n: torch.full_like(t, 1e6) for n, t in zero.items()}
    alone = train_generator(client, 1, {}).features.state_dict()
    same = train_generator(client, 1, zero).features.state_dict()
    pushed = train_generator(client, 1, push).features.state_dict()
    start = open_generator(client).features.state_dict()
    for name in start:
        torch.testing.assert_close(same[name], alone[name])
        # five Adam steps with a constant gradient add up to five learning rates
        moved = pushed[name] - start[name]
        torch.testing.assert_close(
            moved, torch.full_like(moved, -5e-3), rtol=1e-3, atol=0
        )


def test_alpha_zero_ignores_the_gradient_of_others(toy: NodeDataset) -> None:
    client = sage_client(toy, **{"fedsage+.peer-weight": 0})
    push = {n: torch.ones_like(t) for n, t in shown_by(client).tensors.items()}
    one = train_generator(client, 1, push).features.state_dict()
    other = train_generator(client, 1, {}).features.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_client_without_edges_generates_no_nodes_and_uploads_no_generator(
    lonely: Client,
) -> None:
    network = train_generator(lonely, 1, {})
    assert FedSagePlusClientApp().show(lonely, 1, network).num_bytes == 0
    with torch.no_grad():
        network.counter.weight.zero_()
        network.counter.bias.zero_()
    keep_mended(lonely, network)
    data = mended_data(lonely)
    assert data.inputs[0].topology.num_nodes == 6


def test_a_client_with_one_class_and_one_training_node_trains(
    toy: NodeDataset,
) -> None:
    names = ("left", "right")
    same = NodeDataset(
        toy.name, toy.x, toy.edge_index, 0 * toy.y, Target.classes(names)
    )
    client = client_of(same, has_val=False, method="fedsage+", **SHORT)
    data = client.data
    masks = {**data.graph.graph.masks, "train": torch.arange(6) < 1}
    graph = replace(data.graph.graph, masks=masks)
    training = type(data.training)(
        data.inputs[0], data.training.index[:1], data.training.labels[:1]
    )
    client.data = replace(
        data, graph=replace(data.graph, graph=graph), training=training
    )
    network = train_generator(client, 1, {})
    assert all(bool(w.isfinite().all()) for w in network.parameters())


def mend(client: Client, each: float) -> None:
    network = open_generator(client)
    with torch.no_grad():
        network.counter.weight.zero_()
        network.counter.bias.fill_(each)
    keep_mended(client, network)


def test_generated_nodes_are_in_the_graph_and_are_not_evaluated(client: Client) -> None:
    before = client.data
    mend(client, 2.0)
    data = mended_data(client)
    graph = data.inputs[0]
    assert isinstance(graph, MendedGraph)
    assert graph.topology.num_nodes == 6 + 12
    assert data.training.inputs is graph
    assert data.sizes == before.sizes
    assert data.labels[0].tolist() == [*before.labels[0].tolist(), *[-1] * 12]
    assert int(data.columns[0]["val"].sum()) == 3
    client.data = data
    model = client.build_model(initialise=True)
    assert client.evaluate(model)["val"].num_nodes == 3
    assert client.validate(model) == client.evaluate(model)["val"].accuracy


def test_mended_graphs_are_built_once_for_each_state(client: Client) -> None:
    mend(client, 1.0)
    first = mended_data(client).inputs[0]
    assert mended_data(client).inputs[0] is first
    mend(client, 2.0)
    assert mended_data(client).inputs[0] is not first


def test_the_loss_on_the_mended_graph_differs_from_that_on_the_original(
    toy: NodeDataset,
) -> None:
    client = sage_client(toy, dropout=0.0)
    model = client.build_model(initialise=True).eval()
    data = client.data.training
    plain = F.cross_entropy(data.logits(model, data.index), data.labels)
    mend(client, 1.0)
    data = mended_data(client).training
    mended = F.cross_entropy(data.logits(model, data.index), data.labels)
    assert not torch.allclose(plain, mended)


def test_no_features_are_uploaded_and_the_bytes_match_the_formula(
    small: dict[str, Any],
) -> None:
    run = simulate(
        "fedsage+",
        **{**small, "rounds": 1},
        **{"fedsage+": {"gen_rounds": 3, "gen_channels": 8, "gen_wide_channels": 16}},
    )
    first = run.rounds[0]
    assert (first["round"], first["phase"]) == (0, "generate")
    assert first["failures"] == []
    assert set(first["bytes"]["up"]) == {"generator", "nodes", "gradient"}
    size = 8 * 8 + 8 + 8 * 16 + 16 + 16 * 40 + 40  # p = 8, d = 8, five neighbours
    # three gradients are computed after rounds 1 and 2, and sent in rounds 2 and 3
    for way in ("up", "down"):
        gradients = 6 * 4 * size
        assert gradients <= first["bytes"][way]["gradient"] <= gradients + 6 * 6 * 300
    assert run.rounds[1]["phase"] == "train"


def test_without_generator_rounds_fedsageplus_equals_fedavg(
    small: dict[str, Any],
) -> None:
    plain = simulate("fedavg", **small, model="graphsage")
    same = simulate("fedsage+", **small, **{"fedsage+": {"gen_rounds": 0}})
    assert plain.best == same.best
    assert [row["loss"] for row in plain.rounds] == [row["loss"] for row in same.rounds]


def test_a_single_client_trains_its_generator_without_judges(
    small: dict[str, Any],
) -> None:
    run = simulate(
        "fedsage+",
        **{**small, "clients": 1, "rounds": 1},
        **{"fedsage+": {"gen_rounds": 2, "gen_channels": 8, "gen_wide_channels": 16}},
    )
    assert run.status == "completed"
    assert "gradient" not in run.rounds[0]["bytes"]["up"]


def test_an_empty_gradient_has_no_bytes_and_an_empty_record() -> None:
    assert FeatureGradient({}).num_bytes == 0
    assert len(FeatureGradient({}).to_record()) == 0
