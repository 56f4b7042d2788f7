from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl import simulate, to_npz
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.core.targets import Target
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import ClientGraph, GraphDataset, NodeDataset
from flower_fgl.datasets.partition.assign import (
    cluster_by_labels,
    count_classes,
    deal_edges,
    deal_evenly_by_class,
    deal_relations,
    dirichlet_parts,
    follow_neighbours,
    group_nodes,
    share_out,
)
from flower_fgl.datasets.partition.partition import partition_nodes
from flower_fgl.methods import parse_config
from tests.datasets.partition.summary import describe_partition
from tests.support.typed_graphs import hetero, typed_bank

CORA = [351, 217, 418, 818, 426, 298, 180]  # nodes of each class


@pytest.fixture(scope="module")
def cora_labels():
    labels = np.repeat(np.arange(len(CORA)), CORA)
    return np.random.default_rng(0).permutation(labels)


def effective_classes(counts):
    share = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.exp(-(share * logs).sum(axis=1))


def dirichlet_by_the_letter(labels, num_clients, alpha, generator):
    """One try, class by class with Python lists: an independent, slow version."""
    clients = [[] for _ in range(num_clients)]
    for c in range(labels.max() + 1):
        ids = generator.permutation([i for i, y in enumerate(labels) if y == c])
        pi = generator.dirichlet([alpha] * num_clients)
        for i, client in enumerate(clients):
            if len(client) >= len(labels) / num_clients:
                pi[i] = 0
        pi = pi / pi.sum()
        begin = 0
        for i, client in enumerate(clients):
            end = int(np.floor(pi[: i + 1].sum() * len(ids)))
            end = len(ids) if i == num_clients - 1 else end
            client.extend(ids[begin:end])
            begin = end
    return [sorted(client) for client in clients]


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("seed", [0, 42])
def test_the_dirichlet_rule_agrees_with_a_slow_reference_implementation(
    cora_labels, alpha, seed
):
    parts = dirichlet_parts(cora_labels, 5, alpha=alpha, seed=seed)
    for attempt in range(100):
        generator = numpy_generator(seed, 0, SERVER, f"partition/dirichlet/{attempt}")
        expected = dirichlet_by_the_letter(cora_labels, 5, alpha, generator)
        if min(map(len, expected)) >= 5:
            break
    assert [part.tolist() for part in parts] == expected


def test_dirichlet_clients_hold_at_least_five_members_at_any_skew():
    labels = np.repeat([0, 1, 2], 40)
    smallest = [
        min(map(len, dirichlet_parts(labels, 6, alpha=0.1, seed=seed)))
        for seed in range(20)
    ]
    assert min(smallest) >= 5


def test_large_alpha_gives_every_client_the_global_label_shares(cora_labels):
    parts = dirichlet_parts(cora_labels, 5, alpha=1000, seed=42)
    counts = count_classes(parts, cora_labels, 7)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert np.abs(shares - np.array(CORA) / sum(CORA)).max() < 0.05


def test_small_alpha_skews_labels_clearly_more_than_large_alpha(cora_labels):
    def skew(alpha):
        parts = dirichlet_parts(cora_labels, 5, alpha=alpha, seed=42)
        return effective_classes(count_classes(parts, cora_labels, 7)).mean()

    assert skew(0.1) < 0.75 * skew(0.9)


def test_members_of_unknown_class_are_assigned_last_as_one_more_class():
    labels = np.random.default_rng(1).permutation(np.repeat([-1, 0, 1], 30))
    unknown_as_two = np.where(labels < 0, 2, labels)
    parts = dirichlet_parts(labels, 3, alpha=1, seed=0)
    expected = dirichlet_parts(unknown_as_two, 3, alpha=1, seed=0)
    assert [p.tolist() for p in parts] == [p.tolist() for p in expected]
    assert sorted(np.concatenate(parts)) == list(range(90))


def test_shares_too_small_for_a_float_still_cover_everything():
    labels = np.repeat(np.arange(20), 10)
    parts = dirichlet_parts(labels, 4, alpha=1e-12, seed=0)
    assert sorted(np.concatenate(parts)) == list(range(200))


def test_the_dirichlet_error_gives_the_maximum_number_of_clients():
    with pytest.raises(
        DataError, match=r"4 clients need 20, but the dataset has 19.*at most 3"
    ):
        dirichlet_parts(np.zeros(19, np.int64), 4, alpha=1, seed=0)


def test_dirichlet_fails_after_a_hundred_attempts_with_advice():
    with pytest.raises(
        DataError, match=r"alpha = 0\.01 .* in 100 attempts. Use a larger"
    ):
        dirichlet_parts(np.zeros(60, np.int64), 6, alpha=0.01, seed=0)


@pytest.mark.parametrize("num_clients", [1, 3, 7, 10])
def test_even_assignment_by_class_keeps_class_counts_and_sizes_within_one(num_clients):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [63, 125, 8]))
    parts = deal_evenly_by_class(labels, num_clients, seed=42)
    counts = count_classes(parts, labels, 4)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp([len(part) for part in parts]) <= 1
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


def test_even_assignment_shuffles_and_depends_on_the_seed():
    first, second = (
        deal_evenly_by_class(np.zeros(100, int), 4, seed=seed) for seed in (0, 1)
    )
    assert [len(part) for part in first] == [25, 25, 25, 25]
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(np.ptp(np.diff(part)) > 0 for part in first)  # not every fourth node


def test_classes_are_counted_per_part_without_unknown_ones():
    labels = np.array([0, 2, -1, 2, 0, 0])
    parts = [np.array([0, 1, 3]), np.array([], dtype=np.int64), np.array([2, 4, 5])]
    counts = count_classes(parts, labels, 3)
    assert counts.tolist() == [[1, 0, 2], [0, 0, 0], [2, 0, 0]]


def test_communities_with_similar_labels_are_assigned_to_one_client():
    owner = np.repeat(np.arange(9), 10)
    labels = np.repeat(np.arange(9) % 3, 10)
    labels[::10] = (labels[::10] + 1) % 3  # shares (0.9, 0.1, 0) and its rotations
    parts = cluster_by_labels(group_nodes(owner, 9), labels, 3, 3, seed=0)
    kinds = sorted(np.unique(owner[part]).tolist() for part in parts)
    assert kinds == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_too_few_distinct_communities_are_an_error_with_both_numbers():
    communities = group_nodes(np.repeat(np.arange(4), 2), 4)
    labels = np.repeat([0, 0, 1, 1], 2)
    with pytest.raises(
        DataError, match=r"3 clients need 3.*4 communities with 2 different"
    ):
        cluster_by_labels(communities, labels, 2, 3, seed=0)


def test_an_empty_cluster_is_repeated_with_the_next_seed(monkeypatch):
    from flower_fgl.datasets.partition import assign

    seeds = []

    def clusters(points, num_clusters, *, seed):
        seeds.append(seed)
        return np.array([0, 0, 0]) if len(seeds) < 3 else np.array([0, 1, 0])

    monkeypatch.setattr(assign, "_kmeans", clusters)
    communities = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    parts = cluster_by_labels(communities, np.array([0, 0, 1, 1, 0, 1]), 2, 2, seed=42)
    assert seeds == [42, 43, 44]
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3]]


def test_permanently_empty_clusters_are_an_error(monkeypatch):
    from flower_fgl.datasets.partition import assign

    monkeypatch.setattr(
        assign, "_kmeans", lambda points, num_clusters, *, seed: np.zeros(2, int)
    )
    with pytest.raises(DataError, match="for 100 seeds from 42 on"):
        cluster_by_labels(
            [np.array([0]), np.array([1])], np.array([0, 1]), 2, 2, seed=42
        )


RULES = ("random-edges", "random-edge-types")

RUN: dict[str, Any] = {"rounds": 1, "hidden_channels": 4, "clients": 3}


def shared(number: int, clients: int = 3, seed: int = 0) -> list[list[int]]:
    """Return the items of each client if they are not shuffled."""
    generator = np.random.default_rng(seed)
    parts = share_out(np.arange(number), clients, generator=generator)
    return [part.tolist() for part in parts]


def test_pieces_are_those_of_the_protocol() -> None:
    # E = 12, K = 3: s = 2; [6, 7] go to m = 2 clients each, [8 … 11] to all
    parts = shared(12)
    assert [part[:2] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part[-4:] == [8, 9, 10, 11] for part in parts)
    assert [sum(item in part for part in parts) for item in (6, 7)] == [2, 2]
    assert {len(part) for part in parts} <= {6, 7, 8}
    parts = shared(10)  # s = 2, no remainder
    assert all(part[-2:] == [8, 9] for part in parts)
    assert shared(4) == [[0, 3], [1, 3], [2, 3]]  # R = K + 1


@given(st.integers(3, 8), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_each_item_is_held_as_often_as_the_protocol_says(
    clients: int, more: int, seed: int
) -> None:
    number = clients + 1 + more
    size = number // (clients + 2)
    held = np.bincount(np.concatenate(shared(number, clients, seed)))
    counts = [clients * size, size, number - (clients + 1) * size]
    own, some, every = np.split(held, np.cumsum(counts)[:-1])
    assert (own == 1).all()
    assert ((some >= 2) & (some < clients)).all()
    assert (every == clients).all()


def test_whole_relations_stay_together() -> None:
    relations = np.random.default_rng(0).integers(0, 9, 200)
    parts = deal_relations(relations, 3, seed=5)
    for part in parts:
        held = np.unique(relations[part])
        assert len(part) == np.isin(relations, held).sum()
    assert len(np.unique(np.concatenate(parts))) == 200
    again = deal_relations(relations, 3, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = deal_relations(relations, 3, seed=6)
    assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_too_few_edges_or_relations_are_an_error() -> None:
    with pytest.raises(DataError, match=r"at least 5 edges for 3 clients, but .* 4"):
        deal_edges(4, 3, seed=0)
    with pytest.raises(DataError, match=r"more relations than the 3 clients, but .* 3"):
        deal_relations(np.array([0, 1, 2, 2]), 3, seed=0)


def built(path: Path, **values: Any) -> list[ClientGraph]:
    """Return the clients of a typed graph file."""
    given = {"dataset": str(path), "clients": 3, "partition": "random-edges"} | values
    if "types" not in given:
        given["model"] = "rgcn"
    return build_clients(parse_config(given), 3)[0]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a graph with a relation to three kinds of nodes."""
    return to_npz(hetero(typed_bank(0)), tmp_path_factory.mktemp("bank") / "bank.npz")


def test_a_client_holds_its_edges_and_their_ends(bank: Path) -> None:
    clients = built(bank)
    whole = typed_bank(0)
    assert whole.messages is not None
    listed = set(map(tuple, whole.messages.index.T.tolist()))
    for client in clients:
        messages = client.graph.messages
        assert messages is not None
        assert messages.relation is not None
        ends = client.node_ids[messages.index]
        assert set(map(tuple, ends.T.tolist())) <= listed
        assert torch.equal(torch.unique(ends), client.node_ids)
        kinds = client.graph.node_type
        assert kinds is not None
        # relation 0 is from cards (1) to shops (0), 1 from persons (2) to cards
        of = torch.tensor([[1, 2], [0, 1]])[:, messages.relation]
        assert torch.equal(kinds[messages.index], of)
        assert client.graph.edge_index.shape[1] == 2 * messages.index.shape[1]


@pytest.mark.parametrize("split", ["60/20/20", "public"])
def test_a_node_of_several_clients_has_one_role(bank: Path, split: str) -> None:
    clients = built(bank, split=split)
    role: dict[int, str] = {}
    for client in clients:
        for name in ("train", "val", "test"):
            for node in client.node_ids[client.graph.masks[name]].tolist():
                assert role.setdefault(node, name) == name
    assert set(role.values()) == {"train", "val", "test"}
    assert sum(len(client.node_ids) for client in clients) > len(role)


def test_a_fifth_of_the_published_training_nodes_becomes_validation(
    tmp_path: Path,
) -> None:
    data = hetero(typed_bank(0))
    data["card"].val_mask[:] = False
    clients = built(to_npz(data, tmp_path / "a.npz"), split="public")
    found = {name: set[int]() for name in ("train", "val")}
    for client in clients:
        for name, nodes in found.items():
            nodes |= set(client.node_ids[client.graph.masks[name]].tolist())
    assert not found["train"] & found["val"]
    assert len(found["val"]) == 5  # of 24 training nodes
    assert len(found["train"]) == 19


def test_without_types_the_clients_are_the_same(tmp_path: Path) -> None:
    data = hetero(typed_bank(0)).to_homogeneous()
    data.y = typed_bank(0).y
    path = to_npz(data, tmp_path / "a.npz")
    for one, other in zip(built(path), built(path, types="ignore"), strict=True):
        assert torch.equal(one.node_ids, other.node_ids)
        assert torch.equal(one.graph.edge_index, other.graph.edge_index)
        assert other.schema is None


def test_nodes_follow_most_of_their_neighbours_breadth_first() -> None:
    draw = np.random.default_rng(0)
    ends = draw.integers(0, 60, (2, 90))
    edge_index = np.concatenate([ends, ends[::-1]], axis=1)
    owner = np.full(60, -1)
    owner[:12] = draw.integers(0, 4, 12)
    expected = owner.copy()
    while True:
        found = {}
        for node in np.flatnonzero(expected < 0):
            near = edge_index[1, edge_index[0] == node]
            votes = np.bincount(expected[near[expected[near] >= 0]], minlength=4)
            if votes.any():
                found[node] = int(votes.argmax())  # the first on a tie
        if not found:
            break
        expected[list(found)] = list(found.values())
    found_all = follow_neighbours(edge_index, owner, 4)
    assert found_all.tolist() == expected.tolist()
    assert (found_all < 0).any()
    assert (owner[12:] == -1).all()


def test_dirichlet_assigns_the_kind_to_predict_and_others_follow() -> None:
    bank = typed_bank(0)
    assert bank.node_type is not None
    cards = (bank.node_type == 1).numpy()
    parts = partition_nodes(bank, "dirichlet", 3, seed=1)
    of_cards = dirichlet_parts(bank.y[cards].numpy(), 3, alpha=0.5, seed=1)
    for part, own in zip(parts, of_cards, strict=True):
        assert part[cards[part]].tolist() == np.flatnonzero(cards)[own].tolist()
    has_edge = np.unique(bank.edge_index)
    assert sorted(np.concatenate(parts).tolist()) == has_edge.tolist()


@pytest.mark.parametrize("align", ["same", "name"])
@pytest.mark.parametrize("rule", ["random-edges", "metis", "louvain", "dirichlet"])
def test_rules_give_typed_clients_that_train(
    rule: str, align: str, bank: Path, tmp_path: Path
) -> None:
    values = {"model": "rgcn", "partition": rule, "split": "60/20/20"}
    run = simulate(
        "fedavg",
        str(bank),
        schema_align=align,
        output_dir=str(tmp_path),
        **values,
        **RUN,
    )
    assert (run.best or {})["test"]["num_nodes"] > 3


def test_a_client_with_too_few_target_nodes_is_an_error(bank: Path) -> None:
    with pytest.raises(
        DataError, match=r'"uniform" .* [0-4] target nodes \(of the kind'
    ):
        build_clients(
            parse_config(
                {"dataset": str(bank), "partition": "uniform", "model": "rgcn"}
            ),
            10,
        )


@pytest.mark.parametrize("rule", RULES)
def test_rules_for_edges_refuse_what_they_cannot_share(rule: str, bank: Path) -> None:
    values = RUN | {"partition": rule}
    with pytest.raises(ConfigError, match="has one kind of nodes and edges"):
        simulate("fedavg", **values)
    few = values | {"clients": 2, "model": "rgcn"}
    with pytest.raises(ConfigError, match="at least 3 clients, got 2"):
        simulate("fedavg", str(bank), **few)
    with pytest.raises(ConfigError, match='setting = "transductive" or "inductive"'):
        simulate("fedavg", str(bank), setting="link", **values)
    with pytest.raises(ConfigError, match="edge-sparsity"):
        simulate("fedavg", str(bank), edge_sparsity=0.5, **values)


def test_methods_with_edges_between_clients_are_refused(bank: Path) -> None:
    with pytest.raises(ConfigError, match="fedgcn sends what passes along edges"):
        built(bank, method="fedgcn", types="ignore")


def test_the_summary_of_two_triangles_agrees_with_a_count_by_hand(toy):
    summary = describe_partition(toy, [np.array([0, 1, 2, 3]), np.array([4, 5])])
    assert summary.sizes.tolist() == [4, 2]
    assert summary.class_counts.tolist() == [[3, 1], [0, 2]]
    # five of seven edges stay; 3-4 and 3-5 join two clients
    assert summary.share_edges_kept == pytest.approx(5 / 7)
    assert summary.num_classes_present.tolist() == [2, 1]
    assert summary.num_classes_present.mean() == 1.5
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    np.testing.assert_allclose(summary.exp_label_entropy, [math.exp(entropy), 1.0])
    assert summary.exp_label_entropy.mean() == pytest.approx(
        (math.exp(entropy) + 1) / 2
    )


def test_nodes_of_unknown_class_count_for_size_only(toy):
    hidden = NodeDataset(
        toy.name,
        toy.x,
        toy.edge_index,
        torch.tensor([-1, -1, -1, 1, 0, 1]),
        toy.target,
    )
    summary = describe_partition(hidden, [np.array([0, 1, 2]), np.array([3, 4, 5])])
    assert summary.sizes.tolist() == [3, 3]
    assert summary.class_counts.tolist() == [[0, 0], [1, 2]]
    assert summary.exp_label_entropy[0] == 0


def test_edges_of_unassigned_nodes_are_not_kept(toy):
    summary = describe_partition(toy, [np.array([0, 1])])
    assert summary.share_edges_kept == pytest.approx(1 / 7)


def test_a_graph_without_edges_keeps_all_edges(toy):
    bare = NodeDataset(toy.name, toy.x, toy.edge_index[:, :0], toy.y, toy.target)
    summary = describe_partition(bare, [np.arange(3), np.arange(3, 6)])
    assert summary.share_edges_kept == 1


def test_partitioned_graphs_keep_all_their_edges():
    dataset = GraphDataset(
        name="pairs",
        x=torch.zeros(6, 0),
        edge_index=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]]),
        batch=torch.tensor([0, 0, 1, 1, 2, 2]),
        y=torch.tensor([0, 1, 1]),
        target=Target.classes("ab"),
    )
    summary = describe_partition(dataset, [np.array([0, 2]), np.array([1])])
    assert summary.share_edges_kept == 1
    assert summary.class_counts.tolist() == [[1, 1], [0, 1]]
