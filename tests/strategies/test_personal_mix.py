"""The server half that averages the models separately for each client."""

from __future__ import annotations

import math

import pytest
import torch

from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.protocols.weights import EmbeddedWeights, MomentWeights
from flower_fgl.strategies import personal_mix
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.personal_mix import FedGTA, FedIIH, FedPub, TopFGL
from tests.support.clients import federation_of

ALONE, FAR = [1.0, 0.0], [0.0, 1.0]


def server(absent: str, kind: type[FedPub] = FedPub) -> FedPub:
    made = kind(parse_config({"method": "fed-pub", "fed-pub.absent": absent}))
    made.federation = federation_of([1, 1, 1])
    made.shapes = {"a": (1,)}
    made.weights, made.personal = Weights({"a": torch.zeros(1)}), {}
    return made


def upload(value: float, embedding: list[float], num_examples: float = 1) -> Upload:
    payload = EmbeddedWeights({"a": torch.tensor([value])}, torch.tensor(embedding))
    return Upload(payload, num_examples)


@pytest.mark.parametrize(("absent", "expected"), [("mean", 8.0), ("last", 0.0)])
def test_an_absent_client_receives_the_mean_or_its_last_mixture(
    absent: str, expected: float
) -> None:
    made = server(absent)
    made.aggregate(1, {0: upload(0.0, ALONE), 1: upload(4.0, FAR)})
    made.aggregate(2, {1: upload(8.0, FAR)})
    found = made.download(3, 0).tensors["a"].item()
    assert found == pytest.approx(expected, abs=1e-3)
    assert made.download(3, 1).tensors["a"].item() == 8.0
    # one that never took part has no mixture
    assert made.download(3, 2).tensors["a"].item() == 8.0


class Warm(FedPub):
    def mixes(self, server_round: int) -> bool:
        return server_round > 1


def test_a_round_that_does_not_mix_gives_all_clients_the_mean() -> None:
    made = server("mean", Warm)
    uploads = {0: upload(0.0, ALONE, 3), 1: upload(4.0, FAR, 1)}
    made.aggregate(1, uploads)
    assert [made.download(2, pid).tensors["a"].item() for pid in (0, 1)] == [1.0, 1.0]
    assert "self_weight" not in made.loop.log.numbers
    made.aggregate(2, uploads)
    assert made.download(3, 0).tensors["a"].item() < 0.1
    assert made.loop.log.numbers["self_weight"] > 0.99


def test_the_round_s_row_holds_the_matrix_of_a_few_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uploads = {2: upload(0.0, ALONE), 5: upload(4.0, FAR)}
    made = server("mean")
    made.aggregate(1, uploads)
    table = made.loop.log.row()["mixture"]
    assert table["clients"] == [2, 5]
    assert table["weights"] == [[1.0, 0.0], [0.0, 1.0]]
    monkeypatch.setattr(personal_mix, "MOST_IN_TABLE", 1)
    other = server("mean")
    other.aggregate(1, uploads)
    assert "mixture" not in other.loop.log.row()


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ((1.0, 3.0, 5.0), [3.0, 3.0, 8.0]),  # (1·0 + 3·4)/4
        ((0.0, 3.0, 5.0), [0.0, 4.0, 8.0]),  # client 0 has no edges: nobody counts it
        ((0.0, 0.0, -1.0), [0.0, 4.0, 8.0]),
    ],
)
def test_partners_of_fedgta_are_weighted_by_their_confidence(
    confidence: tuple[float, ...], expected: list[float]
) -> None:
    made = FedGTA(parse_config({"method": "fedgta", "fedgta.threshold": 0.5}))
    made.federation = federation_of([1] * len(confidence))
    made.shapes = {"a": (1,)}
    made.weights, made.personal = Weights({"a": torch.zeros(1)}), {}
    uploads = {
        pid: Upload(
            MomentWeights(
                {"a": torch.tensor([value])},
                {
                    "moments": torch.tensor(moments),
                    "confidence": torch.tensor([confidence[pid]]),
                },
            ),
            1,
        )
        for pid, value, moments in (
            (2, 8.0, [[0.0, 1.0]]),  # out of order
            (0, 0.0, [[1.0, 0.0]]),
            (1, 4.0, [[2.0, 1.0]]),  # cosine .894 with client 0, .447 with client 2
        )
    }
    made.aggregate(1, uploads)
    found = [made.download(2, pid).tensors["a"].item() for pid in range(3)]
    assert found == pytest.approx(expected)


def test_fediih_mixes_each_factor_by_its_own_similarity() -> None:
    made = FedIIH(parse_config({"method": "fediih", "fediih.scale": 10.0}))
    means = torch.tensor([[[0.0], [0.0]], [[0.0], [1.0]]])  # the second factor differs
    payloads = [DescribedWeights({}, {"mean": mean}) for mean in means]
    similarity = made.similarity(payloads)
    # log-variances are the means: N(0, 1) and N(1, e)
    variance = (1 + math.e) / 2
    halves = [
        0.5 * (math.log(variance / own) + (own + 0.25) / variance - 1)
        for own in (1.0, math.e)
    ]
    alike = 1 - sum(halves) / 2 / math.log(2)
    assert similarity[0].flatten().tolist() == pytest.approx([1.0] * 4)
    assert float(similarity[1, 0, 1]) == pytest.approx(alike, abs=1e-6)
    attention = made.attention(similarity, [Upload(p, 1) for p in payloads])
    assert attention[0].flatten().tolist() == pytest.approx([0.5] * 4)
    own = 1 / (1 + math.exp(10 * (alike - 1)))
    assert float(attention[1, 0, 0]) == pytest.approx(own, abs=1e-5)


def test_clients_without_a_finite_similarity_are_to_blame() -> None:
    made = FedIIH(parse_config({"method": "fediih"}))
    values = {3: 0.5, 4: 750.0, 7: 0.4, 9: -750.0}  # e^750 is not finite, e^-750 is 0
    uploads = {
        pid: Upload(
            DescribedWeights({"w": torch.ones(1)}, {"mean": torch.full((2, 1), x)}), 1
        )
        for pid, x in values.items()
    }
    assert list(made.to_blame(uploads)) == [4, 9]
    # 750 is not over 1000 times the 1.0 of the others
    assert made.to_blame({pid: uploads[pid] for pid in (3, 7)}) == {}


@pytest.mark.parametrize(
    ("warmup", "rounds", "first"),
    [(0.3, 40, 12), (0.3, 5, 2), (0.55, 100, 55), (0.07, 100, 7), (0.0, 10, 0)],
)
def test_topfgl_mixes_from_the_end_of_the_warm_up(
    warmup: float, rounds: int, first: int
) -> None:
    settings = {"method": "topfgl", "topfgl.warmup": warmup, "rounds": rounds}
    made = TopFGL(parse_config(settings))
    assert made.mixes(first)
    assert not made.mixes(first - 1)
