"""What a run predicts: its names, units, and the agreement of data owners."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.targets import (
    CLASSES,
    LABELS,
    NUMBERS,
    Target,
    agree_targets,
    differing_unit,
    headline,
    targets_apart,
)
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.splits.split import parse_split, split_nodes, strata
from flower_fgl.methods import parse_config
from flower_fgl.protocols.describe import Description

NO_EDGES = torch.empty(2, 0, dtype=torch.int64)
NAN = float("nan")
WARNING = (
    "Only data owner two has targets of the names density: it learns them alone. Check how "
    "other owners spell them."
)


def numbers(*names: str, units: tuple[str, ...] = ()) -> Target:
    return Target(NUMBERS, names, units)


def test_the_headline_of_several_numbers_has_no_unit() -> None:
    assert headline("rmse", numbers("a")) == "rmse"
    assert headline("rmse", numbers("a", "b")) == "nrmse"
    assert headline("accuracy", Target.classes("ab")) == "accuracy"


def test_owners_agree_on_the_sorted_union_and_on_the_most_frequent_unit() -> None:
    owners = {
        "one": numbers("logS", units=("log mol/L",)),
        "two": numbers("logS", "density", units=("log mol/L", "")),
        "odd": numbers("logS", units=("mg/L",)),
        "bare": numbers("logS"),
    }
    agreed, odd = agree_targets(owners)
    assert agreed == numbers("density", "logS", units=("", "log mol/L"))
    assert odd == {
        "odd": 'its "logS" is in mg/L, that of the other clients in log mol/L. Convert it, '
        "or leave the unit out if it is only another spelling."
    }
    tied = {n: numbers("a", units=(u,)) for n, u in (("x", "g"), ("y", "mg"))}
    assert [text[:11] for text in agree_targets(tied)[1].values()] == [
        'its "a" is '
    ] * 2
    assert differing_unit(owners["odd"], agreed) == odd["odd"]
    assert not any(differing_unit(owners[o], agreed) for o in ("one", "two", "bare"))
    reason, warnings = targets_apart(owners)
    assert not reason
    assert warnings == [WARNING]
    assert targets_apart({"one": owners["one"], "two": owners["one"]}) == ("", [])
    apart, _ = targets_apart({"one": numbers("a"), "two": numbers("b", "c")})
    assert "No target is known at two data owners (one: a; two: b, c)" in apart


def test_numbers_are_put_in_the_agreed_order_and_are_unknown_where_missing() -> None:
    values = torch.tensor([[1.0, NAN], [NAN, 4.0], [NAN, NAN]], dtype=torch.float64)
    graph = Graph(
        torch.ones(3, 1), NO_EDGES, torch.tensor([0, 0, -1]), {}, targets=values
    )
    own = numbers("b", "a", units=("m", "s"))
    client = ClientGraph(0, graph, own, torch.arange(3), (graph,))
    agreed = client.renumbered(2, ("a", "b", "c"))
    assert agreed.target == numbers("a", "b", "c", units=("s", "m", ""))
    for found in (agreed.graph, *agreed.evaluation):
        assert found.targets is not None
        assert found.targets.nan_to_num(-9).tolist() == [
            [-9, 1, -9],
            [4, -9, -9],
            [-9, -9, -9],
        ]
        assert found.y.tolist() == [0, 0, -1]
    assert agreed.graph.class_counts(3).tolist() == [1, 1, 0]
    with pytest.raises(
        DataError, match="has targets that the federation does not know: b"
    ):
        client.renumbered(0, ("a",))


def test_bins_of_a_number_stand_for_classes() -> None:
    """Check 6 of the specification."""
    y = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], dtype=torch.float64)
    known = torch.zeros(12, dtype=torch.int64)
    assert strata(known, y[:, None]).tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    several = torch.stack([y, y], dim=1)
    assert strata(known, several).tolist() == [0] * 12
    tenth = parse_split("80/10/10")
    assert tenth is not None
    numbers = torch.rand(25, 1, generator=torch.Generator().manual_seed(0))
    drawn = split_nodes(
        strata(torch.zeros(25).long(), numbers, fractions=tenth),
        tenth,
        generator=np.random.default_rng(0),
    )
    assert [int(drawn[name].sum()) for name in ("train", "val", "test")] == [19, 2, 4]
    holes = torch.cat([y, torch.tensor([NAN])])[:, None]
    found = strata(torch.cat([known, torch.tensor([-1])]), holes)
    assert found.tolist() == [*strata(known, y[:, None]).tolist(), -1]


def test_a_description_says_what_is_predicted_only_if_it_is_not_classes() -> None:
    def described(kind, units=()) -> Description:
        return Description(
            0, 2, 5, 4, 1, 1, 1, 3, ("a", "b"), (), "gcn", target_kind=kind,
            target_units=units,
        )  # fmt: skip

    plain = described(CLASSES)
    info = plain.to_record().config_records["info"]
    assert not {"target-kind", "target-units"} & set(info)
    assert described(LABELS).num_bytes == plain.num_bytes + len("labels")
    for one in (plain, described(LABELS), described(NUMBERS, ("m", ""))):
        assert Description.from_record(one.to_record()) == one


def synthetic(**settings: object):
    values = {
        "dataset": "synthetic", "synthetic.nodes": 300, "synthetic.features": 4,
        "target-kind": "numbers", "clients": 3, "partition": "uniform",
        **{key.replace("_", "-"): value for key, value in settings.items()},
    }  # fmt: skip
    return parse_config(values)


def test_the_synthetic_number_is_the_sum_over_the_neighbourhood() -> None:
    (client,), *_ = build_clients(synthetic(clients=1), 1)
    graph = client.graph
    assert client.target == numbers("target")
    assert graph.targets is not None
    weight = np.random.default_rng([42, 1]).standard_normal(4) / 2
    noise = np.random.default_rng([42, 1])
    noise.standard_normal(4)
    wanted = 0.5 * noise.standard_normal(300)
    for node in range(300):
        around = [node, *graph.edge_index[1][graph.edge_index[0] == node].tolist()]
        total = sum(graph.x[j].double().numpy() @ weight for j in around)
        wanted[node] += total / np.sqrt(len(around))
    np.testing.assert_allclose(graph.targets[:, 0].numpy(), wanted, atol=1e-9)


def test_a_partition_by_quantiles_gives_each_client_its_range() -> None:
    clients, *_ = build_clients(synthetic(partition="quantile"), 3)
    ranges = [client.graph.targets.aminmax() for client in clients]  # type: ignore[union-attr]
    assert ranges[0].max <= ranges[1].min
    assert ranges[1].max <= ranges[2].min


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fedproto"}, "fedproto learns classes, and cannot predict numbers"),
        ({"class_weights": "balanced"}, 'class-weights = "balanced" is for classes'),
        ({"setting": "few-shot"}, 'setting = "few-shot" is for classes'),
        ({"partition": "louvain-label"}, 'partition = "louvain-label" reads classes'),
        ({"dataset": "cora"}, 'cora has classes: target-kind = "numbers"'),
        ({"target_kind": "auto", "partition": "quantile"}, "sorts items by the number"),
    ],
)
def test_what_needs_classes_is_refused_for_numbers(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic(**settings)
