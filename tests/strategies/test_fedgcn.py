"""FedGCN's exchange before round 1: exact sums, bytes, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from torch import Tensor

from flower_fgl import Run, simulate
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.fedgcn import (
    SECRET,
    FedGCNClientApp,
    edges_of,
    listed_of,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.session import Opened
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.core.errors import ConfigError, DataError, PayloadError, RunError
from flower_fgl.datasets.build import load_dataset
from flower_fgl.datasets.client_graph import ClientGraph, NodeDataset, OutsideEdges
from flower_fgl.datasets.graph_files.csv_tables import hash_ids
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.graph_files.write import save_client_graph
from flower_fgl.datasets.owned import read_id_key
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.base import Empty
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedgcn import (
    Boundary,
    CompletedSums,
    ListedNodes,
    NeighbourSums,
)
from flower_fgl.protocols.private_ids import (
    Points,
    codes_of,
    hashed_points,
    is_on_curve,
    multiply,
)
from flower_fgl.runs.files import flatten_config
from flower_fgl.strategies.fedgcn import FedGCN, check_boundaries, positions
from tests.support.owners import owner_graphs, run_owners
from tests.support.short_runs import SMALL, comparable, of_file

SECURE = {"secure_aggregation": True}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, Client]:
    """Every client as its last training round saw it."""
    found: dict[int, Client] = {}
    original = FedGCNClientApp.fit

    def fit(app: Any, client: Client, server_round: int, download: Weights) -> Fit:
        found[client.partition_id] = client
        return original(app, client, server_round, download)

    monkeypatch.setattr(FedGCNClientApp, "fit", fit)
    return found


def whole_graph(run: Run) -> GraphInput:
    """Return the graph that the run partitioned."""
    dataset = load_dataset(parse_config(dict(flatten_config(run.config))))
    assert isinstance(dataset, NodeDataset)
    return GraphInput(dataset.x, dataset.edge_index)


@pytest.mark.parametrize("values", [{}, SECURE], ids=["plain", "secure"])
def test_the_clients_logits_are_those_of_the_uncut_graph(
    values: dict[str, Any], small: dict[str, Any], seen: dict[int, Client]
) -> None:
    run = simulate("fedgcn", **{**small, **values, "clients": 4, "rounds": 1})
    whole = whole_graph(run)
    sums = whole.propagate(whole.x, "normalised")
    assert sorted(seen) == [0, 1, 2, 3]
    model = seen[0].build_model(initialise=True).eval()
    expected = model(whole).detach()
    for client in seen.values():
        ids = client.data.graph.node_ids
        graph = client.data.inputs[0]
        torch.testing.assert_close(graph.x[: len(ids)], sums[ids], atol=1e-6, rtol=0)
        logits = model(graph)[: len(ids)].detach()
        torch.testing.assert_close(logits, expected[ids], atol=1e-5, rtol=0)


def test_the_list_of_nodes_is_no_test_for_nodes_that_a_client_did_not_name(
    small: dict[str, Any], seen: dict[int, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate("fedgcn", **{**small, "rounds": 1})
    ids = {pid: edges_of(client).ids for pid, client in seen.items()}
    named = torch.cat([edges_of(seen[1]).outside, ids[1][listed_of(seen[1])]])
    hidden, foreign = (pool[~torch.isin(pool, named)][0] for pool in (ids[1], ids[0]))
    original = Dispatcher.__call__
    answers = []
    for more in (hidden, foreign):

        def call(app: Any, message: Message, context: Context, more: Any = more) -> Any:
            is_victim = context.node_config["partition-id"] == 1
            is_asked = message.metadata.message_type == "query.sums" and is_victim
            if is_asked:
                asked = ListedNodes.from_record(message.content).ids
                asked = torch.cat([asked, more[None]]).unique()
                message.content.update(ListedNodes(asked).to_record())
            reply = original(app, message, context)
            if is_asked:
                answers.append(reply.content["sums"])
            return reply

        monkeypatch.setattr(Dispatcher, "__call__", call)
        with contextlib.suppress(RunError):  # the answer fits another list
            simulate("fedgcn", **{**small, "rounds": 1})
    one, other = (answer["sums"].numpy() for answer in answers)
    assert np.array_equal(one, other)


def test_the_bytes_are_those_of_the_formulas(
    small: dict[str, Any], seen: dict[int, Client]
) -> None:
    runs = [
        simulate("fedgcn", **{**small, **values, "clients": 4, "rounds": 1})
        for values in ({}, SECURE)
    ]
    own = outside = rows = 0
    for client in seen.values():
        edges = client.data.graph.outside
        assert edges is not None
        b, h = len(edges.own.unique()), len(edges.other.unique())
        own, outside, rows = own + b, outside + h, rows + b + h
    listed, width = (
        own,
        SMALL["synthetic"]["features"],
    )  # every node at a border is listed once
    plain, secure = (dict(run.rounds[0]["bytes"]) for run in runs)
    assert [run.rounds[0]["phase"] for run in runs] == ["sums", "sums"]
    up, down = plain["up"], plain["down"]
    # headers and names take at most 300 bytes per array
    least = {
        "boundary": 12 * (own + outside) + own,
        "sums": 4 * rows * (width + 2),
    }
    for name, size in least.items():
        assert size <= up[name] <= size + 4 * 5 * 300, name
    assert 0 <= down["completed"] - 4 * (rows * width + outside) <= 4 * 2 * 300
    assert 0 <= down["listed"] - 4 * 8 * listed <= 4 * 300
    masked = 4 * 8 * (listed * width + listed + 1)
    assert 0 <= secure["up"]["secure-sum"] - masked <= 4 * 300


def test_without_hops_it_is_fedavg(small: dict[str, Any]) -> None:
    plain = simulate("fedavg", **small, weight_by="equal")
    without = simulate("fedgcn", **small, fedgcn={"hops": 0})
    assert comparable(without) == comparable(plain)
    with_sums = simulate("fedgcn", **small)
    assert comparable(with_sums) != comparable(plain)


def test_masked_sums_give_the_same_scores(small: dict[str, Any]) -> None:
    plain, secure = (simulate("fedgcn", **small, **values) for values in ({}, SECURE))
    assert plain.best["test"]["accuracy"] == secure.best["test"]["accuracy"]
    last = (run.rounds[-1]["loss"] for run in (plain, secure))
    assert next(last) == pytest.approx(next(last), abs=1e-5)


@pytest.mark.parametrize("values", [{}, SECURE], ids=["plain", "secure"])
def test_a_run_without_one_client_ends_before_round_1(
    values: dict[str, Any], small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Dispatcher.__call__

    def call(app: Any, message: Any, context: Any) -> Any:
        kind, pid = message.metadata.message_type, context.node_config["partition-id"]
        if kind == "query.sums" and pid == 1:
            raise PayloadError("no power")
        return original(app, message, context)

    monkeypatch.setattr(Dispatcher, "__call__", call)
    with pytest.raises(RunError, match=r"before round 1, but the clients .*no power"):
        simulate("fedgcn", **{**small, **values, "clients": 4})


@pytest.mark.parametrize(
    "values",
    [{}, {**SECURE, "upload_noise_model": "distributed"}],
    ids=["local", "distributed"],
)
def test_noise_protects_the_sums_too(
    values: dict[str, Any], small: dict[str, Any], seen: dict[int, Client]
) -> None:
    noisy = {"upload_clip": 1.0, "upload_noise": 0.1, **values}
    run = simulate("fedgcn", **{**small, **noisy, "rounds": 1})
    whole = whole_graph(run)
    exact = whole.propagate(whole.x, "normalised")
    client = seen[0]
    edges = client.data.graph.outside
    assert edges is not None
    at_border = edges.own.unique()
    found = client.data.inputs[0].x[at_border]
    true = exact[client.data.graph.node_ids[at_border]]
    assert float((found - true).abs().max()) > 0.01
    assert bool(client.data.inputs[0].x.isfinite().all())
    # the sums count as one upload besides that of the round
    assert run.summary["upload_privacy"]["uploads"] == 2


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"setting": "inductive"}, 'needs setting = "transductive"'),
        ({"feature_norm": "columns"}, "scales differently"),
        ({"model": "graphsage"}, 'model = "gcn" only'),
        ({"clients": 10, "min_clients": 3}, "needs all clients before round 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    values: dict[str, Any], text: str, small: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate("fedgcn", **{**small, **values})


# ------------------------------------------------------------------------- the server
def border(*edges: tuple[int, int], left_out: int = -1) -> Boundary:
    """Return the border of a client with edges (own node, outside node)."""
    own, own_edges = torch.tensor([a for a, _ in edges]).unique(return_counts=True)
    outside, others = torch.tensor([b for _, b in edges]).unique(return_counts=True)
    listed = (own != left_out).to(torch.uint8)
    return Boundary(own, listed, outside, own_edges.int(), others.int())


def test_the_list_holds_every_node_at_a_border_once() -> None:
    borders = {0: border((1, 7), (4, 9), left_out=4), 3: border((7, 1), (9, 4))}
    assert check_boundaries(borders).tolist() == [1, 7, 9]
    assert positions(torch.tensor([4, 7, 9]), torch.tensor([1, 7, 9])).tolist() == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("borders", "text"),
    [
        (
            {0: border((1, 7)), 1: border((1, 7), (7, 1))},
            r"1 nodes have two owners .*0, 1",
        ),
        (
            {0: border((1, 7), (1, 8)), 1: border((7, 1))},
            r"clients \[0\] have edges to 1 ",
        ),
        (
            {0: border((1, 7)), 1: border((7, 1), (9, 1))},
            r"1 nodes of the clients \[1\]",
        ),
        (
            # client 1 omits the edge between 1 and 8, whose ends have other edges
            {
                0: border((1, 7), (1, 8), (4, 8)),
                1: border((7, 1), (8, 4)),
                2: border((20, 30)),
                3: border((30, 20)),
            },
            r"2 nodes have edges among the clients \[0, 1\] that only one",
        ),
    ],
)
def test_edges_that_only_one_owner_lists_are_refused(
    borders: dict[int, Boundary], text: str
) -> None:
    with pytest.raises(RunError, match=text):
        check_boundaries(borders)


def rebuilt(payload: Any, spec: Any, **changes: Tensor) -> Any:
    changed = replace(payload, **changes)
    return type(payload).from_record(changed.to_record(), spec)


def test_malformed_payloads_are_refused() -> None:
    good = border((1, 7), (4, 7))
    assert torch.equal(rebuilt(good, 2).own, good.own)
    part = NeighbourSums(
        torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, 3), torch.ones(2), 4
    )
    assert torch.equal(rebuilt(part, (4, 3)).sums, part.sums)
    complete = CompletedSums(torch.ones(3, 2), torch.ones(1))
    assert torch.equal(
        rebuilt(complete, {"n": 3, "d": 2, "h": 1}).degrees, torch.ones(1)
    )
    wrong: list[Callable[[], Any]] = [
        lambda: rebuilt(good, 1),
        lambda: rebuilt(good, 2, own=torch.tensor([4, 1])),
        lambda: rebuilt(good, 2, outside=torch.tensor([7, 7])),
        lambda: rebuilt(good, 2, is_listed=torch.tensor([1, 2], dtype=torch.uint8)),
        lambda: rebuilt(good, 2, own_edges=torch.ones(1, dtype=torch.int32)),
        lambda: rebuilt(good, 2, outside_edges=torch.zeros(1, dtype=torch.int32)),
        lambda: rebuilt(part, (2, 3)),
        lambda: rebuilt(part, (4, 2)),
        lambda: rebuilt(part, (4, 3), rows=torch.tensor([-1, 2], dtype=torch.int32)),
        lambda: rebuilt(part, (4, 3), degrees=torch.ones(3)),
        lambda: rebuilt(part, (4, 3), sums=torch.full((2, 3), torch.nan)),
        lambda: rebuilt(complete, {"n": 2, "d": 2, "h": 1}),
        lambda: rebuilt(complete, {"n": 3, "d": 2, "h": 0}),
    ]
    for make in wrong:
        with pytest.raises(PayloadError):
            make()


# ---------------------------------------------------------------- data owners' files
def write_csv(folder: Path, client: ClientGraph, outside: OutsideEdges) -> None:
    """Write a client as the tables of a data owner."""
    folder.mkdir(parents=True)
    names = [f"node {i}" for i in outside.ids.tolist()]
    masks = client.graph.masks
    tables: dict[str, list[list[Any]]] = {
        "nodes": [["id", "label", "split", *map(str, range(client.num_features))]],
        "edges": [["source", "target"]],
        "outside": [["source", "target"]],
    }
    for i, name in enumerate(names):
        label = int(client.graph.y[i])
        split = next((n for n, mask in masks.items() if mask[i]), "")
        text = client.class_names[label] if label >= 0 else ""
        tables["nodes"].append([name, text, split, *client.graph.x[i].tolist()])
    for i, j in client.graph.edge_index.T.tolist():
        tables["edges"].append([names[i], names[j]])
    for i, other in zip(outside.own.tolist(), outside.other.tolist(), strict=True):
        tables["outside"].append([names[i], f"node {other}"])
    for name, rows in tables.items():
        with open(folder / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows(rows)


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    """One CSV folder for each of three data owners, with edges between them."""
    folders = []
    for name, client in zip("abc", owner_graphs(method="fedgcn"), strict=True):
        assert client.outside is not None
        write_csv(tmp_path / "files" / name, client, client.outside)
        folders.append(tmp_path / "files" / name)
    return folders


def run_files(folders: list[Path], place: Path, **values: Any) -> Run:
    nodes = [{"graph": str(folder)} for folder in folders]
    return run_owners(nodes, place, method="fedgcn", **values)


def test_the_sums_before_round_1_are_opened_over_one_set_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the list of nodes differs without the first owner, but not a client's own part
    nodes = []
    for number, client in enumerate(owner_graphs(4, method="fedgcn")):
        write_csv(folder := tmp_path / f"owner{number}", client, client.outside)
        nodes.append({"graph": str(folder), "state-dir": str(tmp_path / "states")})
    settings: dict[str, Any] = {"method": "fedgcn", "rounds": 1, **SECURE}
    assert run_owners(nodes, tmp_path / "a", **settings).status == "completed"

    def all_listed(borders: dict[int, Boundary]) -> Tensor:
        """Accept edges to the missing owner, as an honest server would not."""
        return torch.unique(torch.cat([border.own for border in borders.values()]))

    monkeypatch.setattr("flower_fgl.strategies.fedgcn.check_boundaries", all_listed)
    with pytest.raises(Exception, match="answered an equal download under another"):
        run_owners(nodes[1:], tmp_path / "b", seed=1, **settings)


def test_owners_files_give_the_run_of_the_partition(
    tables: list[Path], tmp_path: Path, seen: dict[int, Client]
) -> None:
    run = run_files(tables, tmp_path / "csv")
    assert run.status == "completed"
    assert_sums_are_exact(run, seen, tables)


def assert_sums_are_exact(
    run: Run, seen: dict[int, Client], tables: list[Path]
) -> None:
    """Compare the owners' completed graphs with the uncut one."""
    found = {pid: client.data.inputs[0] for pid, client in seen.items()}
    dataset = whole_graph(run)
    exact = dataset.propagate(dataset.x, "normalised")
    for folder, graph in zip(tables, found.values(), strict=True):
        names = load_graph_file(folder).names
        ids = torch.tensor([int(name.split()[1]) for name in names])
        torch.testing.assert_close(
            graph.x[: len(ids)], exact[ids], atol=1e-5, rtol=1e-5
        )


def test_identifiers_can_be_guessed_only_with_the_owners_key(
    tables: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: dict[int, Client],
) -> None:
    borders: list[Boundary] = []

    def check(found: Mapping[int, Boundary]) -> Tensor:
        borders.extend(found.values())
        return check_boundaries(found)

    monkeypatch.setattr("flower_fgl.strategies.fedgcn.check_boundaries", check)
    (key := tmp_path / "id.key").write_text("5" * 64)
    (other := tmp_path / "other.key").write_text("6" * 64)
    guesses = torch.from_numpy(hash_ids([f"node {i}" for i in range(300)]))
    own_codes: dict[str, list[Tensor]] = {}
    cases = (
        ("plain", "guessable", ""),
        ("keyed", "guessable", str(key)),
        ("private", "private", ""),
        ("again", "private", ""),
        ("both", "private", str(key)),
    )
    losses = []
    for name, ids, file in cases:
        borders.clear()
        files = [file] * 3
        nodes = [
            {"graph": str(folder)} | ({"id-key": file} if file else {})
            for folder, file in zip(tables, files, strict=True)
        ]
        run = run_owners(nodes, tmp_path / name, method="fedgcn", fedgcn={"ids": ids})
        losses.append([row["loss"] for row in run.rounds[1:]])
        own_codes[name] = [border.own for border in borders]
        assert_sums_are_exact(run, seen, tables)
        sent = torch.cat([ids for b in borders for ids in (b.own, b.outside)])
        is_guessed = torch.isin(sent, guesses)
        assert is_guessed.all() if name == "plain" else not is_guessed.any()
    # secrets are drawn in each run, and no number of the run depends on them
    first, again = (torch.cat(own_codes[name]) for name in ("private", "again"))
    assert not torch.isin(first, again).any()
    assert losses[0] == losses[2] == losses[3]
    assert losses[1] == losses[4]
    nodes[0]["id-key"] = str(other)
    with pytest.raises(RunError, match="all owners need the same key file"):
        run_owners(nodes, tmp_path / "differ", method="fedgcn")


def ladder(scalar: bytes, point: bytes) -> bytes:
    """Multiply on Curve25519 as RFC 7748, section 5, writes it, with Python's integers."""
    p = 2**255 - 19
    k = int.from_bytes(scalar, "little") & (2**254 - 8) | 2**254
    x1 = int.from_bytes(point, "little") % 2**255 % p
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in reversed(range(255)):
        if k >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % p, b * b % p, d * a % p, c * b % p
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % p, x1 * (da - cb) ** 2 % p
        x2, z2 = aa * bb % p, e * (aa + 121665 * e) % p
        if k >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def test_codes_are_equal_whatever_owner_multiplies_first() -> None:
    ids = torch.tensor([0, 5, 2**63 - 1, 77])
    secrets = [bytes([k]) * 32 for k in (1, 2, 3)]
    points = hashed_points(ids)
    assert points.shape == (4, 32)
    slow = [row.numpy().tobytes() for row in points]
    forward = backward = points
    for secret in secrets:
        forward = multiply(forward, secret)
        slow = [ladder(secret, point) for point in slow]
    for secret in reversed(secrets):
        backward = multiply(backward, secret)
    assert torch.equal(codes_of(forward), codes_of(backward))
    assert [row.numpy().tobytes() for row in forward] == slow
    assert len(codes_of(forward).unique()) == 4
    assert bool((codes_of(forward) >= 0).all())
    assert multiply(points[:0], secrets[0]).shape == (0, 32)
    assert codes_of(points[:0]).shape == (0,)
    with pytest.raises(PayloadError, match="is zero"):
        multiply(torch.zeros(1, 32, dtype=torch.uint8), secrets[0])


def test_products_tell_no_bit_of_an_identifier() -> None:
    # x25519's base point 9 is on the curve, 2 is on its twist
    assert is_on_curve((9).to_bytes(32, "little"))
    assert not is_on_curve((2).to_bytes(32, "little"))
    points = hashed_points(torch.arange(40))
    assert len(points.unique(dim=0)) == 40
    for row in (*points, *multiply(points, bytes([7]) * 32)):
        assert is_on_curve(row.numpy().tobytes())


def test_an_owner_multiplies_once_for_each_other_owner_and_forgets_its_secret(
    tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[ClientState] = []
    original = FedGCNClientApp.keep

    def keep(app: Any, opened: Opened, **kwargs: Any) -> None:
        states.append(opened.client.state.compact())
        original(app, opened, **kwargs)

    monkeypatch.setattr(FedGCNClientApp, "keep", keep)
    run_files(tables, tmp_path / "one")
    with_secret = [state for state in states if state.has_group(SECRET)]
    assert len(with_secret) == 3 * (1 + 2)  # drawn, and two others' points
    assert not any(state.without_secrets().has_group(SECRET) for state in with_secret)

    def greedy(self: FedGCN) -> None:
        clients = list(self.federation.clients)
        self.messenger.ask(0, "blind_ids", dict.fromkeys(clients, Empty()))
        for number in range(3):
            guesses = dict.fromkeys(clients, Points(hashed_points(torch.arange(3))))
            found = self.messenger.ask(number, "multiply_ids", guesses)
            assert len(found) == (3 if number < 2 else 0)
        raise RunError("seen")

    monkeypatch.setattr(FedGCN, "exchange_codes", greedy)
    with pytest.raises(RunError, match="seen"):
        run_files(tables, tmp_path / "greedy")


def test_an_id_key_must_be_long_enough(tmp_path: Path) -> None:
    (key := tmp_path / "id.key").write_text("short")
    with pytest.raises(DataError, match="holds 5 bytes, expected 32 to 4,096"):
        read_id_key(str(key))
    with pytest.raises(DataError, match="Cannot read id-key"):
        read_id_key(str(tmp_path / "absent"))


def test_natural_owners_give_the_same_run(tables: list[Path], tmp_path: Path) -> None:
    files = run_files(tables, tmp_path / "csv")
    owners = simulate(
        "fedgcn",
        **{**of_file(SMALL), "owners": str(tables[0].parent)},
        output_dir=str(tmp_path),
    )
    losses = [[row["loss"] for row in run.rounds[1:]] for run in (files, owners)]
    assert losses[0] == losses[1]


def test_a_file_without_edges_to_other_owners_is_refused(
    tables: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tables[1] / "outside.csv").unlink()
    with pytest.raises(RunError):
        run_files(tables, tmp_path / "run", min_replies=3)
    assert "Add outside.csv with the columns source" in caplog.text


def test_an_edge_that_one_file_lacks_is_refused(
    tables: list[Path], tmp_path: Path
) -> None:
    path = tables[0] / "outside.csv"
    head, *edges = path.read_text().splitlines()
    ends = [Counter(edge.split(",")[i] for edge in edges) for i in (0, 1)]
    lost = next(
        edge for edge in edges if all(ends[i][edge.split(",")[i]] > 1 for i in (0, 1))
    )
    path.write_text("\n".join([head, *(edge for edge in edges if edge != lost)]))
    with pytest.raises(RunError, match=r"2 nodes have edges .* only one of the two"):
        run_files(tables, tmp_path / "run")


def test_no_label_travels(
    tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[tuple[Any, str, str], bytes] = {}
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        reply = original(app, message, context)
        owner = context.node_config["graph"]
        for record in {"boundary", "sums"} & set(reply.content.array_records):
            for name, array in reply.content.array_records[record].items():
                sent[owner, record, name] = array.data
        return reply

    monkeypatch.setattr(Dispatcher, "__call__", call)
    # codes are drawn anew in each run
    guessable = {"fedgcn": {"ids": "guessable"}}
    run_files(tables, tmp_path / "one", **guessable)
    before = dict(sent)
    for folder in tables:
        with open(folder / "nodes.csv", newline="") as file:
            head, *rows = csv.reader(file)
        known = sorted({row[1] for row in rows})
        turned = dict(zip(known, known[1:] + known[:1], strict=True))
        with open(folder / "nodes.csv", "w", newline="") as file:
            csv.writer(file).writerows(
                [head, *([row[0], turned[row[1]], *row[2:]] for row in rows)]
            )
    sent.clear()
    run_files(tables, tmp_path / "other", **guessable)
    assert len(before) == 3 * (5 + 3)
    assert sent == before


def test_an_edge_to_a_node_of_nobody_is_refused(
    tables: list[Path], tmp_path: Path
) -> None:
    own = load_graph_file(tables[1]).names[0]
    with open(tables[1] / "outside.csv", "a") as file:
        file.write(f"{own},node of nobody\n")
    with pytest.raises(
        RunError, match=r"clients \[1\] have edges to 1 nodes .* no client"
    ):
        run_files(tables, tmp_path / "run")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nobody,there", 'line 2: source "nobody" is not an id in nodes.csv'),
        ("a,b", 'line 2: target "b" must be the id of a node of another'),
        ("a,", 'line 2: target "" must be'),
    ],
)
def test_a_wrong_line_of_outside_csv_is_named(
    line: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "nodes.csv").write_text("id,label,x\na,0,1\nb,1,2\n")
    (tmp_path / "edges.csv").write_text("source,target\na,b\n")
    (tmp_path / "outside.csv").write_text(f"source,target\n{line}\n")
    with pytest.raises(DataError, match=text):
        load_graph_file(tmp_path)


def test_an_npz_file_needs_ids_for_edges_to_other_owners(tmp_path: Path) -> None:
    client = owner_graphs(method="fedgcn")[0]
    assert client.outside is not None
    path = tmp_path / "ash.npz"
    save_client_graph(path, client)
    read = load_graph_file(path).outside
    assert read is not None
    expected = torch.stack([client.outside.own, client.outside.other])
    assert torch.equal(torch.stack([read.own, read.other]), expected)
    arrays = dict(np.load(path, allow_pickle=False))

    def refused(text: str, **changes: Any) -> None:
        given = {**arrays, **changes}
        given = {name: array for name, array in given.items() if array is not None}
        np.savez(path, **given)
        with pytest.raises(DataError, match=text):
            load_graph_file(path)

    refused("outside_edges needs node_ids", node_ids=None)
    refused("must be \\(M, 2\\)", outside_edges=np.arange(3))
    refused("first column holds row numbers", outside_edges=np.array([[500, 9]]))
    own = int(arrays["node_ids"][3])
    refused("is a node of this file", outside_edges=np.array([[0, own]]))
    twice = np.zeros(len(arrays["node_ids"]), dtype=np.int64)
    refused("different id for each", outside_ids=twice)
