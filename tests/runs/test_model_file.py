"""Models that data owners save, and predictions with them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import save_file
from torch_geometric.data import Data

from flower_fgl import METHODS, simulate
from flower_fgl.algorithms.f2l import Adaptation, AdaptedModel
from flower_fgl.algorithms.fedpano import PersonalNet, build_encoder
from flower_fgl.client_apps.pfedfsl import PFedFSLClientApp
from flower_fgl.client_apps.runtime.model_store import (
    copy_model_of_run,
    model_folder,
    takes_place,
)
from flower_fgl.core.errors import DataError, RunError
from flower_fgl.core.model_spec import TYPED
from flower_fgl.core.schema import Schema, TypedModel
from flower_fgl.core.targets import Target
from flower_fgl.datasets.graph_files.graph_file import (
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.transforms.normalize_features import scale_client
from flower_fgl.methods import parse_config
from flower_fgl.nn import MODELS, GraphInput, build_model
from flower_fgl.runs.model_file import ModelCard, read_card, save_model
from flower_fgl.runs.saved_model import load_model
from flower_fgl.simulation.prediction import Prediction, predict_graph, write_table
from tests.client_apps.runtime.test_owners import NAMES, saved
from tests.support.methods import OF_PLAIN_GRAPHS, collected
from tests.support.owners import CLASSES, in_own_order, owner_graphs, run_owners
from tests.support.random_clients import FEATURES, random_client
from tests.support.short_runs import shortened

CARD = ModelCard(
    method="fedavg", model="gcn", num_features=8, hidden_channels=8, num_layers=2,
    class_names=CLASSES, classifies_graphs=False, scaling="none", round=4,
    owner="ash", validation=0.5,
)  # fmt: skip


SCORED_LATER = {"adpfedgnn", "f2l", "fedpano", "pfedfsl"}
"""Methods that evaluate with the next download, so that the last model is saved."""
ON_MENDED_GRAPHS = {"fedgcn", "fedsage+", "topfgl"}
"""Methods that evaluate on other graphs than those in the owners' files."""


def a_model(model: str = "gcn") -> torch.nn.Module:
    return build_model(
        model, in_channels=8, hidden_channels=8, num_outputs=3, num_layers=2, dropout=0
    )


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    # with the edges to other owners' nodes, which FedGCN needs
    made = saved(tmp_path / "graphs", owner_graphs(method="fedgcn"))
    return [{**n, "model-dir": str(tmp_path / "models")} for n in made]


def kept(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"models/*-{name}-*")
    return found


def accuracy(model: Path, graph: Path, mask: str) -> float:
    """Return the accuracy of the ``predict`` command on the labels of the file."""
    found = predict_graph(model, graph)
    owned = load_graph_file(graph).dataset
    said = [found.card.class_names[k] for k in found.values.argmax(1).tolist()]
    true = ["" if k < 0 else owned.class_names[k] for k in owned.y.tolist()]
    asked = (owned.masks[mask] & (owned.y >= 0)).tolist()
    pairs = [(s, t) for s, t, on in zip(said, true, asked, strict=True) if on]
    return sum(s == t for s, t in pairs) / len(pairs)


# ------------------------------------------------------------------------ files
def test_a_model_comes_back_with_its_description(tmp_path: Path) -> None:
    state = a_model().state_dict()
    scaling = (torch.arange(8.0).double(), torch.ones(8).double())
    card = replace(CARD, scaling="kept")
    save_model(tmp_path / "m", state, card, scaling)
    for place in (tmp_path / "m", tmp_path / "m" / "model.safetensors"):
        back = load_model(place)
        assert back.card == card
        assert not back.model.training
        assert all(torch.equal(v, state[k]) for k, v in back.model.state_dict().items())
        assert back.scaling is not None
        assert torch.equal(back.scaling[0], scaling[0])


def test_a_linear_head_comes_back(tmp_path: Path) -> None:
    model = a_model("graphsage:linear").eval()
    save_model(tmp_path, model.state_dict(), replace(CARD, model="graphsage:linear"))
    graph = GraphInput(torch.randn(5, 8), torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(load_model(tmp_path).model(graph), model(graph))


def test_a_classifier_of_some_classes_comes_back(tmp_path: Path) -> None:
    sizes = {"in_channels": 8, "hidden_channels": 8, "num_layers": 2, "dropout": 0.0}
    encoder = build_encoder("graphsage", **sizes)  # type: ignore[arg-type]
    head = torch.nn.Linear(8, 2)
    model = PersonalNet(encoder, head, torch.tensor([0, 2]), 3, "tanh").eval()
    card = replace(CARD, model="graphsage", rep_norm="tanh")
    save_model(tmp_path, model.state_dict(), card)
    graph = GraphInput(torch.randn(5, 8), torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(load_model(tmp_path).model(graph), model(graph))
    plain = {n: t for n, t in model.state_dict().items() if n != "classes"}
    save_model(tmp_path, plain, card)
    with pytest.raises(RunError, match="no classifier for the owner's classes"):
        load_model(tmp_path)


@pytest.mark.parametrize("train", [range(15), (4,)], ids=["some", "one"])
def test_class_means_come_back_without_the_nodes_they_are_of(
    train: Sequence[int], tmp_path: Path
) -> None:
    client = random_client("pfedfsl", train=train)
    model = PFedFSLClientApp().build(client).eval()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)
    card = replace(CARD, method="pfedfsl", num_features=FEATURES)
    save_model(tmp_path, model.fixed().state_dict(), card)
    back = load_model(tmp_path).model
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    for graph in (client.data.inputs[0], GraphInput(torch.randn(5, FEATURES), edges)):
        logits = back(graph)
        torch.testing.assert_close(logits, model(graph))
        own = sorted(set(client.data.training.labels.tolist()))
        assert logits.isfinite().all(0).nonzero().flatten().tolist() == own
    less = {n: t for n, t in model.fixed().state_dict().items() if n != "classes"}
    save_model(tmp_path, less, card)
    with pytest.raises(RunError, match="its weights do not match gcn"):
        load_model(tmp_path)


def test_an_adapted_model_comes_back(tmp_path: Path) -> None:
    backbone, adaptation = a_model(), Adaptation(8, 3)
    classes = torch.tensor([True, False, True])
    model = AdaptedModel(backbone, adaptation, torch.randn(4, 8), classes).eval()
    card = replace(CARD, method="f2l", model="gcn:2x8", hidden_channels=5)
    save_model(tmp_path, model.state_dict(), card)
    graph = GraphInput(torch.randn(5, 8), torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(load_model(tmp_path).model(graph), model(graph))
    narrow = {**model.state_dict(), "support": torch.randn(4, 7)}
    save_model(tmp_path, narrow, card)
    with pytest.raises(RunError, match="its weights do not match gcn:2x8"):
        load_model(tmp_path)


NETWORKS: dict[str, list[dict[str, Any]]] = collected("NETWORKS")
"""Settings of the methods with networks of their own."""


def test_every_network_of_a_method_is_listed() -> None:
    assert set(NETWORKS) == {n for n, row in METHODS.own.items() if row.network}


@pytest.mark.parametrize(
    ("method", "settings"),
    [(method, values) for method in NETWORKS for values in NETWORKS[method]],
    ids=str,
)
def test_a_methods_own_network_comes_back(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    values = {f"{method}.{key}": value for key, value in settings.items()}
    config = parse_config({"method": method, "hidden-channels": 8, **values})
    card = replace(
        CARD, method=method, model="graphsage", settings=config.method_settings()
    )
    torch.manual_seed(0)
    model: Any = METHODS[method].load_network()(
        config.method_config, model="graphsage", num_features=8, num_outputs=3, width=8,
        num_layers=2, dropout=0.0,
    )  # fmt: skip
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    save_model(tmp_path, model.state_dict(), card)
    graph = GraphInput(torch.randn(5, 8), torch.tensor([[0, 1, 2], [1, 2, 0]]))
    before = torch.get_rng_state()
    back = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert back.card == card
    torch.testing.assert_close(back.model(graph), model.eval()(graph))
    save_model(tmp_path, model.state_dict(), replace(card, settings={"betta": 1.0}))
    with pytest.raises(RunError, match="Unknown setting"):
        load_model(tmp_path)
    save_model(tmp_path, model.state_dict(), replace(card, settings={}))
    with pytest.raises(RunError, match="predicts with its own network"):
        load_model(tmp_path)
    save_model(tmp_path, model.state_dict(), replace(card, method="later"))
    with pytest.raises(RunError, match=r'"later".*later version'):
        load_model(tmp_path)


def test_a_card_with_removed_settings_is_read(tmp_path: Path) -> None:
    config = parse_config({"method": "adpfedgnn", "hidden-channels": 8})
    model = METHODS["adpfedgnn"].load_network()(
        config.method_config, model="graphsage", num_features=8, num_outputs=3, width=8,
        num_layers=2, dropout=0.0,
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    written = {**config.method_settings(), "agent-width": 128, "lambda-rl": 1.0}
    card = replace(CARD, method="adpfedgnn", model="graphsage", settings=written)
    save_model(tmp_path, model.state_dict(), card)
    back = load_model(tmp_path).model
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    other = replace(card, settings={**written, "agent-width": 64})
    save_model(tmp_path, model.state_dict(), other)
    with pytest.raises(RunError, match=r"agent-width is no longer.*128, got 64"):
        load_model(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"The model folder .*nowhere does not exist"):
        load_model(tmp_path / "nowhere")


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None
    with pytest.raises(RunError, match=r"holds no model\.safetensors"):
        load_model(tmp_path)
    inner = tmp_path / "1-north-12345678"  # as in model-dir
    inner.mkdir()
    (inner / "model.safetensors").touch()
    with pytest.raises(RunError, match=r"Pass one of them: 1-north-12345678\."):
        load_model(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="does not describe the network"):
        load_model(tmp_path)
    save_model(tmp_path, {"a": torch.zeros(1)}, CARD)
    with pytest.raises(RunError, match="its weights do not match gcn"):
        load_model(tmp_path)
    save_model(tmp_path, a_model().state_dict(), replace(CARD, model="gpt"))
    with pytest.raises(RunError, match='Unknown model "gpt"'):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(RunError, match="damaged"):
        load_model(tmp_path)


def with_card(folder: Path, tensors: dict[str, Any], **changes: Any) -> Path:
    """Write a model file whose description has other entries."""
    values = {**json.loads(CARD.to_json()), **changes}
    save_file(tensors, folder / "model.safetensors", {"flower-fgl": json.dumps(values)})
    return folder


STATISTICS = {
    "features/mean": torch.zeros(8).double(),
    "features/std": torch.ones(8).double(),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden-channels": 10**9},
        {"num-features": 10**9},
        {"model": "sgc", "num-features": 10**9},
        {"num-layers": 10**5},
        {"model": "gcn:100000x8"},
        {"hidden-channels": "8"},
        {"hidden-channels": True},
        {"hidden-channels": -8},
        {"num-layers": 2.0},
        {"round": -1},
        {"class-names": "abc"},
        {"class-names": ["a", "a", "b"]},
        {"class-names": ["a", "b", "\x1b[2J"]},
        {"owner": "\x1b]0;x\x07"},
        {"model": "\x1b[31mgcn"},
        {"method": 5},
        {"scaling": "\x1b[31m"},
        {"scaling": "kept"},
        {"validation": float("nan")},
        {"validation": "1"},
        {"feature-names": ["a"]},
        {"classifies-graphs": 1},
        {"settings": ["a"]},
        {"settings": {"\x1b[31m": 1}},
        {"readout": "max"},
        {"readout": ["sum"]},
        {"link": "edge:9999999999x1"},
        {"link": "edge:999999999x1"},
        {"rep-norm": "l2"},
        {"rep-norm": "l3"},
        {"\x1b[31m": 1},
        {"multi-label": 1},
        {"target-kind": "number"},
        {"target-kind": "numbers"},
        {"target-kind": "numbers", "target-scale": "kept"},
        {"target-kind": "numbers", "target-scale": "none", "target-units": ["m"]},
        {"target-units": ["m", "m", "m"]},
        {"target-scale": "kept"},
        {"validation": 1.5},
        {"method": "fedlog", "settings": {"nodes-per-class": 10**9}},
        {"method": "fediih", "settings": {"factors": 1}, "hidden-channels": 10**9},
    ],
    ids=str,
)
def test_a_description_is_checked_before_the_network_is_built(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = with_card(tmp_path, a_model().state_dict(), **changes)
    with pytest.raises(RunError) as caught:
        load_model(folder)
    assert str(caught.value).isprintable()


def test_the_card_says_what_is_predicted_and_older_cards_are_read() -> None:
    units = ("m", "", "s")
    card = replace(
        CARD,
        target_kind="numbers",
        target_units=units,
        target_scale="kept",
        validation=3.5,
    )
    assert ModelCard.from_json(card.to_json()) == card
    assert card.target == Target("numbers", CLASSES, units)
    assert "target" not in CARD.to_json()  # as in files of earlier versions
    assert "readout" not in CARD.to_json()
    assert ModelCard.from_json(CARD.to_json()).target.has_classes
    labels = replace(CARD, target_kind="labels")
    assert json.loads(labels.to_json())["multi-label"] is True
    assert ModelCard.from_json(labels.to_json()) == labels
    assert labels.multi_label


@pytest.mark.parametrize(
    "changes",
    [
        {"targets/mean": torch.zeros(2).double()},
        {"targets/std": torch.zeros(3).double()},
        {"targets/std": torch.ones(3)},
        {"targets/mean": None},
    ],
)
def test_a_scale_that_does_not_fit_the_targets_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    scale = {"targets/mean": torch.ones(3).double()}
    scale["targets/std"] = scale["targets/mean"] * 2
    about = {"target-kind": "numbers", "target-scale": "kept"}
    state = {**a_model().state_dict(), **scale}
    saved = load_model(with_card(tmp_path, state, **about))
    assert saved.target_scale is not None
    assert saved.target_scale.restore(torch.ones(1, 3)).tolist() == [[3.0, 3.0, 3.0]]
    tensors = {n: t for n, t in (state | changes).items() if t is not None}
    with pytest.raises(RunError, match="mean and standard deviation do not fit"):
        load_model(with_card(tmp_path, tensors, **about))


@pytest.mark.parametrize("wrapper", ["means", "support"])
def test_a_wrapped_network_is_measured_before_it_is_built(
    wrapper: str, tmp_path: Path
) -> None:
    tensors = {**a_model().state_dict(), wrapper: torch.zeros(3, 8)}
    with pytest.raises(RunError, match="do not match gcn"):
        load_model(with_card(tmp_path, tensors, **{"hidden-channels": 10**9}))


def test_a_description_that_is_no_object_is_named(tmp_path: Path) -> None:
    for text in ("[]", "5", "{", "[" * 100_000):
        state = a_model().state_dict()
        save_file(state, tmp_path / "model.safetensors", {"flower-fgl": text})
        with pytest.raises(RunError, match="does not describe the network"):
            load_model(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"features/mean": torch.zeros(7).double()},
        {"features/std": torch.zeros(8).double()},
        {"features/std": torch.full((8,), torch.nan).double()},
        {"features/mean": torch.zeros(8)},
        {"features/mean": None},
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    made = {**a_model().state_dict(), **STATISTICS, **changes}
    tensors = {name: t for name, t in made.items() if t is not None}
    with pytest.raises(RunError, match="statistics of the features do not fit"):
        load_model(with_card(tmp_path, tensors, scaling="kept"))
    whole = {**a_model().state_dict(), **STATISTICS}
    with pytest.raises(RunError, match="statistics of the features do not fit"):
        load_model(with_card(tmp_path, whole, scaling="none"))


def test_weights_that_are_not_finite_or_of_another_type_are_refused(
    tmp_path: Path,
) -> None:
    state = a_model().state_dict()
    name = next(iter(state))
    for change, match in (
        (torch.full_like(state[name], torch.nan), "not finite"),
        (state[name].double(), "do not match gcn"),
    ):
        with pytest.raises(RunError, match=match):
            load_model(with_card(tmp_path, {**state, name: change}))


def test_a_classifier_of_classes_that_are_not_there_is_refused(tmp_path: Path) -> None:
    sizes = {"in_channels": 8, "hidden_channels": 8, "num_layers": 2, "dropout": 0.0}
    encoder = build_encoder("graphsage", **sizes)  # type: ignore[arg-type]
    model = PersonalNet(encoder, torch.nn.Linear(8, 2), torch.tensor([0, 2]), 3, "l2")
    tensors = {**model.state_dict(), "classes": torch.tensor([0, 3])}
    changes = {"model": "graphsage", "rep-norm": "l2"}
    with pytest.raises(RunError, match="does not fit its classes"):
        load_model(with_card(tmp_path, tensors, **changes))


def test_a_measured_network_leaves_no_values_out_of_later_ones() -> None:
    # a backbone with buffers, built first where it takes no memory
    sizes: dict[str, Any] = {"in_channels": 5, "hidden_channels": 11, "num_outputs": 3}
    sizes |= {"num_layers": 2, "dropout": 0.0, "messages": "both:2"}
    schema = Schema("card", (("card", 5),), (("card", "owes", "card"),))
    for name in MODELS.own:
        is_typed = name in TYPED
        sizes["messages"] = TypedModel(schema).to_text() if is_typed else "both:2"
        with torch.device("meta"):
            build_model(name, **sizes, initialise=False)
        model = build_model(name, **sizes, initialise=False)
        assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
        assert {b.device.type for b in model.buffers()} <= {"cpu"}


# ---------------------------------------------------------------------- keeping
@pytest.mark.thorough
@pytest.mark.parametrize("method", OF_PLAIN_GRAPHS)
def test_every_owner_keeps_the_model_that_is_best_on_its_validation_nodes(
    method: str, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = shortened(method, {"rounds": 3})
    run = run_owners(nodes, tmp_path / "run", method=method, **settings)
    for pid, (name, node) in enumerate(zip(NAMES, nodes, strict=True)):
        rows = [c for c in run.clients if c["partition_id"] == pid and c["round"]]
        scores = [c["metrics"]["local"]["val"]["accuracy"] for c in rows]
        card = read_card(kept(tmp_path, name))
        assert card is not None
        assert (card.owner, card.method) == (name, method)
        if method in SCORED_LATER:
            assert (card.validation, card.round) == (None, 3)
            assert predict_graph(kept(tmp_path, name), Path(node["graph"])).card == card
            continue
        assert card.validation == max(scores)
        assert scores[card.round - 1] == max(scores)
        graph = Path(node["graph"])
        found = accuracy(kept(tmp_path, name), graph, "val")
        if method not in ON_MENDED_GRAPHS:
            assert found == pytest.approx(card.validation, abs=1e-6)


def test_predictions_are_in_the_agreed_classes_of_an_owner_who_numbers_its_own_way(
    tmp_path: Path,
) -> None:
    graphs = owner_graphs()
    graphs[2] = in_own_order(graphs[2], ("well", "flu", "cold"))
    nodes = saved(tmp_path / "graphs", graphs)
    nodes[2]["model-dir"] = str(tmp_path / "models")
    run = run_owners(nodes, tmp_path / "run")
    card = read_card(kept(tmp_path, "cedar"))
    assert card is not None
    assert card.class_names == CLASSES
    graph = Path(nodes[2]["graph"])
    rows = [c for c in run.clients if c["partition_id"] == 2 and c["round"]]
    expected = rows[card.round - 1]["metrics"]["local"]["test"]["accuracy"]
    found = accuracy(kept(tmp_path, "cedar"), graph, "test")
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(list((tmp_path / "models").iterdir())) == 1


@pytest.mark.parametrize(
    ("new", "before", "expected"),
    [
        (None, None, True),
        (0.1, None, True),
        (0.5, 0.5, True),
        (0.4, 0.5, False),
        (None, 0.5, False),
    ],
)
def test_the_latest_of_the_best_models_is_kept(
    new: float | None, before: float | None, *, expected: bool
) -> None:
    assert takes_place("accuracy", new, before) is expected
    errors = (None if x is None else -x for x in (new, before))
    assert takes_place("rmse", *errors) is expected


@pytest.mark.parametrize(("kept_in", "taken"), [(3, True), (4, True), (5, False)])
def test_a_run_that_goes_on_takes_over_the_model_of_its_checkpoint(
    kept_in: int, *, taken: bool, tmp_path: Path
) -> None:
    state = a_model().state_dict()
    node = {"model-dir": str(tmp_path), "name": "ash"}
    before, now = (model_folder(node, run, "ash") for run in (7, 8))
    assert before is not None
    assert now is not None
    save_model(before, state, replace(CARD, round=kept_in))
    (before / "model.json").write_text("{}")
    context = Context(8, 1, node, RecordDict(), {})
    copy_model_of_run(context, 0, 7, server_round=4)
    found = read_card(now)
    assert (found is not None) == taken
    assert (now / "model.json").exists() == taken
    copy_model_of_run(context, 0, 6, server_round=4)  # a run that saved no model
    assert read_card(before) is not None


def test_the_models_of_owners_are_private(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    before = os.umask(0o022)
    try:
        run = run_owners(nodes[:1], tmp_path / "run")
        model = kept(tmp_path, "ash")
        run_id = int(model.name.split("-")[0])
        copy_model_of_run(Context(8, 1, nodes[0], RecordDict(), {}), 0, run_id, 99)
    finally:
        os.umask(before)
    copy = model.with_name(model.name.replace(str(run_id), "8", 1))
    for folder in (tmp_path / "models", model, copy):
        assert mode(folder) == 0o700
    for folder in (model, copy):
        assert {mode(f) for f in folder.iterdir()} == {0o600}
        assert len(list(folder.iterdir())) == 4
    assert mode(run.path / "model.safetensors") == 0o644  # the aggregated model


def test_a_simulation_keeps_no_models_at_clients(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = simulate(**small)
    assert not (tmp_path / "models").exists()
    card = read_card(run.path)
    assert card is not None
    assert card.round == run.best["round"]
    assert card.owner == ""


def test_an_owner_that_cannot_keep_models_is_told_before_the_run(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    nodes[0]["model-dir"] = str(tmp_path / "file" / "models")
    run = run_owners(nodes, tmp_path / "run")
    (refused,) = run.summary["refused"]
    assert refused["name"] == "ash"
    assert "model-dir" in refused["reason"]


def test_a_model_that_cannot_be_written_does_not_stop_the_training(
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*args: Any, **_: Any) -> None:
        raise RunError("No space left")

    monkeypatch.setattr("flower_fgl.client_apps.runtime.model_store.save_model", full)
    run = run_owners(nodes, tmp_path / "run")
    assert run.status == "completed"
    assert "round 2 was not stored: No space left" in caplog.text


# ------------------------------------------------------------------- predicting
def test_the_table_holds_every_node_and_probabilities_that_add_up(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = run_owners(nodes, tmp_path / "run")
    out = tmp_path / "probabilities.csv"
    graph = Path(nodes[0]["graph"])
    write_table(predict_graph(run.path, graph), out)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["node"]) for r in rows] == load_graph_file(graph).node_ids.tolist()
    assert list(rows[0]) == ["node", "predicted", "p:flu", "p:cold", "p:well"]
    for row in rows:
        shares = {name: float(row[f"p:{name}"]) for name in CLASSES}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
        assert shares[row["predicted"]] == max(shares.values())


def test_names_that_are_formulas_are_written_as_texts_to_a_private_file(
    tmp_path: Path,
) -> None:
    names = ("=1+1", "@x", "-2+3", "+c", "\tt", "＝1", "-1", "+1.5", "a=b", "")
    size = len(names)
    card = replace(CARD, class_names=names)
    path = tmp_path / "probabilities.csv"
    items = {"node": np.array(names, dtype=object)}
    write_table(Prediction(items, torch.eye(size), card), path)
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    expected = [f"'{name}" for name in names[:6]] + list(names[6:])
    assert [row[0] for row in rows] == [row[1] for row in rows] == expected
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_csv_folder_without_labels_is_predicted_under_its_own_ids(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "m", a_model("mlp").state_dict(), CARD_MLP)
    folder = tmp_path / "new"
    folder.mkdir()
    columns = ",".join(f"f{i}" for i in range(8))
    values = ",".join("1" for _ in range(8))
    (folder / "nodes.csv").write_text(f"id,{columns}\np1,{values}\np2,{values}\n")
    (folder / "edges.csv").write_text("source,target\np1,p2\n")
    found = predict_graph(tmp_path / "m", folder)
    assert found.items["node"].tolist() == ["p1", "p2"]


CARD_MLP = replace(CARD, model="mlp")


def test_a_file_without_labels_is_predicted(tmp_path: Path) -> None:
    save_model(tmp_path / "m", a_model().state_dict(), CARD)
    x = np.ones((4, 8), dtype=np.float32)
    edges = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "new.npz", x=x, edges=edges, node_ids=np.array([3, 5, 8, 9]))
    found = predict_graph(tmp_path / "m", tmp_path / "new.npz")
    assert found.items["node"].tolist() == [3, 5, 8, 9]
    assert found.values.shape == (4, 3)


def test_features_are_standardised_as_they_were_in_training(tmp_path: Path) -> None:
    graphs = owner_graphs()
    nodes = saved(tmp_path / "graphs", graphs)
    node = {**nodes[0], "model-dir": str(tmp_path / "models")}
    run = run_owners([node], tmp_path / "run", setting="inductive")
    card = read_card(kept(tmp_path, "ash"))
    assert card is not None
    assert card.scaling == "kept"
    scaling = load_model(kept(tmp_path, "ash")).scaling
    assert scaling is not None
    seen = graphs[0].graph.x[graphs[0].graph.masks["train"]].double()
    torch.testing.assert_close(scaling[0], seen.mean(0))
    torch.testing.assert_close(scaling[1], seen.std(0, correction=0))
    # the aggregated model holds no statistics: those of the graph are used
    found = predict_graph(run.path, Path(node["graph"]))
    assert f"those of its {len(found):,} nodes are used" in found.note


def test_an_exported_file_is_predicted_as_it_was_trained_on(tmp_path: Path) -> None:
    raw = owner_graphs()[0]
    graphs = [scale_client(graph, "columns") for graph in owner_graphs()]
    nodes = saved(tmp_path / "graphs", graphs)
    node = {**nodes[0], "model-dir": str(tmp_path / "models")}
    run = run_owners([node], tmp_path / "run")
    model = kept(tmp_path, "ash")
    card = read_card(model)
    assert card is not None
    assert card.scaling == "kept"
    save_client_graph(tmp_path / "raw.npz", raw)
    one, other = (
        predict_graph(model, place)
        for place in (Path(node["graph"]), tmp_path / "raw.npz")
    )
    torch.testing.assert_close(one.values, other.values)
    # the aggregated model holds no statistics: a file that has its own stays as it is
    assert load_model(run.path).card.scaling == "own"
    assert "are used" not in predict_graph(run.path, Path(node["graph"])).note
    rows = scale_client(raw, "rows")
    save_client_graph(tmp_path / "rows.npz", rows)
    with pytest.raises(DataError, match="expects the original values"):
        predict_graph(model, tmp_path / "rows.npz")


def test_a_run_with_standardised_features_predicts_with_those_of_each_graph(
    tmp_path: Path,
) -> None:
    graphs = owner_graphs()
    factors = 10.0 ** torch.arange(8) + 1000
    raw = [replace(g, graph=replace(g.graph, x=g.graph.x * factors)) for g in graphs]
    nodes = saved(tmp_path / "raw", raw)
    exported = saved(tmp_path / "scaled", [scale_client(g, "columns") for g in raw])
    run = simulate(
        "fedavg", owners=str(tmp_path / "raw"), feature_norm="columns", rounds=8,
        hidden_channels=8, output_dir=str(tmp_path / "runs"),
    )  # fmt: skip
    assert load_model(run.path).card.scaling == "own"
    found = predict_graph(run.path, Path(nodes[0]["graph"]))
    number = raw[0].graph.num_nodes
    assert f"those of its {number} nodes are used" in found.note
    x = raw[0].graph.x.double()
    x = (x - x.mean(0)) / x.std(0, correction=0)
    model = load_model(run.path).model
    logits = model(GraphInput(x.float(), raw[0].graph.edge_index))
    torch.testing.assert_close(found.values, logits.softmax(1).detach())
    assert accuracy(run.path, Path(nodes[0]["graph"]), "test") > 0.7
    # a file that was standardised as in training stays as it is
    as_trained = predict_graph(run.path, Path(exported[0]["graph"]))
    assert "its own training nodes" not in as_trained.note
    scaled = load_graph_file(exported[0]["graph"]).dataset
    logits = model(GraphInput(scaled.x, scaled.edge_index))
    torch.testing.assert_close(as_trained.values, logits.softmax(1).detach())


def test_one_node_has_no_statistics(tmp_path: Path) -> None:
    save_model(tmp_path, a_model().state_dict(), replace(CARD, scaling="own"))
    one = Data(x=torch.ones(1, 8), edge_index=torch.empty(2, 0, dtype=torch.int64))
    with pytest.raises(DataError, match="has 1 nodes"):
        predict_graph(tmp_path, one)


def test_statistics_of_edges_come_back(tmp_path: Path) -> None:
    pair = (torch.arange(8.0).double(), torch.ones(8).double())
    edges = (torch.zeros(3).double(), torch.full((3,), 2.0).double())
    card = replace(CARD, scaling="kept")
    save_model(tmp_path, a_model().state_dict(), card, pair, edge_scaling=edges)
    back = load_model(tmp_path)
    assert back.scaling is not None
    assert back.edge_scaling is not None
    assert torch.equal(back.scaling[0], pair[0])
    assert torch.equal(back.edge_scaling[1], edges[1])
    damaged = (edges[0], torch.zeros(3).double())
    save_model(tmp_path, a_model().state_dict(), card, pair, edge_scaling=damaged)
    with pytest.raises(RunError, match="features of edges do not fit"):
        load_model(tmp_path)


def test_rows_are_normalised_as_they_were_in_training(
    small: dict[str, Any], tmp_path: Path
) -> None:
    run = simulate("fedavg", **small, setting="closed-set")
    assert load_model(run.path).card.scaling == "rows"
    graph = owner_graphs()[0]
    save_client_graph(tmp_path / "g.npz", graph)
    doubled = replace(graph, graph=replace(graph.graph, x=2 * graph.graph.x))
    save_client_graph(tmp_path / "doubled.npz", doubled)
    one, other = (
        predict_graph(run.path, tmp_path / f"{n}.npz") for n in ("g", "doubled")
    )
    torch.testing.assert_close(one.values, other.values)


def test_a_graph_that_does_not_fit_is_named(tmp_path: Path) -> None:
    graph = owner_graphs()[0]
    save_client_graph(tmp_path / "g.npz", graph)
    save_model(tmp_path / "m", a_model().state_dict(), replace(CARD, num_features=8))
    wide = torch.cat([graph.graph.x, graph.graph.x], dim=1)
    other = replace(graph, graph=replace(graph.graph, x=wide))
    save_client_graph(tmp_path / "wide.npz", other)
    with pytest.raises(DataError, match="expected 8 features as in training, got 16"):
        predict_graph(tmp_path / "m", tmp_path / "wide.npz")
    pooled = build_model(
        "gin", in_channels=8, hidden_channels=8, num_outputs=3, num_layers=2,
        dropout=0, readout=True,
    )  # fmt: skip
    card = replace(CARD, model="gin", classifies_graphs=True)
    save_model(tmp_path / "sets", pooled.state_dict(), card)
    with pytest.raises(DataError, match='holds one graph, but setting = "graph"'):
        predict_graph(tmp_path / "sets", tmp_path / "g.npz")
    with pytest.raises(DataError, match="No graph file"):
        predict_graph(tmp_path / "m", tmp_path / "absent.npz")
