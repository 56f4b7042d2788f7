from __future__ import annotations

import math

import pytest
import torch

from flower_fgl.algorithms.fedpub import proxy_graph
from flower_fgl.algorithms.personal_mix import mix_states
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import EmbeddedWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.personal_mix import FedPub, client_attention, cosines
from tests.support.clients import federation_of


def test_the_attention_is_a_softmax_of_cosines_by_hand() -> None:
    # cosines of client 0: 1 with itself, 0 with client 1, −1 with client 2
    embeddings = torch.tensor([[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0]])
    row = client_attention(cosines(embeddings), tau=2.0)[0]
    total = math.exp(2) + 1 + math.exp(-2)
    expected = torch.tensor([math.exp(2) / total, 1 / total, math.exp(-2) / total])
    torch.testing.assert_close(row, expected)


def test_with_tau_0_the_attention_is_the_plain_mean() -> None:
    attention = client_attention(cosines(torch.randn(4, 3)), tau=0.0)
    torch.testing.assert_close(attention, torch.full((4, 4), 0.25))


def test_an_embedding_of_zeros_gives_finite_attention() -> None:
    attention = client_attention(
        cosines(torch.tensor([[0.0, 0.0], [1.0, 0.0]])), tau=10.0
    )
    torch.testing.assert_close(attention[0], torch.tensor([0.5, 0.5]))


def test_a_single_client_keeps_its_weights() -> None:
    state = {"a": torch.randn(2, 3), "b": torch.randn(3)}
    attention = client_attention(cosines(torch.randn(1, 4)), tau=10.0)
    (mixed,) = mix_states([state], attention)
    assert all(torch.equal(mixed[name], state[name]) for name in state)


def test_mixed_states_match_a_slow_loop(generator: torch.Generator) -> None:
    shapes = {"a": (2, 3), "b": (4,), "c": ()}
    states = [
        {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        for _ in range(3)
    ]
    attention = torch.rand(3, 3, generator=generator).softmax(1)
    mixed = mix_states(states, attention)
    for i in range(3):
        for name in shapes:
            expected = sum(attention[i, j] * states[j][name] for j in range(3))
            torch.testing.assert_close(mixed[i][name], expected)


def strategy() -> FedPub:
    made = FedPub(parse_config({"method": "fed-pub"}))
    made.federation = federation_of([1, 1, 1])
    made.shapes = {"a": (1,)}
    made.weights, made.personal = Weights({"a": torch.zeros(1)}), {}
    return made


def upload(value: float, embedding: list[float], num_examples: float) -> Upload:
    payload = EmbeddedWeights({"a": torch.tensor([value])}, torch.tensor(embedding))
    return Upload(payload, num_examples)


def test_unsampled_clients_start_from_the_weighted_average_and_others_from_their_own() -> (
    None
):
    server = strategy()
    server.aggregate(
        1, {0: upload(0.0, [1.0, 0.0], 30), 2: upload(4.0, [0.0, 1.0], 10)}
    )
    near = 1 / (1 + math.exp(-10))
    assert server.download(2, 0).tensors["a"].item() == pytest.approx(4 * (1 - near))
    assert server.download(2, 2).tensors["a"].item() == pytest.approx(4 * near)
    assert server.download(2, 1).tensors["a"].item() == pytest.approx(1.0)
    server.aggregate(2, {1: upload(8.0, [1.0, 0.0], 10)})
    assert server.download(3, 0).tensors["a"].item() == 8.0  # not sampled in round 2


def test_there_is_no_global_model() -> None:
    assert strategy().global_state() is None


def test_the_server_state_is_restored() -> None:
    server, other = strategy(), strategy()
    server.aggregate(
        1, {0: upload(0.0, [1.0, 0.0], 30), 2: upload(4.0, [0.5, 1.0], 10)}
    )
    other.load_server_state(server.server_state())
    for pid in range(3):
        one, two = server.download(2, pid), other.download(2, pid)
        assert torch.equal(one.tensors["a"], two.tensors["a"])


def test_the_bytes_of_an_upload_count_weights_and_embedding() -> None:
    payload = EmbeddedWeights({"a": torch.zeros(3, 4)}, torch.zeros(5))
    assert payload.num_bytes == 4 * (12 + 5)


def test_the_proxy_graph_has_five_unconnected_blocks_of_a_hundred_nodes() -> None:
    x, edges = proxy_graph(0, 7)
    assert x.shape == (500, 7)
    assert abs(float(x.mean())) < 0.1
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    source, target = edges
    assert torch.equal(source // 100, target // 100)
    assert bool((source != target).all())
    pairs = set(map(tuple, edges.T.tolist()))
    assert len(pairs) == edges.shape[1]
    assert all((v, u) in pairs for u, v in pairs)
    # 5 · 100 · 99 / 2 pairs, a tenth of them linked; the standard deviation is 47
    assert edges.shape[1] / 2 == pytest.approx(2475, abs=5 * 47)


def test_the_proxy_graph_is_determined_by_the_seed() -> None:
    first, again, other = proxy_graph(1, 3), proxy_graph(1, 3), proxy_graph(2, 3)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
