"""FedLIT's client half: which types it trains, and what it uploads of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.fedlit import CENTROIDS, CHANNEL, FedLITNet
from flower_fgl.client_apps.fedlit import FedLITClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import TypedWeights
from flower_fgl.testing.case import comparable
from tests.client_apps.test_fedpg import WIDTH, make_client


def fit(
    client: Client, server_round: int = 1, download: Weights | None = None
) -> tuple[Weights, TypedWeights, FedLITNet]:
    """Train a client; return its download, its upload and its model."""
    app = FedLITClientApp()
    start = download or Weights(state_of(app.build(client)))
    result = app.fit(client, server_round, start)
    assert isinstance(result.upload, TypedWeights)
    assert isinstance(result.model, FedLITNet)
    return start, result.upload, result.model


def test_all_types_train_and_their_sizes_are_counted() -> None:
    client = make_client("fedlit")
    start, upload, model = fit(client)
    same = [n for n, t in upload.tensors.items() if torch.equal(t, start.tensors[n])]
    assert same == []
    edges, marks = upload.sizes.unbind(1)
    assert int(edges.sum()) == client.data.graph.num_edges
    assert bool((edges > 0).all())
    assert marks.tolist() == [1] * 4
    assert torch.equal(upload.tensors[CENTROIDS], model.centroids)


def test_a_round_starts_from_the_received_centroids() -> None:
    client = make_client("fedlit")
    start, first, _ = fit(client)
    received = {**first.tensors, CENTROIDS: torch.eye(4, 2 * WIDTH)}
    app = FedLITClientApp()
    model = app.build(client)
    model.load_state_dict(received)
    model.train()(client.data.training.inputs)  # one E and M step
    _, second, trained = fit(client, 2, Weights(received))
    torch.testing.assert_close(trained.centroids, model.centroids)
    assert not torch.equal(second.tensors[CENTROIDS], first.tensors[CENTROIDS])
    # another client's seed gives other first clusters, but the same later ones
    twin = make_client("fedlit")
    twin.partition_id = 1
    other = fit(twin, 1, start)[1]
    assert not torch.equal(other.tensors[CENTROIDS], first.tensors[CENTROIDS])
    again = fit(twin, 2, Weights(received))[1]
    assert torch.equal(again.tensors[CENTROIDS], second.tensors[CENTROIDS])


def test_small_types_are_withheld() -> None:
    plain = fit(make_client("fedlit"))[1]
    edges = plain.sizes[:, 0]
    least = int(edges.min()) + 1
    assert least <= int(edges.max())
    client = make_client("fedlit")
    object.__setattr__(client.config, "min_class_count", least)
    start, upload, model = fit(client)
    for m, number in enumerate(edges.tolist()):
        names = [n for n in upload.tensors if n.startswith(f"{CHANNEL}{m}.")]
        if number >= least:
            assert torch.equal(
                upload.tensors[CENTROIDS][m], plain.tensors[CENTROIDS][m]
            )
            assert all(torch.equal(upload.tensors[n], plain.tensors[n]) for n in names)
            assert torch.equal(upload.sizes[m], plain.sizes[m])
        else:
            assert not upload.tensors[CENTROIDS][m].any()
            assert all(torch.equal(upload.tensors[n], start.tensors[n]) for n in names)
            assert upload.sizes[m].tolist() == [0, 0]
    # the client itself continues with all of its types
    assert bool(model.centroids.any(dim=1).all())


def test_an_empty_type_keeps_its_centroid_and_uploads_zeros() -> None:
    client = make_client("fedlit")
    start = state_of(FedLITClientApp().build(client))
    h = FedLITClientApp().build(client).first_map(client.data.training.inputs)
    far = -torch.cat([h, h], dim=1).mean(dim=0).detach()
    near = -far + torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(1))
    centroids = torch.cat([near, far[None]])
    _, upload, model = fit(client, 2, Weights({**start, CENTROIDS: centroids}))
    edges = upload.sizes[:, 0].tolist()
    assert edges[3] == 0 < min(sum(edges), edges[0] + edges[1] + edges[2])
    assert torch.equal(model.centroids[3], far)
    assert not upload.tensors[CENTROIDS][3].any()
    assert all(t.isfinite().all() for t in upload.tensors.values())


def test_a_type_without_training_nodes_is_not_marked() -> None:
    # two pairs of nodes far apart: only the first pair has training nodes
    ends = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    client = make_client("fedlit", edge_index=ends, train=[0, 1], types=2)
    upload = fit(client)[1]
    assert sorted(upload.sizes.tolist()) == [[1, 0], [1, 1]]


def test_a_client_without_edges_trains_the_bias_of_the_head() -> None:
    ends = torch.zeros(2, 0, dtype=torch.int64)
    client = make_client("fedlit", edge_index=ends)
    start, upload, model = fit(client)
    changed = [
        n for n, t in upload.tensors.items() if not torch.equal(t, start.tensors[n])
    ]
    assert "classifier.bias" in changed
    assert not any(n.startswith(CHANNEL) or n == CENTROIDS for n in changed)
    assert upload.sizes.tolist() == [[0, 0]] * 4
    logits: Tensor = model.eval()(client.data.training.inputs)
    assert torch.equal(logits, logits[:1].expand_as(logits))


@pytest.mark.parametrize("edge", ["ordered", "symmetric"])
def test_a_run_with_few_clients_a_round_and_its_global_model(
    edge: str, tmp_path: Path
) -> None:
    run = simulate(
        "fedlit", clients=4, rounds=5, participation=0.5, evaluate="both",
        hidden_channels=16, output_dir=str(tmp_path),
        fedlit={"edge": edge, "types": 3, "em_steps": 2, "finetune_epochs": 2},
    )  # fmt: skip
    assert run.status == "completed"
    assert not any(row["failures"] for row in run.rounds)
    found = [row["metrics"]["global"]["test"]["accuracy"] for row in run.rounds[:5]]
    assert max(found) > 0.35  # chance is a fifth
    assert run.rounds[0]["numbers"]["types"] <= 3


def test_other_types_give_another_run(tmp_path: Path) -> None:
    settings = {"clients": 2, "rounds": 2, "output_dir": str(tmp_path)}
    runs = [simulate("fedlit", **settings, fedlit={"types": m}) for m in (1, 2)]
    assert comparable(runs[0]) != comparable(runs[1])
