"""Backbones of typed graphs against numbers derived by hand and PyG's layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.nn import RGCNConv

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.model_spec import TYPED
from flower_fgl.core.schema import Schema, TypedModel
from flower_fgl.nn import GraphInput, build_model
from flower_fgl.nn import relations as relations_module
from flower_fgl.nn.relations import (
    RelationPairs,
    Relations,
    relation_means,
    relation_sum,
)

H = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
INDEX = torch.tensor([[0, 1, 0], [2, 2, 1]])
RELATION = torch.tensor([0, 0, 1])
BASES = torch.stack([torch.eye(2), torch.eye(2).flip(0)])
COEFFICIENTS = torch.tensor([[1.0, 0.5], [-1.0, 2.0]])
SCHEMA = Schema(
    "a", (("a", 2), ("b", 0)), (("a", "r", "b"), ("b", "s", "a"), ("a", "t", "a"))
)


def typed_input(seed: int = 0) -> GraphInput:
    """Return a graph with three nodes of kind a and two of kind b."""
    x = torch.zeros(5, 2)
    x[:3] = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
    node_type = torch.tensor([0, 0, 0, 1, 1])
    index = torch.tensor([[0, 1, 3, 4, 2], [3, 4, 1, 2, 0]])
    relation = torch.tensor([0, 0, 1, 1, 2])
    graph = GraphInput(x, torch.empty((2, 0), dtype=torch.int64))
    return graph.with_relations(Relations(node_type, index, relation))


def build(name: str, schema: Schema = SCHEMA, **changes: Any) -> Any:
    """Return a typed backbone with drawn weights."""
    text = TypedModel(schema, changes.pop("num_bases", 2), True).to_text()
    torch.manual_seed(0)
    values = {
        "in_channels": schema.num_features,
        "hidden_channels": 4,
        "num_outputs": 3,
        "num_layers": 2,
        "dropout": 0.0,
    }
    return build_model(name, messages=text, **(values | changes))


def test_means_per_relation_are_summed_as_computed_by_hand() -> None:
    weights = torch.einsum("rb,bio->rio", COEFFICIENTS, BASES)
    root = H @ torch.tensor([[1.0, 1.0], [0.0, 1.0]]) + torch.tensor([0.1, -0.1])
    pairs = RelationPairs.of(INDEX, RELATION, 2)
    out = root + relation_sum(H, pairs, weights)
    expected = torch.tensor([[1.1, 0.9], [-0.9, 2.9], [1.85, 2.65]])
    torch.testing.assert_close(out, expected)


def test_layer_equals_rgcnconv_of_pyg() -> None:
    layer = RGCNConv(2, 2, 2, num_bases=2)
    with torch.no_grad():
        layer.weight.copy_(BASES)
        layer.comp.copy_(COEFFICIENTS)
    weights = torch.einsum("rb,bio->rio", COEFFICIENTS, BASES)
    pairs = RelationPairs.of(INDEX, RELATION, 2)
    out = H @ layer.root + layer.bias + relation_sum(H, pairs, weights)
    torch.testing.assert_close(out, layer(H, INDEX, RELATION))


@pytest.mark.parametrize("name", TYPED)
def test_order_of_edges_kinds_and_relations_changes_no_output(name: str) -> None:
    graph, model = typed_input(), build(name)
    out = model(graph)
    assert out.shape == (5, 3)
    other = Schema(SCHEMA.target, SCHEMA.widths[::-1], SCHEMA.relations[::-1])
    moved = build(name, other)
    own = model.state_dict()
    renamed = {}
    for key, tensor in own.items():
        parts = key.split(".")
        if parts[1] in ("types", "relations", "reverse"):
            last = {"types": 1}.get(parts[1], 2)
            parts[2] = str(last - int(parts[2]))
        renamed[".".join(parts)] = tensor
    moved.load_state_dict(renamed)
    relations = graph.relations
    assert relations is not None
    order = torch.tensor([4, 2, 0, 1, 3])
    swapped = graph.with_relations(
        Relations(
            1 - relations.node_type,
            relations.index[:, order],
            2 - relations.relation[order],
        )
    )
    torch.testing.assert_close(moved(swapped), out)


@pytest.mark.parametrize("name", TYPED)
def test_relation_without_edges_gets_no_gradient_and_changes_nothing(name: str) -> None:
    graph = typed_input()
    relations = graph.relations
    assert relations is not None
    kept = relations.relation != 2
    graph = graph.with_relations(
        Relations(
            relations.node_type, relations.index[:, kept], relations.relation[kept]
        )
    )
    model = build(name)
    out = model(graph)
    out.sum().backward()
    for layer in range(len(model.encoder["relations"][0])):
        for way in ("relations", "reverse"):
            gradient = model.encoder[way][2][layer].weight.grad
            assert gradient is None or not gradient.any()
            gradient = model.encoder[way][0][layer].weight.grad
            assert gradient is not None
    with torch.no_grad():
        model.encoder["relations"][2][0].weight.add_(5)
    torch.testing.assert_close(model(graph), out)


def test_kinds_have_input_maps_of_their_own() -> None:
    graph, model = typed_input(), build("rgcn", num_layers=1)
    with torch.no_grad():
        model.encoder["types"][0].bias.fill_(1.0)
        model.encoder["types"][1].bias.fill_(2.0)
    seen: list[torch.Tensor] = []
    model.root = lambda layer, h: seen.append(h) or torch.zeros_like(h)
    model(graph)
    kind = model.encoder["types"][0]
    torch.testing.assert_close(seen[0][:3], graph.x[:3] @ kind.weight.T + 1)
    torch.testing.assert_close(seen[0][3:], torch.full((2, 4), 2.0))


def test_without_bases_each_relation_has_a_matrix() -> None:
    shapes = {
        k: tuple(v.shape) for k, v in build("rgcn", num_bases=0).state_dict().items()
    }
    assert shapes["encoder.relations.2.1.weight"] == (4, 4)
    assert not any("bases" in key for key in shapes)


def test_parameters_are_those_of_the_formula() -> None:
    schema = Schema("a", (("a", 5), ("b", 3)), (("a", "r", "b"), ("b", "s", "a")))
    text = TypedModel(schema, 2, True).to_text()
    model = build_model(
        "rgcn", in_channels=8, hidden_channels=8, num_outputs=3, num_layers=2,
        dropout=0.0, messages=text,
    )  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) == 523


def test_plain_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a typed graph"):
        build_model(
            "rgcn", in_channels=2, hidden_channels=4, num_outputs=2, num_layers=2,
            dropout=0.0,
        )  # fmt: skip


def test_model_survives_its_text() -> None:
    model = TypedModel(SCHEMA, 3, False)
    assert TypedModel.from_text(model.to_text()) == model
    assert TypedModel.from_text("both:3") is None


def sample(seed: int, kinds: list[int]) -> GraphInput:
    """Return a graph with nodes of some kinds, and random edges that fit the relations."""
    draw = torch.Generator().manual_seed(seed)
    node_type = torch.tensor(kinds)
    x = torch.randn(len(kinds), 2, generator=draw) * (node_type == 0)[:, None]
    edges = []
    for number, (source, _, target) in enumerate(SCHEMA.relations):
        ends = [[i for i, k in enumerate(kinds) if k == "ab".index(e)] for e in
                (source, target)]  # fmt: skip
        if all(ends):
            edges += [[a, b, number] for a in ends[0] for b in ends[1] if (a + b) % 2]
    rows = torch.tensor(edges, dtype=torch.int64).reshape(-1, 3).T
    graph = GraphInput(x, torch.empty((2, 0), dtype=torch.int64))
    return graph.with_relations(Relations(node_type, rows[:2], rows[2]))


def unite(graphs: list[GraphInput]) -> GraphInput:
    """Return graphs as one batch."""
    first, parts = 0, []
    for graph in graphs:
        assert graph.relations is not None
        parts.append(replace(graph.relations, index=graph.relations.index + first))
        first += graph.num_nodes
    sizes = torch.tensor([graph.num_nodes for graph in graphs])
    whole = GraphInput(
        torch.cat([graph.x for graph in graphs]),
        torch.empty((2, 0), dtype=torch.int64),
        batch=torch.repeat_interleave(torch.arange(len(graphs)), sizes),
    )
    return whole.with_relations(
        Relations(
            torch.cat([part.node_type for part in parts]),
            torch.cat([part.index for part in parts], dim=1),
            torch.cat([part.relation for part in parts]),
        )
    )


KINDS_OF = [[0, 0, 1, 0], [0], [1, 1, 0], [0, 0, 0], [1, 0, 1, 0, 0]]


@pytest.mark.parametrize("target", ["", "a", "b"])
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", TYPED)
def test_a_set_equals_its_graphs_one_by_one(name: str, how: str, target: str) -> None:
    graphs = [sample(seed, kinds) for seed, kinds in enumerate(KINDS_OF)]
    schema = replace(SCHEMA, target=target)
    model, of_nodes = build(name, schema, readout=how), build(name)
    model.load_state_dict(of_nodes.state_dict())
    expected = []
    for graph, kinds in zip(graphs, KINDS_OF, strict=True):
        h = of_nodes.represent(graph)
        own = [i for i, k in enumerate(kinds) if target in ("", "ab"[k])]
        pooled = sum((h[i] for i in own), torch.zeros(4))
        pooled = pooled / max(len(own), 1) if how == "mean" else pooled
        expected.append(of_nodes.classifier(pooled))
    batch = unite(graphs)
    torch.testing.assert_close(model(batch), torch.stack(expected))
    chosen = torch.tensor([4, 0, 2])
    few = torch.stack([expected[k] for k in chosen.tolist()])
    torch.testing.assert_close(model(batch.select(chosen)), few)
    torch.testing.assert_close(model(batch.to("cpu").select(chosen)), few)


def test_means_of_many_edges_equal_those_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(0, 50, (2, 400), generator=draw)
    relation = torch.randint(0, 5, (400,), generator=draw)
    found = []
    for fewest in (1, 1000):
        monkeypatch.setattr(relations_module, "FEWEST", fewest)
        h = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
        h.requires_grad_()
        means = relation_means(h, RelationPairs.of(index, relation, 5))
        means.square().sum().backward()
        found.append((means.detach(), h.grad))
    torch.testing.assert_close(*found)


def test_the_network_of_fedhgns_code_equals_slow_loops() -> None:
    graph, model = sample(3, [0, 0, 1, 0, 1, 1]), build("rgcn-mean", num_layers=3)
    assert graph.relations is not None
    encoder = model.encoder
    edges = [
        (way, int(r), *ends)
        for r, (a, b) in zip(
            graph.relations.relation, graph.relations.index.T.tolist(), strict=True
        )
        for way, ends in (("relations", (a, b)), ("reverse", (b, a)))
    ]
    h = []
    for x, kind in zip(graph.x, graph.relations.node_type.tolist(), strict=True):
        layer = encoder["types"][kind]
        h.append(layer.weight @ x[: layer.weight.shape[1]] + layer.bias)
    for number in range(3):
        out = []
        for node in range(6):
            total = encoder["roots"][number].bias.clone()
            for way, r in {(way, r) for way, r, _, target in edges if target == node}:
                own = [h[s] for w, q, s, t in edges if (w, q, t) == (way, r, node)]
                mean = sum(own) / len(own)
                if number:
                    a = encoder[way][r][number - 1].weight
                    bases = encoder["bases"][number - 1].weight
                    mean = mean @ sum(c * v for c, v in zip(a, bases, strict=True))
                total = total + mean
            out.append(total.relu())
        h = out
    expected = model.classifier(torch.stack(h))
    torch.testing.assert_close(model(graph), expected)


def test_shared_parameters_of_fedhgns_code_are_those_of_its_formula() -> None:
    model = build("rgcn-mean", hidden_channels=64, num_outputs=4, num_bases=20)
    local = {"types", "relations", "reverse"}
    shared = [
        tensor
        for name, tensor in model.state_dict().items()
        if name.split(".")[1] not in local
    ]
    assert sum(tensor.numel() for tensor in shared) == 82_308
    largest = model.encoder["bases"][0].weight.abs().max().item()
    assert 0.04 < largest <= 0.0473
    with pytest.raises(ConfigError, match="needs num-bases above 0"):
        build("rgcn-mean", num_bases=0)
