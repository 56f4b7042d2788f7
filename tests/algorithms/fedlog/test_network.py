from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedlog.network import (
    FedLogBranchNet,
    self_loops,
    start_nodes,
)
from flower_fgl.algorithms.fedlog.prompts import prompt_pairs
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.nn import GraphInput, num_parameters
from flower_fgl.nn.stacked import StackedInput, stack_model
from flower_fgl.protocols.fedlog import build_network

D, C, S, E = 5, 3, 4, 6


def make_network(model: str = "graphsage", **settings: Any) -> FedLogBranchNet:
    method_config = FedLogSettings(encoder_channels=8, nodes_per_class=S, **settings)
    torch.manual_seed(0)
    network = build_network(
        method_config,
        model=model,
        num_features=D,
        num_outputs=C,
        width=E,
        num_layers=2,
        dropout=0.5,
    )
    nodes = start_nodes(C * S, D)
    network.load_state_dict(
        {**network.state_dict(), **{f"nodes.{n}": x for n, x in nodes.items()}}
    )
    for layer in network.modules():
        if hasattr(layer, "scale"):  # messages large enough to change the results
            torch.nn.init.normal_(layer.scale.weight)
    return network.eval()


def make_graph() -> GraphInput:
    """A star of eight leaves, and one node alone."""
    x = torch.randn(10, D, generator=torch.Generator().manual_seed(2))
    star = [(0, leaf) for leaf in range(1, 9)]
    return GraphInput(x, torch.tensor(star + [(v, u) for u, v in star]).T)


def slow_prediction(network: FedLogBranchNet, graph: GraphInput) -> Tensor:
    """Eqs. (1)-(3), node by node."""
    h = network.encoder(graph)
    rows = []
    for v in range(graph.num_nodes):
        neighbours = graph.edge_index[0][graph.edge_index[1] == v]
        around = h[neighbours].mean(0) if len(neighbours) else torch.zeros(E)
        alpha = torch.sigmoid(torch.tensor(len(neighbours) - 4.0))
        mixed = torch.zeros(C)
        for name, weight in (("head", alpha), ("tail", 1 - alpha)):
            prototypes = network.encoder(self_loops(network.nodes[name]))
            branch = network.classifier[name]
            moved = branch.norm(h[v])[None]
            for layer in branch.layers:
                moved = layer(moved, around[None], prototypes)
            means = torch.stack([part.mean(0) for part in prototypes.split(S)])
            mixed += weight * (-(moved - means).square().sum(1)).softmax(0)
        rows.append(mixed)
    return torch.stack(rows)


@pytest.mark.parametrize("pairs", [1 << 14, 1])
def test_prediction_equals_a_loop_over_nodes(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_fgl.algorithms.fedlog.network.PAIRS", pairs)
    network, graph = make_network(), make_graph()
    with torch.no_grad():
        p = network(graph).exp()
        torch.testing.assert_close(p, slow_prediction(network, graph))
    torch.testing.assert_close(p.sum(1), torch.ones(10), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pairs", [1 << 14, 1])
def test_selected_nodes_are_predicted_as_among_all_nodes(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_fgl.algorithms.fedlog.network.PAIRS", pairs)
    network, graph = make_network(), make_graph()
    wanted = torch.zeros(10, dtype=torch.bool)
    assert not network.predict(graph, wanted).any()
    wanted[[0, 3, 9]] = True
    with torch.inference_mode():
        some, all_of_them = network.predict(graph, wanted), network(graph)
    torch.testing.assert_close(some[wanted], all_of_them[wanted])
    assert not some[~wanted].any()


def test_stacked_clients_predict_only_the_wanted_nodes_and_as_one_by_one() -> None:
    whole, own = make_graph(), make_network()
    part = GraphInput(whole.x[:4], whole.edge_index[:, whole.edge_index.max(0)[0] < 4])
    other = {name: 2 * value for name, value in own.state_dict().items()}
    alone = [own(whole), make_network().eval()]
    alone[1].load_state_dict(other)
    stack = stack_model(make_network(), [own.state_dict(), other], 2).eval()
    wanted = torch.zeros(2, whole.num_nodes, dtype=torch.bool)
    wanted[0, [1, 5, 9]], wanted[1, 2] = True, True
    found = stack.predict(StackedInput([whole, part]), wanted)
    torch.testing.assert_close(found[0, [1, 5, 9]], alone[0][[1, 5, 9]])
    torch.testing.assert_close(found[1, 2], alone[1](part)[2])
    assert not found[0, [2, 3, 4]].any()  # not computed


@pytest.mark.parametrize("shape", ["loops", "pairs"])
def test_graphs_of_a_known_shape_equal_the_same_graphs_one_by_one(shape: str) -> None:
    x = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(4))
    nodes, own = [x, 3 * x.flip(1)], make_network()
    other = {name: 2 * value for name, value in own.state_dict().items()}
    alone = [make_network(), make_network()]
    alone[1].load_state_dict(other)

    def make(nodes: Tensor, prompts: Tensor) -> GraphInput:
        return self_loops(nodes) if shape == "loops" else prompt_pairs(nodes, prompts)

    stack = stack_model(make_network(), [own.state_dict(), other], 2)
    graph = make(*nodes)
    assert graph.shape == shape
    found = stack.embed(graph)
    expected = [
        network.embed(make(a, b)) for network, a, b in zip(alone, *nodes, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected))
    weight = torch.linspace(-1, 1, found[0].numel()).view_as(found[0])
    ((found[0] + found[1]) * weight).sum().backward()
    (sum(expected) * weight).sum().backward()
    for name, parameter in alone[1].encoder.named_parameters():
        stacked = stack.encoder.get_parameter(name).grad
        assert stacked is not None
        torch.testing.assert_close(stacked[1], parameter.grad)


def test_a_learnable_node_is_its_own_neighbour() -> None:
    network = make_network()
    first, second = network.encoder.encoder[0], network.encoder.classifier
    x = network.nodes["tail"]
    h = (x @ (first.lin_l.weight + first.lin_r.weight).T + first.lin_l.bias).relu()
    h = h @ (second.lin_l.weight + second.lin_r.weight).T + second.lin_l.bias
    torch.testing.assert_close(network.prototypes()["tail"], h)


@pytest.mark.parametrize("model", ["gcn", "gat", "gin", "mlp", "appnp"])
def test_any_backbone_can_be_the_encoder(model: str) -> None:
    log_p = make_network(model)(make_graph())
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(10))


def test_relabelling_the_slots_of_a_class_changes_no_prediction() -> None:
    network, graph = make_network(), make_graph()
    with torch.no_grad():
        before = network(graph)
        for name in ("head", "tail"):
            nodes = network.nodes[name].view(C, S, D)
            network.nodes[name].copy_(nodes[:, [2, 0, 3, 1]].reshape(C * S, D))
        torch.testing.assert_close(network(graph), before)


def test_alpha_can_be_fixed() -> None:
    network, graph = make_network(alpha_fixed=0.5), make_graph()
    assert network.head_weights(graph).tolist() == [0.5] * 10
    by_degree = make_network().head_weights(graph)
    assert by_degree[0] > 0.98  # eight neighbours
    assert by_degree[9] < 0.05


def test_coras_network_has_the_size_of_the_specification() -> None:
    network = build_network(
        FedLogSettings(),
        model="graphsage",
        num_features=1433,
        num_outputs=7,
        width=64,
        num_layers=2,
        dropout=0.5,
    )
    assert num_parameters(network.encoder) == 383_424
    assert num_parameters(network.classifier) == 83_712
    assert network.nodes["head"].numel() == 200_620
    assert sum(t.numel() for t in network.shared_state().values()) == 467_136
