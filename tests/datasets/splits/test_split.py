from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

from flower_fgl import simulate, to_npz
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import ClientGraph, EdgeTable, Graph
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.splits.edges import edge_client
from flower_fgl.datasets.splits.split import (
    edge_keys,
    keyed_split,
    keyed_uniform,
    parse_split,
    published_split,
    split_nodes,
)
from flower_fgl.methods import parse_config
from tests.support.graph_sets import write_tables


def rng(seed=0):
    return np.random.default_rng(seed)


def counts(mask, labels, num_classes):
    return torch.bincount(labels[mask], minlength=num_classes).tolist()


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("20/40/40", (20, 40, 40)),
        ("10/5/85", (10, 5, 85)),
        ("90/10", (90, 0, 10)),
        (" 80 / 10 / 10 ", (80, 10, 10)),
    ],
)
def test_a_split_is_read_as_exact_shares(text, percent):
    assert parse_split(text) == tuple(Fraction(share, 100) for share in percent)


def test_percentages_may_have_decimals():
    assert parse_split("0.5/33.5/66") == (
        Fraction(1, 200),
        Fraction(67, 200),
        Fraction(66, 100),
    )


def test_the_published_split_has_a_name():
    assert parse_split("public") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid. Give percentages"),
        ("default", "is not valid"),
        ("20", "is not valid"),
        ("20/40/20/20", "is not valid"),
        ("20/-40/120", "is not valid"),
        ("20/forty/40", "is not valid"),
        ("1e1/50/40", "is not valid"),
        ("20/40/30", "adds up to 90, expected 100"),
        ("0.2/0.4/0.4", "adds up to 1, expected 100"),
        ("0/50/50", "has no training or no test nodes"),
        ("60/40/0", "has no training or no test nodes"),
    ],
)
def test_a_malformed_split_is_refused_with_an_example(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_split(text)
    assert f'"{text}"' in str(caught.value)
    assert '"20/40/40"' in str(caught.value)


@pytest.mark.parametrize(
    ("fractions", "size", "expected"),
    [
        ("20/40/40", 5, (1, 2, 2)),
        ("20/40/40", 4, (0, 1, 3)),
        ("20/40/40", 2, (0, 0, 2)),
        ("29/57/14", 100, (29, 57, 14)),  # int(0.29 * 100) is 28
        ("33.33333/33.33333/33.33334", 9, (3, 3, 3)),
        ("12.34567/40/47.65433", 50, (6, 20, 24)),
        ("90/0/10", 10, (9, 0, 1)),
        ("80/10/10", 19, (15, 1, 3)),
    ],
)
def test_sizes_are_rounded_down_exactly_and_the_rest_is_for_testing(
    fractions, size, expected
):
    shares = parse_split(fractions)
    masks = split_nodes(torch.zeros(size, dtype=torch.int64), shares, generator=rng())
    assert tuple(int(mask.sum()) for mask in masks.values()) == expected


@given(
    labels=st.lists(st.integers(-1, 4), max_size=120),
    train=st.integers(0, 100),
    val=st.integers(0, 100),
    seed=st.integers(0, 9),
)
def test_masks_are_disjoint_cover_known_nodes_and_have_rounded_sizes(
    labels, train, val, seed
):
    val = min(val, 100 - train)
    shares = [Fraction(share) / 100 for share in (train, val, 100 - train - val)]
    y = torch.tensor(labels, dtype=torch.int64)
    masks = split_nodes(y, shares, generator=rng(seed))
    assert list(masks) == ["train", "val", "test"]
    assert all(m.dtype == torch.bool and m.shape == y.shape for m in masks.values())
    assert torch.equal(sum(mask.int() for mask in masks.values()), (y >= 0).int())
    sizes = counts(y >= 0, y, 5)
    assert counts(masks["train"], y, 5) == [n * train // 100 for n in sizes]
    assert counts(masks["val"], y, 5) == [n * val // 100 for n in sizes]


def test_the_split_depends_only_on_the_generator():
    y = torch.arange(100) % 4
    shares = parse_split("20/40/40")
    first, again, other = (
        split_nodes(y, shares, generator=rng(seed))["train"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    chosen = sum(
        split_nodes(y, shares, generator=rng(seed))["train"].int()
        for seed in range(400)
    )
    # binomial(400, 1/5): mean 80, standard deviation 8
    assert 40 < int(chosen.min()) < int(chosen.max()) < 120


def test_labels_may_be_a_numpy_array_of_graph_labels():
    labels = np.repeat([0, 1], [63, 125])
    masks = split_nodes(labels, parse_split("80/10/10"), generator=rng())
    # 50 + 100 train, 6 + 12 validate, 7 + 13 test
    assert [int(mask.sum()) for mask in masks.values()] == [150, 18, 20]


def test_a_published_split_is_restricted_to_the_nodes_of_the_client():
    masks = {
        "train": torch.tensor([True, False, True, False, False]),
        "val": torch.tensor([False, True, False, False, False]),
        "test": torch.tensor([False, False, False, True, False]),
        "extra": torch.ones(5, dtype=torch.bool),
    }
    own = published_split(masks, np.array([1, 2, 4]))
    assert {name: mask.tolist() for name, mask in own.items()} == {
        "train": [False, True, False],
        "val": [True, False, False],
        "test": [False, False, False],
    }


def test_a_dataset_without_a_published_split_is_an_error_with_the_missing_masks():
    masks = {"train": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(DataError, match="without a val or test mask"):
        published_split(masks, torch.tensor([0]))


SHARES = (Fraction(8, 10), Fraction(1, 10), Fraction(1, 10))


@pytest.mark.parametrize(
    ("seed", "key", "expected"),
    [  # computed by hmac and hashlib alone
        (42, "g2", 0.075072),
        (42, "g1", 0.151506),
        (42, "g6", 0.013311),
        (42, "g7", 0.146220),
        (42, "g0", 0.915970),
        (42, "LFQSCWFLJHTTHZ", 0.403595),
        (7, "g8", 0.027755),
        (7, "g1", 0.139940),
        (7, "QTBSBXVTEAMEQO", 0.038451),
    ],
)
def test_the_number_of_an_identifier(seed: int, key: str, expected: float) -> None:
    assert round(keyed_uniform(key, seed), 6) == expected


def test_identifiers_are_stripped_and_composed_and_keep_their_case() -> None:
    assert keyed_uniform(" g1 ", 42) == keyed_uniform("g1", 42)
    assert keyed_uniform("e\u0301", 42) == keyed_uniform("\u00e9", 42)
    assert keyed_uniform("G1", 42) != keyed_uniform("g1", 42)


def test_small_numbers_are_test_items_then_validation_items() -> None:
    keys = ["g2", "g1", "g6", "g7", "g0", "g2"]
    known = torch.tensor([True, True, True, True, True, False])
    masks = keyed_split(keys, known, SHARES, seed=42)
    assert masks["test"].tolist() == [True, False, True, False, False, False]
    assert masks["val"].tolist() == [False, True, False, True, False, False]
    assert masks["train"].tolist() == [False] * 4 + [True, False]


def test_the_share_of_validation_moves_no_test_item() -> None:
    keys = [f"g{k}" for k in range(10_000)]
    known = torch.ones(10_000, dtype=torch.bool)
    masks = keyed_split(keys, known, SHARES, seed=42)
    assert (int(masks["test"].sum()), int(masks["val"].sum())) == (979, 991)
    half = (Fraction(4, 10), Fraction(5, 10), Fraction(1, 10))
    other = keyed_split(keys, known, half, seed=42)
    assert torch.equal(masks["test"], other["test"])
    assert int(other["val"].sum()) > 4000
    total = sum(mask.int() for mask in masks.values())
    assert torch.equal(torch.as_tensor(total), torch.ones(10_000, dtype=torch.int32))


def test_an_edge_has_the_same_key_in_both_directions() -> None:
    pairs = torch.tensor([[0, 1, 2], [1, 0, 2]])
    assert edge_keys(pairs, ["b", "a", "c"]) == ["a\u001fb", "a\u001fb", "c\u001fc"]


def test_edges_with_times_are_split_by_them() -> None:
    pairs, y = torch.tensor([[0] * 12, [1] * 12]), torch.tensor([0, 1, 0] * 4)
    target, none = Target.classes(("x", "y")), torch.zeros(12, 0)
    graph = Graph(
        torch.zeros(2, 1), pairs[:, :0], torch.zeros(2, dtype=torch.int64), {}
    )
    table = EdgeTable(pairs, y, target, none, time=torch.arange(12.0))
    client = ClientGraph(0, graph, target, torch.arange(2), edges=table)
    with pytest.raises(DataError, match="have times"):
        edge_client(client, parse_config({"setting": "edge", "split-by": "id"}))


@pytest.mark.parametrize("setting", ["transductive", "edge", "link"])
def test_an_item_of_a_dataset_is_in_one_part_whatever_the_partition(
    setting: str,
) -> None:
    parts = {}
    for rule in ("metis", "uniform"):
        values = {"synthetic.nodes": 300, "partition": rule, "split-by": "id"}
        clients, _, _ = build_clients(parse_config({**values, "setting": setting}), 3)
        for client in clients:
            graph, ids = client.graph, client.node_ids
            ends = ids[graph.pairs] if graph.pairs is not None else ids[None]
            for name, mask in graph.masks.items():
                is_item = mask & (graph.y > 0) if setting == "link" else mask
                for item in ends[:, is_item].T.tolist():
                    item = tuple(sorted(item))
                    assert parts.setdefault(item, name) == name
    assert set(parts.values()) == {"train", "val", "test"}
    assert len(parts) >= 300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split-by": "id", "split": "public"}, "Remove one of the two"),
        ({"split-by": "id", "setting": "few-shot"}, "it needs setting ="),
        ({"split-by": "id", "setting": "edge", "time-cuts": "1,2"}, "both split the edges"),
        ({"split-by": "skeleton"}, "needs setting = graph"),
        ({"split-by": "skeleton", "setting": "graph", "dataset": "mutag"}, "needs SMILES"),
    ],
)  # fmt: skip
def test_a_split_by_identifiers_needs_some(
    values: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


def test_a_key_is_text_of_any_script() -> None:
    numbers = [keyed_uniform(key, 0) for key in ("水", "", "a" * 10_000)]
    assert np.unique(numbers).size == 3
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("setting", ["transductive", "edge", "link"])
def test_owners_with_the_same_ids_split_them_alike(
    setting: str, tmp_path: Path
) -> None:
    parts: dict[tuple[str, ...], str] = {}
    for number in range(2):  # the second owner lists the nodes backwards
        names = [f"account {k}" for k in range(40)][:: 1 - 2 * number]
        rows = [f"{name},{'xy'[len(name) % 2]},1" for name in names]
        pairs = [(a, b) for k, a in enumerate(names) for b in names[k + 1 : k + 4]]
        edges = [f"{a},{b},{'xy'[len(a) % 2]}" for a, b in pairs]
        folder = write_tables(
            tmp_path / str(number),
            nodes="\n".join(["id,label,mass", *rows]),
            edges="\n".join(["source,target,label", *edges]),
            classes="name\nx\ny",
            edge_classes="name\nx\ny",
        )
        config = parse_config({"setting": setting, "split-by": "id"})
        graph = client_from_file(folder, config).graph
        for name, mask in graph.masks.items():
            for place in (mask & (graph.y >= (setting == "link"))).nonzero().flatten():
                ends = (
                    [place] if graph.pairs is None else graph.pairs[:, place].tolist()
                )
                item = tuple(sorted(names[int(end)] for end in ends))
                assert parts.setdefault(item, name) == name
    assert set(parts.values()) == {"train", "val", "test"}


@pytest.mark.parametrize("setting", ["transductive", "edge", "link"])
def test_a_file_without_ids_is_not_split_by_them(setting: str, tmp_path: Path) -> None:
    pairs = torch.stack([torch.arange(30), (torch.arange(30) + 1) % 30])
    y = torch.arange(30) % 2
    data = Data(x=torch.eye(30), edge_index=pairs, y=y, edge_label=y)
    path = to_npz(data, tmp_path / "a.npz")
    values = {"setting": setting, "split-by": "id"}
    message = "needs an identifier of each node.* a has none. Add node_ids"
    with pytest.raises(DataError, match=message):
        client_from_file(path, parse_config(values))
    with pytest.raises(DataError, match="identifier of each node"):
        simulate("fedavg", [data, data], setting=setting, split_by="id")
    (problem,) = inspect_graph(path, values).problems
    assert "identifier of each node" in problem
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **arrays, node_ids=np.arange(30) * 7)
    masks = client_from_file(path, parse_config(values)).graph.masks
    assert any(mask.any() for mask in masks.values())
    if setting == "transductive":
        keys = [str(7 * number) for number in range(30)]
        due = keyed_split(keys, y >= 0, parse_split("20/40/40"), seed=42)
        assert all(torch.equal(masks[name], due[name]) for name in due)
