"""Stacked training equals training one by one, for every method that can be stacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

from flower_fgl import METHODS, resume, simulate
from flower_fgl.client_apps import fedavg, fedpg
from flower_fgl.client_apps.dispatch import FEWEST_STACKED, Dispatcher
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import ClientState, MemoryStates
from flower_fgl.client_apps.stacked import grouping
from flower_fgl.client_apps.stacked.cohort import Cohort
from flower_fgl.client_apps.stacked.handling import (
    Stacker,
    finite_clients,
    is_stackable,
)
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.datasets.transforms import canonical
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import read_tensors, record_bytes
from flower_fgl.runs.state_files import hashed_groups
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import refuse_unstackable, run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.strategies.rounds.discovery import discover
from flower_fgl.strategies.rounds.messenger import send_receive
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.short_runs import SHORT, SMALL, comparable, of_file, shortened
from tests.support.typed_graphs import typed_bank, typed_owners

LONGER = {**SMALL, "rounds": 9}

STACKED = [
    "adafgl",
    "adpfedgnn",
    "clustered-sampling",
    "fed-pub",
    "fedala",
    "fedavg",
    "feded",
    "fedgcn",
    "fedgen",
    "fedgta",
    "fedhgn",
    "fediih",
    "fedlog",
    "fedntd",
    "fedpano",
    "fedper",
    "fedpg",
    "fedprox",
    "fedproto",
    "fedrep",
    "fedsem",
    "fedtad",
    "fedtgp",
    "fggp",
    "fgssl",
    "local",
    "moon",
    "topfgl",
]
ONE_SHOT = ["co-boosting", "dense", "opfgl"]
"""Methods of one round; the clients of the first two train as FedAvg's."""
FEW_LABELS = {
    "split": "2/40/58",
    "synthetic": {**SMALL["synthetic"], "nodes": 600, "degree": 1.5},
}
CLIENTS = 5
TOLERANCE = 1e-5
TOLERANCES = {"scorer/weight": 1e-4}
"""The gradient of FedPG's attention is tiny: Adam divides its rounding errors by it."""
WIDER = {"fedpg": {"hidden_channels": 32}}
"""With 8 channels dropout leaves rows without any number: the scores of such neighbours
are rounding errors, whose sign selects the slope of LeakyReLU."""


@dataclass
class Stage:
    """A method after the describe exchange, with its clients in this process."""

    strategy: FglStrategy
    grid: LocalGrid
    session: Session

    def replies(self, server_round: int) -> dict[int, Message]:
        """Run the training exchange of a round, and aggregate it."""
        self.strategy.loop.log = RoundLog(server_round)
        sent = self.strategy.train_messages(
            server_round, self.strategy.sample(server_round)
        )
        messages = self.strategy.messenger.by_receiver(sent)
        exchange = send_receive(self.grid, messages, timeout=60)
        assert exchange.failures == []
        self.strategy.aggregate_train(server_round, exchange.replies.values())
        return exchange.replies

    def states(self) -> dict[int, Any]:
        """Return the clients' states by partition-id."""
        assert self.session.memory is not None
        return {pid: state for (_, pid), state in self.session.memory._states.items()}


@contextmanager
def stage(method: str, stacked: str, settings: dict[str, Any]) -> Iterator[Stage]:
    values = {**shortened(method, {**LONGER, **settings}), "stacked": stacked}
    dataset = values.pop("dataset", "synthetic")
    values = run_config_of(
        method=method,
        dataset=dataset,
        clients=CLIENTS,
        seed=0,
        settings=values if dataset == "synthetic" else of_file(values),
    )
    config = parse_config(values)
    session = Session(memory=MemoryStates())
    with task_identity(5):
        grid = LocalGrid(Dispatcher(session), CLIENTS, values, run_id=5)
        strategy = METHODS[method].load_strategy()(config)
        strategy.messenger.grid = grid
        strategy.federation = discover(grid, config)
        strategy.prepare()
        yield Stage(strategy, grid, session)


def assert_close(found: RecordDict, expected: RecordDict) -> None:
    """Compare two replies: names, bytes, arrays and metrics."""
    assert list(found) == list(expected)
    assert record_bytes(found) == record_bytes(expected)
    for name in expected.array_records:
        one, other = (
            read_tensors(content, name, is_checked=False)
            for content in (found, expected)
        )
        assert list(one) == list(other)
        for entry, tensor in other.items():
            torch.testing.assert_close(
                one[entry], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=entry
            )
    for name, metrics in expected.metric_records.items():
        assert found.metric_records[name].keys() == metrics.keys()
        for key, value in metrics.items():
            if not key.startswith("seconds/"):
                assert found.metric_records[name][key] == pytest.approx(
                    value, abs=TOLERANCE, nan_ok=True
                ), key


def compare(method: str, settings: dict[str, Any], rounds: int = 3) -> None:
    is_adam = settings.get("optimizer") != "sgd"
    with (
        stage(method, "true", settings) as stacked,
        stage(method, "false", settings) as alone,
    ):
        for server_round in range(1, rounds + 1):
            found, expected = (s.replies(server_round) for s in (stacked, alone))
            assert found.keys() == expected.keys()
            for pid, reply in expected.items():
                assert_close(found[pid].content, reply.content)
            one, other = stacked.states(), alone.states()
            assert one.keys() == other.keys()
            for pid, state in other.items():
                values, own = one[pid].values, state.values
                hashes = dict.fromkeys(hashed_groups(own), "of rounded numbers")
                assert values | hashes == pytest.approx(own | hashes, abs=TOLERANCE)
                assert one[pid].tensors.keys() == state.tensors.keys()
                for name, tensor in state.tensors.items():
                    allowed = TOLERANCES.get(name, TOLERANCE) if is_adam else TOLERANCE
                    torch.testing.assert_close(
                        one[pid].tensors[name], tensor, atol=allowed, rtol=TOLERANCE,
                        msg=lambda text, name=name: f"{name}: {text}",
                    )  # fmt: skip


def test_the_list_of_methods_that_can_be_stacked() -> None:
    session = Session(memory=MemoryStates())
    able = [
        name
        for name, row in METHODS.items()
        if is_stackable(row.load_client_app()(session))
    ]
    assert able == sorted([*STACKED, *ONE_SHOT])


@pytest.mark.thorough
@pytest.mark.parametrize("method", STACKED)
def test_three_rounds_equal_those_one_by_one(method: str) -> None:
    compare(method, WIDER.get(method, {}))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_sparse_features_equal_one_by_one(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # their weights are column-major, and so are gradients and moments
    monkeypatch.setattr(canonical, "SPARSE_BELOW", 1.1)
    synthetic = {**SMALL["synthetic"], "features": 70}
    compare("fedper", {"synthetic": synthetic, "optimizer": optimizer})


@pytest.mark.parametrize(
    "settings",
    [
        {"fedpg": {"neighbor_limit": 2}},  # most nodes have more neighbours
        {"fedpg": {"neighbor_limit": 2, "neighbor_filter": "any", "hops": 3}},
        {"fedpg": {"attention": False, "hop_mode": "within"}},
        {"fedpg": {"proto_loss": "node-mse", "neighbor_limit": 2}},
        {"fedpg": {"init": "own", "proto_reduction": "sum", "pseudo_conf_min": 0.4}},
        {"fedpg": {"annotation": "train", "hops": 0, "mu_warmup": 3}},
        {"participation": 0.6, "fedpg": {"neighbor_limit": 3}},
        {"min_class_count": 3, "partition": "louvain"},
        {"model": "gcn", "optimizer": "sgd", "fedpg": {"mu": 3.0}, "lr": 0.3},
    ],
    ids=str,
)
def test_fedpg_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fedpg", {**WIDER["fedpg"], **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": "graphsage", "batch_size": 7, "fedgen": {"generated": 5}},
        {"model": "mlp", "partition": "louvain", "split": "60/20/20"},
    ],
    ids=str,
)
def test_fedgen_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fedgen", settings)


@pytest.fixture(params=[False, True], ids=["dense", "sparse"])
def dense_or_sparse(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the features of all clients dense, or sparse."""
    if request.param:
        monkeypatch.setattr(canonical, "SPARSE_BELOW", 1.1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"partition": "louvain", "num_layers": 2, "fediih": {"factors": 3}},
        {"batch_size": 7, "optimizer": "sgd", "split": "60/20/20"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("dense_or_sparse")
def test_fediih_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fediih", settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"topfgl": {"augmentations": 3}},  # edges are added in round 2
        {"topfgl": {"warmup": 0.0}, "model": "graphsage", "partition": "louvain"},
        {"participation": 0.6, "optimizer": "sgd", "dropout": 0.0},
        {**FEW_LABELS, "topfgl": {"augmentations": 0}},
    ],
    ids=str,
)
def test_topfgl_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("topfgl", settings, rounds=4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fedgta": {"moments": "raw", "propagation": "add"}, "partition": "louvain"},
        {"model": "gcn", "fedgta": {"moments": "central"}, "batch_size": 7},
    ],
    ids=str,
)
def test_fedgta_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fedgta", settings)


FEDPANO = {"participants": 0, "split": "20/40/40"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fedpano": {"use_client_classifier": False, "m": 1}},
        {"fedpano": {"use_shared_classifier": False, "noise_on": "agg"}},
        {"fedpano": {"use_generator": False, "classifier_steps": 2}},
        {"fedpano": {"use_generator": False}, "local_epochs": 1},
        {"fedpano": {"aggregate_generator": False}},
        {"fedpano": {"augment": "gaussian", "rep_norm": "l2"}},
        {"fedpano": {"rep_norm": "none"}, "optimizer": "adam", "lr": 0.01,
         "optimizer_state": "reset"},
        {"partition": "louvain", "split": "60/20/20", "weight_decay": 0.01},
        {"model": "gcn", "num_layers": 3},
    ],
    ids=str,
)  # fmt: skip
def test_fedpano_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fedpano", {**FEDPANO, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_state": "keep", "local_epochs": 2},
        {"batch_size": 7, "split": "60/20/20"},
        {"fedlog": {"lg_mode": "sequential", "norm": "sum", "loss_mix": "mixture"}},
        {"fedlog": {"pg": False, "synthetic_mode": "TT", "alpha_fixed": 0.5}},
        {"fedlog": {"gamma_threshold": 0.1, "gamma_step": 0.2, "second_silu": False}},
        {"fedlog": {"msg_input": "neighbor", "lg": False}, "model": "gcn"},
        {"participation": 0.6, "min_class_count": 3, "partition": "louvain"},
    ],
    ids=str,
)
def test_fedlog_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fedlog", settings)


def test_clients_of_a_stack_keep_the_same_prompt_generators_once() -> None:
    with stage("fedlog", "true", {}) as stacked:
        for server_round in (1, 2):
            stacked.replies(server_round)
        states = stacked.states()
        kept = {pid: state.tensors["prompts/0.weight"] for pid, state in states.items()}
        # client k belongs to stack k modulo 2
        assert len({kept[pid].data_ptr() for pid in (0, 2, 4)}) == 1
        states[1].tensors["prompts/0.weight"] = kept[1] + 1
        assert not states[3].share_group("prompts", states[1])
        assert not states[3].share_group("prompts", ClientState())
        stacked.strategy.loop.log = RoundLog(3)
        sent = stacked.strategy.train_messages(3, [1, 3])
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
        reasons = [failure.reason for failure in exchange.failures]
        assert len(reasons) == 2
        assert "different prompt generators" in reasons[0]


ADPFEDGNN = {"participation": 1.0, "hidden_channels": 16}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # most nodes have more neighbours; a bound clamped at 0 or not ranks rounding errors
        {"adpfedgnn": {"k": 2, "eval_fanout": 3, "mi": False}},
        {"adpfedgnn": {"rl": False, "k": 2}, "optimizer": "sgd"},
        {"adpfedgnn": {"decouple": False, "selection": "random-drop"}},
        {"adpfedgnn": {"decouple": False, "rl": False}, "optimizer": "sgd"},
        {"adpfedgnn": {"mi": False, "selection": "all"}},
        {"adpfedgnn": {"club_norm": "literal", "mask_score": "neg-abs-diff", "q": 0.3}},
        {"adpfedgnn": {"reward_scale": "round", "reward_norm": "none", "buffer": 50}},
        {"adpfedgnn": {"reg_step": "gradient", "overlap": "allowed"}},
        {"batch_size": 16, "split": "60/20/20"},
        {"num_layers": 3, "adpfedgnn": {"mi": False}},
        {"optimizer_state": "reset", "adpfedgnn": {"rl": False, "mi": False}},
        # Adam's first steps of two clients may cancel but for rounding, which masks rank
        {"participation": 0.6, "optimizer": "sgd"},
    ],
    ids=str,
)
def test_adpfedgnn_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("adpfedgnn", {**ADPFEDGNN, **settings})


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("fedpano", {**FEDPANO, "dropout": 0.5}, "dropout"),
        ("fedpano", {**FEDPANO, "optimizer": "adam"}, "moments"),
        ("fedpano", {**FEDPANO, **FEW_LABELS}, "less than half"),
        ("topfgl", FEW_LABELS, "less than half"),
    ],
)
def test_a_method_names_why_a_client_is_not_stacked(
    method: str, settings: dict[str, Any], reason: str
) -> None:
    with stage(method, "true", settings) as stacked:
        stacked.strategy.loop.log = RoundLog(1)
        sent = stacked.strategy.train_messages(1, [0, 1])
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
    assert len(exchange.failures) == 2
    assert reason in exchange.failures[0].reason


def test_fedpg_with_too_many_pairs_for_a_stack_equals_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fedpg, "MOST_STACKED_PAIRS", 0)
    compare("fedpg", {**WIDER["fedpg"], "fedpg": {"neighbor_limit": 2}}, rounds=2)


def test_fedpg_with_an_mlp_as_attention_is_not_stacked() -> None:
    with stage("fedpg", "true", {"fedpg": {"scorer": "mlp"}}) as stacked:
        stacked.strategy.loop.log = RoundLog(1)
        sent = stacked.strategy.train_messages(1, [0, 1])
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
    assert len(exchange.failures) == 2
    assert "fedpg.scorer = mlp has no stacked form" in exchange.failures[0].reason


@pytest.mark.parametrize(
    "settings",
    [
        {"fedgcn": {"hops": 1}},
        {"fedgcn": {"hops": 2, "min_outside": 2}, "num_layers": 3},
        {"fedgcn": {"hops": 0}, "batch_size": 7},
        {"split": "7/40/53", "fedgcn": {"hops": 2}},
    ],
    ids=str,
)
def test_fedgcn_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fedgcn", settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"partition": "louvain", "fgssl": {"global_feature_mask": 0.0}},
        {"batch_size": 7, "model": "gin"},
        {"fgssl": {"contrast_weight": 0.0}},
    ],
    ids=str,
)
@pytest.mark.usefixtures("dense_or_sparse")
def test_fgssl_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fgssl", settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"participation": 0.6, "fed-pub": {"l1": 0.1}},
        {"model": "graphsage", "optimizer": "sgd", "batch_size": 7},
    ],
    ids=str,
)
@pytest.mark.usefixtures("dense_or_sparse")
def test_fed_pub_equals_one_by_one(settings: dict[str, Any]) -> None:
    compare("fed-pub", settings)


def test_all_nodes_can_be_contrasted() -> None:
    compare("moon", {"moon": {"nodes": "all"}}, rounds=2)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "moon", "fedala", "fggp"])
def test_clients_with_few_training_nodes_equal_one_by_one(method: str) -> None:
    settings = {
        "split": "7/40/53",
        "num_layers": 3,
        "synthetic": {**SMALL["synthetic"], "nodes": 600, "degree": 1.5},
    }
    compare(method, settings, rounds=2)


def test_receptive_fields_draw_the_same_masks() -> None:
    settings = {
        "split": "7/40/53",
        "synthetic": {**SMALL["synthetic"], "nodes": 600, "degree": 1.5},
    }
    with stage("fedavg", "true", settings) as stacked:
        stacked.replies(1)
        entries = stacked.session.graphs._entries.values()
        assert any(data.training.fields.get(2) is not None for data in entries)


@pytest.mark.parametrize("method", ["fedproto", "moon", "fedala", "fggp"])
def test_batches_of_methods_with_terms_equal_one_by_one(method: str) -> None:
    compare(method, {"batch_size": 7}, rounds=2)


@pytest.mark.parametrize("model", ["gamlp", "gin", "graphsage", "mlp", "sgc"])
def test_every_backbone_equals_one_by_one(model: str) -> None:
    compare("fedavg", {"model": model}, rounds=2)


TYPED_METHODS = sorted(
    {name for name in STACKED if METHODS[name].reads_messages} | {"fedhgn"}
)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *[(method, {"model": "rgcn"}) for method in TYPED_METHODS],
        ("fedavg", {"model": "rgcn-mean", "dropout": 0.5}),
        ("fedavg", {"model": "rgcn", "num_bases": 0, "batch_size": 7}),
        ("fedavg", {"model": "typed-graphsage", "reverse_relations": False}),
        ("fedavg", {"model": "typed-gine", "optimizer": "sgd"}),
        ("fedhgn", {"model": "rgcn", "fedhgn": {"alignment": "peers"}}),
        ("fedprox", {"model": "rgcn", "schema_align": "private"}),
        ("moon", {"model": "typed-graphsage", "schema_align": "private"}),
    ],
    ids=str,
)
def test_typed_graphs_equal_one_by_one(method: str, settings: dict[str, Any]) -> None:
    compare(method, settings)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of clients of all stacks that are validated, as they come."""
    found: list[int] = []
    validate = Cohort.validate

    def counted(self: Cohort, model: Any) -> list[float]:
        found.append(len(self))
        return validate(self, model)

    monkeypatch.setattr(Cohort, "validate", counted)
    return found


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a typed graph whose parts lack relations."""
    graph = typed_bank(0, has_device=True, size=150)
    folder = typed_owners(tmp_path_factory.mktemp("typed") / "own", graph)
    return str(Path(folder) / "bank0.npz")


@pytest.mark.parametrize("align", ["same", "private"])
@pytest.mark.parametrize("model", ["rgcn", "typed-graphsage"])
def test_clients_that_lack_relations_equal_one_by_one(
    model: str, align: str, bank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[tuple[int, ...]]] = []
    train = Stacker._train_cohort

    def watch(self: Any, app: Any, opened: Any, *rest: Any, **given: Any) -> Any:
        graphs = [one.client.data.inputs[0].relations for one in opened]
        found.append([graph.held for graph in graphs])
        return train(self, app, opened, *rest, **given)

    monkeypatch.setattr(Stacker, "_train_cohort", watch)
    settings = {"dataset": bank, "partition": "metis", "schema_align": align}
    # a matrix without edges has no gradient, and so no decay
    compare("fedavg", {**settings, "model": model, "weight_decay": 0.1}, rounds=2)
    assert len({one for cohort in found for one in cohort}) > 1
    are_alike = all(len(set(cohort)) == 1 for cohort in found)
    assert are_alike == (model == "typed-graphsage")


def test_clients_with_other_kinds_or_relations_are_not_stacked(bank: str) -> None:
    settings = {"dataset": bank, "partition": "metis", "schema_align": "name"}
    with stage("fedavg", "true", {**settings, "model": "rgcn"}) as stacked:
        stacked.strategy.loop.log = RoundLog(1)
        sent = stacked.strategy.train_messages(1, range(CLIENTS))
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
    refused = {failure.partition_id for failure in exchange.failures}
    graphs = {e.place[0]: e for e in stacked.session.graphs._entries.values()}
    lacking = {p for p, e in graphs.items() if len(e.inputs[0].relations.held) < 3}
    assert refused == lacking
    assert refused < set(range(CLIENTS))
    reason = "other clients have kinds of nodes or relations that it lacks"
    assert all(reason in failure.reason for failure in exchange.failures)


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gamlp", "gin", "graphsage", "sgc"])
def test_two_views_of_every_backbone_equal_one_by_one(model: str) -> None:
    compare("fggp", {"model": model}, rounds=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "lr": 0.1},
        {"optimizer": "adamw"},
        {"optimizer_state": "reset"},
        {"participation": 0.6},
        {"batch_size": 7},
        {"upload_clip": 1e6},
        {"min_class_count": 3},
        {"weight_by": "equal", "num_layers": 3, "local_epochs": 1},
        {"absent_classes": "zero", "partition": "louvain"},
        {"model": "gcn:linear"},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()),
)
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_settings_equal_one_by_one(method: str, settings: dict[str, Any]) -> None:
    compare(method, settings)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {*STACKED, *ONE_SHOT}))
def test_other_methods_are_refused_or_run_one_by_one(
    method: str, tmp_path: Path
) -> None:
    settings = {**shortened(method, SMALL), "clients": 3, "output_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="only these methods have a stacked form"):
        simulate(method, stacked=True, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "fedprox", "check_every": 1}, "check-every"),
        ({"num_neighbors": "5,5", "batch_size": 8}, "num-neighbors"),
        ({"model": "rgcn", "node_embedding": True}, "node-embedding"),
        ({"setting": "graph"}, "whole graphs"),
    ],
)
def test_settings_that_cannot_be_stacked_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    values = {"method": "fedavg", "stacked": "true"}
    if "setting" in settings:
        values |= {"dataset": "tu:TINY", "partition": "uniform"}
    flat = {key.replace("_", "-"): value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=reason):
        refuse_unstackable(parse_config({**values, **flat}))


def test_a_client_that_cannot_be_stacked_is_named() -> None:
    with stage("fedavg", "true", {"model": "gat"}) as stacked:
        stacked.strategy.loop.log = RoundLog(1)
        sent = stacked.strategy.train_messages(1, [0, 1])
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
    assert len(exchange.failures) == 2
    assert "backbone gat has no stacked form" in exchange.failures[0].reason


def test_the_other_engines_refuse_the_setting() -> None:
    values = parse_config({"stacked": True}).flat()
    with pytest.raises(ConfigError, match="its own process"):
        run_server(None, values, engine="ray")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [[torch.nan], [torch.inf], [torch.inf, -torch.inf]])
def test_clients_with_numbers_that_are_not_finite_are_found(bad: list[float]) -> None:
    large = torch.finfo(torch.float32).max
    weight = torch.full((3, 2, 4), large)  # whose sum overflows
    tensors = {"weight": weight, "bias": torch.zeros(3, 4)}
    assert finite_clients(tensors) == [True] * 3
    tensors["bias"][1, : len(bad)] = torch.tensor(bad)
    assert finite_clients(tensors) == [True, False, True]
    assert finite_clients({"bias": tensors["bias"]}) == [True, False, True]


def test_a_diverging_client_fails_alone(tmp_path: Path) -> None:
    # one client's features are too large for float32
    with stage("fedavg", "true", {"optimizer": "sgd"}) as stacked:
        entries = list(stacked.session.graphs._entries.values())
        entries[1].training.inputs.x.mul_(1e30)
        stacked.strategy.loop.log = RoundLog(1)
        sent = stacked.strategy.train_messages(1, range(CLIENTS))
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
        failed = entries[1].place[0]
        assert [f.partition_id for f in exchange.failures] == [failed]
        assert "non-finite" in exchange.failures[0].reason
        assert sorted(exchange.replies) == [k for k in range(CLIENTS) if k != failed]
        state = stacked.states()[failed]
        assert not state.tensors
        assert state.values == {"answered/train": 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"evaluate": "both"},
        {"participation": 0.4, "evaluate": "both"},
        {"participation": 0.4, "eval_policy": "refresh"},
        {"participation": 0.4, "eval_policy": "refresh-all"},
        {"setting": "inductive"},
        {
            "setting": "few-shot",
            "clients": 2,
            "synthetic": {**SMALL["synthetic"], "nodes": 600},
        },
        {"min_replies": 2, "secure_aggregation": True},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_runs_equal_runs_one_by_one(settings: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        simulate(
            "fedavg",
            stacked=stacked,
            output_dir=str(tmp_path / str(stacked)),
            **{"clients": CLIENTS, **SMALL, **settings},
        )
        for stacked in (True, False)
    ]
    assert all(run.status == "completed" for run in runs)
    stacked, alone = (numbers([*run.rounds, *run.clients]) for run in runs)
    assert stacked.keys() == alone.keys()
    for place, value in alone.items():
        assert stacked[place] == pytest.approx(value, abs=1e-4, nan_ok=True), place


@pytest.mark.parametrize("policy", ["refresh", "refresh-all"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedpano", {"fedpano": {"m": 2}}),
        (
            "fedpano",
            {"fedpano": {"use_shared_classifier": False}, "setting": "few-shot"},
        ),
        ("fedpg", {"hidden_channels": 32}),
        ("fedrep", {"final_local_epochs": 2}),
        ("moon", {"evaluate": "both"}),
        ("adpfedgnn", {"adpfedgnn": {"eval_fanout": 2}}),
        ("adpfedgnn", {"adpfedgnn": {"selection": "random-drop"}}),
        ("adpfedgnn", {"adpfedgnn": {"eval_actions": "greedy", "rl": False}}),
    ],
    ids=str,
)
def test_refreshed_copies_equal_those_one_by_one(
    method: str, settings: dict[str, Any], policy: str, tmp_path: Path
) -> None:
    own = {"participation": 0.4, "participants": 0, "eval_policy": policy}
    synthetic = {**SMALL["synthetic"], "nodes": 600}
    runs = [
        simulate(
            method,
            stacked=stacked,
            output_dir=str(tmp_path / str(stacked)),
            **{**SMALL, "clients": CLIENTS, "synthetic": synthetic, **own, **settings},
        )
        for stacked in (True, False)
    ]
    stacked, alone = (numbers([*run.rounds, *run.clients]) for run in runs)
    assert stacked.keys() == alone.keys()
    for place, value in alone.items():
        assert stacked[place] == pytest.approx(value, abs=1e-4, nan_ok=True), place


def test_refreshed_copies_are_trained_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []
    evaluate = Stacker._evaluate_cohort

    def counted(self: Any, app: Any, opened: Any) -> Any:
        sizes.append(len(opened))
        return evaluate(self, app, opened)

    monkeypatch.setattr(Stacker, "_evaluate_cohort", counted)
    simulate(
        "fedpano",
        **{**SMALL, "rounds": 2, "clients": 8, "participants": 5},
        output_dir=str(tmp_path),
    )
    assert sum(sizes) == 16


@pytest.mark.parametrize(
    "settings",
    [
        {"opfgl": {"beta": 2.0, "gamma_max": 3.0}},
        {"opfgl": {"variant": "hre-nd-dist"}, "dropout": 0.4},
        {"opfgl": {"variant": "ft-imb"}, "setting": "inductive"},
        {"opfgl": {"variant": "global"}, "optimizer": "sgd"},
        {"split": "60/0/40", "local_epochs": 8},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_clients_that_stop_at_different_checks_equal_one_by_one(
    settings: dict[str, Any], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHORT, "opfgl", {})
    rates = {"lr-global": 0.01, "lr-personal": 0.03, "server-steps": 60}
    synthetic = {**SMALL["synthetic"], "nodes": 400}
    values = {"rounds": 1, "min_class_count": 1, "local_epochs": 60, "check_every": 2}
    values |= {
        "patience": 5,
        "synthetic": synthetic,
        **settings,
        "opfgl": {**rates, **settings.get("opfgl", {})},
    }
    with (
        stage("opfgl", "true", values) as one,
        stage("opfgl", "false", values) as other,
    ):
        metrics = []
        for each in (one, other):
            each.replies(1)
            assert each.strategy.complete_round(1)
            log = each.strategy.loop.log
            scores = {pid: found["local"]["val"].accuracy
                      for pid, found in log._scores.items()}  # fmt: skip
            metrics.append({"clients": log._clients, "scores": scores})
        found, expected = map(numbers, metrics)
        assert len(expected) == 3 * CLIENTS  # losses, numbers of nodes, accuracies
        assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)
        for pid, state in other.states().items():
            mine = one.states()[pid].tensors
            assert mine.keys() == state.tensors.keys()
            for name, tensor in state.tensors.items():
                torch.testing.assert_close(mine[name], tensor, atol=1e-4, rtol=1e-4)
    if settings.get("opfgl", {}).get("variant") != "global" and "split" not in settings:
        assert len(set(sizes)) > 2  # clients left their stacks


CHECKED = {"check_every": 1, "patience": 2, "local_epochs": 12, "lr": 0.05}
CHECKED |= {
    "optimizer_state": "reset",
    "synthetic": {**SMALL["synthetic"], "nodes": 400},
}


@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.5},
        {"dropout": 0.0},
        {"model": "graphsage", "split": "2/40/58"},
        {"split": "40/0/60"},
    ],
    ids=str,
)
def test_clients_that_check_every_stops_equal_one_by_one(
    method: str, settings: dict[str, Any], sizes: list[int]
) -> None:
    compare(method, {**CHECKED, **settings}, rounds=2)
    has_validation = settings.get("split") != "40/0/60"
    assert (1 in sizes) == has_validation  # clients left their stacks


def test_fine_tuned_clients_that_check_every_stops_equal_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    fine_tune = fedavg.FedAvgClientApp.act_group

    def counted(self: Any, group: Any, downloads: Any) -> Any:
        trained.append(len(group))
        return fine_tune(self, group, downloads)

    monkeypatch.setattr(fedavg.FedAvgClientApp, "act_group", counted)
    settings = {**CHECKED, "fedavg": {"finetune_epochs": 10}, "rounds": 2}
    one, other = (
        simulate("fedavg", clients=CLIENTS, **settings, stacked=stacked,
                 output_dir=str(tmp_path / str(stacked)))
        for stacked in (True, False)
    )  # fmt: skip
    assert sum(trained) == CLIENTS
    mine, expected = (numbers(run.summary["finetuned"]) for run in (one, other))
    assert len(expected) > 3
    assert mine == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("fedavg", {"optimizer_state": "keep"}, "moments are kept"),
        ("local", {"batch_size": 1000}, "between batches"),
        ("fedprox", {}, "loss is not the cross-entropy alone"),
    ],
)
def test_clients_that_cannot_be_checked_in_a_stack_say_why(
    method: str,
    settings: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = replace(
        METHODS[method], stacks_checks=True
    )  # as of a method made from FedAvg's
    monkeypatch.setitem(METHODS.own, method, row)
    with stage(method, "true", {**CHECKED, **settings}) as stacked:
        stacked.strategy.loop.log = RoundLog(1)
        sent = stacked.strategy.train_messages(1, range(CLIENTS))
        messages = stacked.strategy.messenger.by_receiver(sent)
        exchange = send_receive(stacked.grid, messages, timeout=60)
    assert len(exchange.failures) == CLIENTS
    assert all(reason in failure.reason for failure in exchange.failures)


def numbers(rows: Any, place: str = "") -> dict[str, Any]:
    """Return all numbers of nested rows except times, by place."""
    found: dict[str, Any] = {}
    pairs = rows.items() if isinstance(rows, dict) else enumerate(rows)
    for key, value in pairs:
        if key == "seconds":
            continue
        if isinstance(value, dict | list):
            found |= numbers(value, f"{place}/{key}")
        elif not isinstance(value, str) and value is not None:
            found[f"{place}/{key}"] = value
    return found


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_a_stacked_run_resumes_from_its_checkpoint(
    participation: float, tmp_path: Path
) -> None:
    settings = {
        **SMALL,
        "clients": CLIENTS,
        "rounds": 5,
        "checkpoint_every": 2,
        "participation": participation,
        "stacked": True,
    }
    whole = simulate("fedavg", **settings, output_dir=str(tmp_path))

    def stop(row: Any) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", **settings, run_dir=str(folder), on_round=stop)
    assert comparable(resume(folder)) == comparable(whole)


def test_auto_stacks_many_small_clients_only(monkeypatch: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    train = Stacker._train_cohort

    def counted(self: Any, app: Any, opened: Any, *rest: Any, **given: Any) -> Any:
        seen.append(len(opened))
        return train(self, app, opened, *rest, **given)

    monkeypatch.setattr(Stacker, "_train_cohort", counted)
    synthetic = {**SMALL["synthetic"], "nodes": 640}
    settings = {**SMALL, "rounds": 1, "output_dir": str(tmp_path)}
    settings["synthetic"] = synthetic
    simulate("fedavg", clients=FEWEST_STACKED - 1, **settings)
    assert seen == []
    simulate("fedavg", clients=FEWEST_STACKED, **settings)
    assert sum(seen) == FEWEST_STACKED


def test_auto_stacks_small_typed_graphs_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []
    train = Stacker._train_cohort

    def counted(self: Any, app: Any, opened: Any, *rest: Any, **given: Any) -> Any:
        seen.append(len(opened))
        return train(self, app, opened, *rest, **given)

    monkeypatch.setattr(Stacker, "_train_cohort", counted)
    synthetic = {**SMALL["synthetic"], "nodes": 640}
    settings = {**SMALL, "rounds": 1, "model": "rgcn", "output_dir": str(tmp_path)}
    settings |= {"synthetic": synthetic, "clients": FEWEST_STACKED}
    simulate("fedavg", **settings)
    assert sum(seen) == FEWEST_STACKED
    # a layer has a row for each pair of a relation and a node, above all of them here
    monkeypatch.setattr(grouping, "LARGEST_STEP", 100 * SMALL["hidden_channels"])
    simulate("fedavg", **settings)
    assert sum(seen) == FEWEST_STACKED


@pytest.mark.parametrize("stacked", ["auto", "true"])
def test_an_error_of_stacking_loses_no_reply(
    stacked: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(*_: object, **__: object) -> None:
        # the grid takes this exception for a reply that cannot be decoded
        raise KeyError("encoder")

    settings = {
        **SMALL,
        "clients": FEWEST_STACKED,
        "rounds": 1,
        "output_dir": str(tmp_path),
    }
    expected = simulate("fedavg", **settings, stacked="false")
    monkeypatch.setattr(Stacker, "handle", fail)
    if stacked == "true":
        with pytest.raises(RunError, match="KeyError: 'encoder'"):
            simulate("fedavg", **settings, stacked=stacked)
        return
    found = simulate("fedavg", **settings, stacked=stacked)
    assert comparable(found) == comparable(expected)
    assert "stacking failed: KeyError('encoder')" in caplog.text


def test_an_error_in_one_stack_of_an_evaluation_loses_no_score(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = {**SMALL, "clients": FEWEST_STACKED, "rounds": 1, "evaluate": "both"}
    settings |= {"output_dir": str(tmp_path), "stacked": "auto"}
    expected = simulate("fedavg", **settings)
    evaluate, calls = Stacker._evaluate_cohort, []

    def fail(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:  # the clients of the first stack have answered
            raise MemoryError("no room")
        return evaluate(*given)

    monkeypatch.setattr(Stacker, "_evaluate_cohort", fail)
    found = simulate("fedavg", **settings)
    assert len(calls) == 2
    assert "stacking failed: no room" in caplog.text
    assert not found.summary["failures"]
    assert numbers(found.rounds) == pytest.approx(numbers(expected.rounds), rel=1e-3)


def test_a_client_that_cannot_store_its_evaluation_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = MemoryStates.note

    def full(self: Any, context: Any, partition_id: int, state: ClientState) -> None:
        if partition_id == 3:
            raise RunError("the disk is full")
        store(self, context, partition_id, state)

    monkeypatch.setattr(MemoryStates, "note", full)
    settings = {**SMALL, "clients": FEWEST_STACKED, "rounds": 1, "evaluate": "both"}
    run = simulate("fedavg", **settings, output_dir=str(tmp_path))
    failures = [one for row in run.rounds for one in row["failures"]]
    assert failures == [{"partition_id": 3, "reason": "the disk is full"}]
