from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flower_fgl.algorithms.fedpano import build_encoder
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.model_spec import TYPED
from flower_fgl.nn import (
    GCN,
    MODELS,
    GraphInput,
    assign_models,
    build_model,
    num_parameters,
    state_shapes,
)
from flower_fgl.nn.backbone import copy_network
from flower_fgl.nn.models import _template
from flower_fgl.nn.state import encoder_state

SIZES: dict[str, Any] = {
    "in_channels": 9,
    "hidden_channels": 8,
    "num_outputs": 3,
    "num_layers": 2,
    "dropout": 0.5,
}
TRIANGLE = torch.tensor([[0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2]])
# gine reads features of edges, which these graphs lack: see test_gine.py
names = pytest.mark.parametrize("name", sorted({*MODELS} - {"gine", *TYPED}))


def test_the_table_holds_the_published_backbones_sorted() -> None:
    expected = (
        "appnp gamlp gat gcn gcnii gin gine graphsage mlp rgcn rgcn-mean sgc sign ssgc "
        "typed-gine typed-graphsage"
    )
    assert list(MODELS) == expected.split()


@names
def test_a_built_model_has_the_state_and_output_of_its_class(name: str) -> None:
    direct = MODELS[name](**SIZES).eval()
    built = build_model(name, **SIZES, initialise=False).eval()
    assert type(built) is type(direct)
    assert state_shapes(built) == state_shapes(direct)
    built.load_state_dict(direct.state_dict())
    graph = GraphInput(torch.randn(3, 9), TRIANGLE)
    assert torch.equal(built(graph), direct(graph))


@names
def test_every_parameter_is_initialised(name: str) -> None:
    # in this mode torch fills memory it hands out with NaN
    torch.use_deterministic_algorithms(True)
    try:
        model = build_model(name, **SIZES)
    finally:
        torch.use_deterministic_algorithms(False)
    for value in [*model.parameters(), *model.buffers()]:
        assert value.isfinite().all()
    assert all(p.std() > 0.01 for p in model.parameters() if p.dim() == 2)


@names
def test_initial_parameters_are_a_function_of_the_seed(name: str) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(
            torch.nn.utils.parameters_to_vector(build_model(name, **SIZES).parameters())
        )
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


@names
def test_building_without_initialising_draws_no_random_numbers(name: str) -> None:
    before = torch.get_rng_state()
    build_model(name, **{**SIZES, "in_channels": 11}, initialise=False)
    assert torch.equal(torch.get_rng_state(), before)


@names
def test_two_models_share_nothing(name: str) -> None:
    first, second = build_model(name, **SIZES), build_model(name, **SIZES)
    before = copy.deepcopy(second.state_dict())
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.fill_(7)
    first.eval()
    first.requires_grad_(False)
    calls = []
    first.register_forward_hook(lambda *_: calls.append(1))
    second(GraphInput(torch.randn(3, 9), TRIANGLE))
    assert not calls
    assert all(module.training for module in second.modules())
    assert all(p.requires_grad for p in second.parameters())
    for key, value in second.state_dict().items():
        assert torch.equal(value, before[key])
    pairs = zip(first.modules(), second.modules(), strict=True)
    assert all(a is not b for a, b in pairs)
    buffers = zip(first.buffers(), second.buffers(), strict=True)
    assert all(a.data_ptr() != b.data_ptr() for a, b in buffers)


@names
def test_a_model_can_be_copied_deeply(name: str) -> None:
    model = build_model(name, **SIZES).eval()
    other = copy.deepcopy(model)
    graph = GraphInput(torch.randn(3, 9), TRIANGLE)
    assert torch.equal(model(graph), other(graph))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(model(graph), other(graph))


def test_models_follow_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        double = build_model("gcn", **SIZES)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    single = build_model("gcn", **SIZES)
    assert {p.dtype for p in single.parameters()} == {torch.float32}


def test_parameters_of_a_gcn_are_counted() -> None:
    model = build_model("gcn", **SIZES)
    assert num_parameters(model) == 9 * 8 + 8 + 8 * 3 + 3
    model.classifier.requires_grad_(False)
    assert num_parameters(model) == 9 * 8 + 8


def test_state_shapes_keep_names_and_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    shapes = state_shapes(model)
    assert list(shapes.items()) == [
        ("0.weight", (3, 2)),
        ("0.bias", (3,)),
        ("1.weight", (1, 3)),
    ]


def test_gamlp_has_the_parameters_that_fedpg_counts() -> None:
    # FedPG Table VII: 538k-539k on Physics (8415 features, 5 classes), width 64
    sizes = SIZES | {"in_channels": 8415, "hidden_channels": 64, "num_outputs": 5}
    count = num_parameters(build_model("gamlp", **sizes, initialise=False))
    assert 538_000 <= count < 539_500


def test_an_unknown_model_is_rejected_with_similar_names() -> None:
    message = (
        r'"graphsag"\. Did you mean "graphsage"\? Known: appnp, .*typed-graphsage\.'
    )
    with pytest.raises(ConfigError, match=message):
        build_model("graphsag", **SIZES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 1}, "num_layers of at least 2, got 1"),
        ({"in_channels": 0}, "in_channels of at least 1, got 0"),
        ({"hidden_channels": -1}, "hidden_channels of at least 1, got -1"),
        ({"num_outputs": 0}, "num_outputs of at least 1, got 0"),
        ({"dropout": 1.0}, "below 1, got 1.0"),
        ({"dropout": -0.1}, "at least 0 and below 1, got -0.1"),
    ],
)
def test_sizes_out_of_range_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("gcn", **(SIZES | change))


def test_models_are_assigned_in_turn() -> None:
    assert assign_models("gcn", 3) == ["gcn"] * 3
    assigned = assign_models("gcn, gin,graphsage", 5)
    assert assigned == ["gcn", "gin", "graphsage", "gcn", "gin"]


@pytest.mark.parametrize("listed", ["gcn,gan", "gcn,", ""])
def test_unknown_or_empty_names_are_rejected(listed: str) -> None:
    with pytest.raises(ConfigError, match="Unknown model"):
        assign_models(listed, 3)


def test_a_name_may_contain_sizes() -> None:
    sized = build_model("gcn:3x10", **SIZES)
    assert state_shapes(sized) == state_shapes(
        build_model("gcn", **(SIZES | {"num_layers": 3, "hidden_channels": 10}))
    )
    assert sized.hidden_channels == 10


@pytest.mark.parametrize("name", ["gat", "gcn", "gin", "graphsage", "mlp"])
def test_a_linear_head_follows_all_layers(name: str) -> None:
    model = build_model(f"{name}:3x10:linear", **SIZES).eval()
    assert len(model.encoder) == 3  # type: ignore[arg-type]
    out, d = SIZES["num_outputs"], SIZES["in_channels"]
    assert state_shapes(model.classifier) == {"weight": (out, 10), "bias": (out,)}
    x = torch.randn(4, d, generator=torch.Generator().manual_seed(1))
    graph = GraphInput(x, torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    h = model.embed(graph)
    torch.testing.assert_close(h, model.represent(graph).relu())
    torch.testing.assert_close(model(graph), model.classifier(h))


def test_the_encoder_under_a_linear_head_is_that_of_fedpano() -> None:
    sizes = {key: size for key, size in SIZES.items() if key != "num_outputs"}
    shared = state_shapes(build_encoder("graphsage", **sizes))
    whole = state_shapes(build_model("graphsage:linear", **SIZES))
    assert encoder_state(whole) == shared


def test_models_of_different_sizes_are_assigned_in_turn() -> None:
    assigned = assign_models("gcn, gcn:2x128,appnp:2x64:k2", 4)
    assert assigned == ["gcn", "gcn:2x128", "appnp:2x64:k2", "gcn"]


def test_propagation_steps_are_read_from_the_name() -> None:
    """APPNP with K = 2: α Z + α(1 − α) S Z + (1 − α)² S² Z, α = 0.1."""
    model = build_model("appnp:k2", **SIZES)
    assert model.coefficients == pytest.approx((0.1, 0.09, 0.81))
    assert len(build_model("appnp", **SIZES).coefficients) == 11


def test_the_ten_architectures_of_opfgl_can_be_assigned() -> None:
    names = (
        "ssgc:2x64,gcn:2x64,gcn:2x128,gcn:2x256,gcn:2x512,sgc:2x64,gcn:3x64,gcn:3x512,"
        "appnp:2x64:k2,sgc:4x64"
    )
    built = [build_model(name, **SIZES) for name in assign_models(names, 10)]
    widths = [model.hidden_channels for model in built]
    assert widths == [64, 64, 128, 256, 512, 64, 64, 512, 64, 64]
    assert [len(m.encoder) for m in built if type(m).__name__ == "GCN"] == [
        *[1] * 4,
        *[2] * 2,
    ]


@names
def test_a_copied_network_is_a_deep_copy(name: str) -> None:
    model = build_model(name, **SIZES)
    first = next(model.parameters())
    first.requires_grad_(requires_grad=False)
    made, right = copy_network(model), copy.deepcopy(model)
    assert repr(made) == repr(right)
    for one, other in zip(made.modules(), right.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
    old = dict(model.named_parameters())
    pairs = zip(made.named_parameters(), right.named_parameters(), strict=True)
    for (key, one), (_, other) in pairs:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad
        assert one.data_ptr() != old[key].data_ptr()
    graph = GraphInput(torch.rand(3, SIZES["in_channels"]), TRIANGLE)
    assert torch.equal(made.eval()(graph), right.eval()(graph))
    made.register_forward_hook(lambda *_: None)
    assert not model._forward_hooks


def test_a_network_larger_than_the_memory_can_be_measured() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    sizes = {"in_channels": 10**7, "hidden_channels": 10**6, "num_outputs": 7}
    sizes |= {"num_layers": 2, "dropout": 0}
    huge = _template("gcn", tuple(sizes.items()), torch.float32, is_measured=False)
    assert state_shapes(huge)["encoder.0.lin.weight"] == (10**6, 10**7)
    assert torch.equal(torch.rand(1), expected)


def test_layers_of_pyg_leave_no_file_behind(tmp_path: Path) -> None:
    code = (
        "import tempfile, os\nfrom flower_fgl import register\n"
        "from flower_fgl.nn import build_model\n"
        "from torch_geometric.nn import GraphSAGE\n"
        "register(backbone=GraphSAGE, name='mine')\n"
        "build_model('mine', in_channels=2, hidden_channels=2, num_outputs=2, "
        "num_layers=2, dropout=0.0)\n"
        "print(*os.listdir(tempfile.gettempdir()))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch_geometric" in done.stdout  # written, and removed at the end
    assert not list(tmp_path.glob("torch_geometric*"))


def test_the_former_name_of_the_number_of_outputs_still_counts() -> None:
    sizes = {key: size for key, size in SIZES.items() if key != "num_outputs"}
    for number in (1, 5):
        model = build_model("gcn", num_classes=number, **sizes)
        assert model.classifier.out_channels == number
        assert GCN(num_classes=number, **sizes).classifier.out_channels == number
