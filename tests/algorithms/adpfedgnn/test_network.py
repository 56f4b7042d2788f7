from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn.agent import (
    Candidates,
    NeighbourLists,
    QNetwork,
    feature_table,
    keep_probabilities,
    sample_block,
)
from flower_fgl.algorithms.adpfedgnn.network import (
    MIEstimator,
    TwoBranchNet,
    build_backbone,
    build_networks,
    club_bound,
    residual_loss,
)
from flower_fgl.methods import parse_config
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import GraphInput


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_the_bound_of_one_dimension_is_the_covariance() -> None:
    mean, flat = column(1, -1), column(0, 0)
    # own terms: 1 and 1; means over both nodes: (1 + 9) / 2 = 5; ½ (5 − 1) = 2
    assert float(club_bound(mean, flat, column(2, -2))) == pytest.approx(2)
    # anti-correlated: −2, which would be rewarded without limit
    assert float(club_bound(mean, flat, column(-2, 2))) == 0


def test_the_printed_bound_sums_over_all_pairs() -> None:
    # each node: −1 + 9; summed over both
    bound = club_bound(column(1, -1), column(0, 0), column(2, -2), norm="literal")
    assert float(bound) == pytest.approx(16)
    least = club_bound(column(1, 1), column(0, 0), column(2, 2), norm="literal")
    assert float(least) == 0


@pytest.mark.parametrize("norm", ["mean", "literal"])
def test_the_bound_equals_a_loop_over_pairs(
    norm: str, generator: torch.Generator
) -> None:
    mean, local = torch.randn(2, 6, 3, generator=generator)
    mean = mean + 2 * local  # correlated, so that nothing is clamped
    log_variance = torch.randn(6, 3, generator=generator).tanh()
    total = 0.0
    for v in range(6):
        for d in range(3):
            precision = math.exp(-float(log_variance[v, d]))
            squares = [float((mean[v, d] - local[u, d]) ** 2) for u in range(6)]
            if norm == "mean":
                total += 0.5 * precision * (sum(squares) / 6 - squares[v]) / 6
            else:
                total += precision * (sum(squares) - 2 * squares[v])
    bound = club_bound(mean, log_variance, local, norm=norm)
    assert float(bound) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("norm", ["mean", "literal"])
def test_padding_changes_no_loss_of_a_stack(
    norm: str, generator: torch.Generator
) -> None:
    sizes, share = (5, 3), torch.zeros(2, 5)
    mean, log_variance, local = torch.randn(3, 2, 5, 4, generator=generator)
    for row, size in zip(share, sizes, strict=True):
        row[:size] = 1 / size
    bounds = club_bound(mean, log_variance, local, norm=norm, share=share)
    losses = residual_loss(mean, log_variance, local, share)
    for k, size in enumerate(sizes):
        one = [part[k, :size] for part in (mean, log_variance, local)]
        torch.testing.assert_close(bounds[k], club_bound(*one, norm=norm))
        torch.testing.assert_close(losses[k], residual_loss(*one))


def test_the_residual_loss_is_least_at_the_variance_of_the_residuals() -> None:
    variance = 0.7  # its logarithm lies in [−1, 1]
    mean, local = column(0, 0), column(math.sqrt(variance), -math.sqrt(variance))
    log_variance = torch.zeros(2, 1, requires_grad=True)
    optimizer = torch.optim.SGD([log_variance], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        residual_loss(mean, log_variance, local).backward()
        optimizer.step()
    torch.testing.assert_close(
        log_variance.detach(), torch.full((2, 1), math.log(variance))
    )


def test_the_residual_loss_by_hand() -> None:
    # (1 − 3)² / e + 1 and (0 − 1)² / 1 + 0, mean of both
    loss = residual_loss(column(1, 0), column(1, 0), column(3, 1))
    assert float(loss) == pytest.approx((4 / math.e + 1 + 1) / 2)


def test_the_estimator_halves_the_width_and_bounds_the_variance(
    generator: torch.Generator,
) -> None:
    estimator = MIEstimator(6)
    shared = 50 * torch.randn(9, 6, generator=generator)
    mean, log_variance = estimator(shared)
    assert mean.shape == log_variance.shape == (9, 6)
    assert float(log_variance.detach().abs().max()) <= 1
    assert estimator.mean[0].out_features == 3


def test_the_bound_has_a_gradient_for_both_branches(
    generator: torch.Generator,
) -> None:
    estimator = MIEstimator(4)
    shared = torch.randn(8, 4, generator=generator, requires_grad=True)
    local = shared.detach().clone().requires_grad_()
    for _ in range(300):  # an untrained estimator gives the bound 0
        estimator.zero_grad()
        residual_loss(*estimator(shared.detach()), local.detach()).backward()
        with torch.no_grad():
            for p in estimator.parameters():
                p -= 0.05 * p.grad
    bound = club_bound(*estimator(shared), local)
    bound.backward()
    assert float(bound.detach()) > 0
    assert float(shared.grad.abs().sum()) > 0
    assert float(local.grad.abs().sum()) > 0


N, D, C, H = 20, 6, 3, 8


def net_of(model: str = "graphsage", *, agent: QNetwork | None = None) -> TwoBranchNet:
    config = parse_config({"method": "adpfedgnn", "hidden-channels": H})
    backbone = build_backbone(config, model, num_features=D, num_outputs=C)
    return TwoBranchNet(
        backbone, agent, ADPFedGNNSettings(beta=0.5, eval_fanout=50)
    ).eval()


@pytest.fixture
def graph(generator: torch.Generator) -> GraphInput:
    upper = torch.rand(N, N, generator=generator).triu(1) > 0.7
    upper[:, -1] = False  # the last node is alone
    edges = (upper | upper.T).nonzero().T.contiguous()
    return GraphInput(torch.randn(N, D, generator=generator), edges)


def plain_sage(net: TwoBranchNet, x: Tensor, adjacency: list[Tensor]) -> Tensor:
    """Two layers of mean(H) W_l + b + H W_r with ReLU, then the linear classifier."""
    state, h = net.backbone.state_dict(), x
    for number, a in enumerate(adjacency):
        mean = a @ h / a.sum(1, keepdim=True).clamp(min=1)
        left, right, bias = (
            state[f"encoder.{number}.{name}"]
            for name in ("lin_l.weight", "lin_r.weight", "lin_l.bias")
        )
        h = F.relu(mean @ left.T + bias + h @ right.T)
    return h @ state["classifier.weight"].T + state["classifier.bias"]


def adjacency_of(source: Tensor, target: Tensor, size: int) -> Tensor:
    a = torch.zeros(size, size)
    a[target, source] = 1
    return a


def agent_that(keeps: bool) -> QNetwork:
    agent = QNetwork(D, 4)
    with torch.no_grad():
        agent.rest[-1].weight.zero_()
        agent.rest[-1].bias.copy_(torch.tensor([0.0, 1.0 if keeps else -1.0]))
    return agent


def test_the_classifier_is_linear_after_all_layers() -> None:
    state = net_of().backbone.state_dict()
    assert state["encoder.0.lin_l.weight"].shape == (H, D)
    assert state["encoder.1.lin_l.weight"].shape == (H, H)
    assert state["classifier.weight"].shape == (C, H)


def test_keeping_all_neighbours_is_plain_graphsage_on_the_block(
    graph: GraphInput, generator: torch.Generator
) -> None:
    net = net_of()
    lists = NeighbourLists.of(graph.edge_index, N)
    batch = torch.tensor([4, 0, N - 1])
    block = sample_block(lists, batch, limit=3, num_layers=2, generator=generator)
    table, _ = feature_table(graph, block.nodes)
    layers = block.places(N)
    graphs = [
        table.with_edges(torch.stack([layer.neighbour, layer.target]))
        for layer in layers
    ]
    h, z = net.run_branch(net.effective(net.masks()[0]), graphs, slice(3))
    assert h.shape == (3, H)
    adjacency = [
        adjacency_of(layer.neighbour, layer.target, len(block.nodes))
        for layer in layers
    ]
    torch.testing.assert_close(z, plain_sage(net, table.x, adjacency)[:3])


def test_an_agent_that_keeps_all_predicts_as_plain_graphsage(
    graph: GraphInput,
) -> None:
    a = adjacency_of(*graph.edge_index, N)
    for agent in (None, agent_that(keeps=True)):
        net = net_of(agent=agent)
        net.is_greedy = True
        with torch.inference_mode():
            found = net(graph)
        torch.testing.assert_close(found, plain_sage(net, graph.x, [a, a]))
        sparse = GraphInput(graph.x.to_sparse_csr(), graph.edge_index)
        torch.testing.assert_close(net(sparse).detach(), found)


@pytest.mark.parametrize("model", ["graphsage", "gat"])
def test_an_agent_that_drops_all_predicts_each_node_from_its_own_features(
    model: str, graph: GraphInput
) -> None:
    net = net_of(model, agent=agent_that(keeps=False))
    net.is_greedy = True
    found = net(graph)
    assert bool(found.isfinite().all())
    nobody = torch.empty(2, 0, dtype=torch.int64)
    for node in (0, N - 1):
        alone = GraphInput(graph.x[node : node + 1], nobody)
        torch.testing.assert_close(net(alone), found[node : node + 1])
    if model == "graphsage":
        zeros = torch.zeros(N, N)
        torch.testing.assert_close(found, plain_sage(net, graph.x, [zeros, zeros]))


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_neighbour_is_weighted_by_its_probability_or_by_the_better_action(
    is_greedy: bool, graph: GraphInput
) -> None:
    agent = QNetwork(D, 4)
    net = net_of(agent=agent)
    net.is_greedy = is_greedy
    source, target = graph.edge_index
    pairs = Candidates(target, source)
    with torch.no_grad():  # keep probability above ½ for half of the candidates
        agent.rest[-1].bias[1] -= keep_probabilities(agent, graph, pairs).logit().mean()
        agent.rest[-1].weight *= 20
        agent.rest[-1].bias *= 20
    chance = keep_probabilities(agent, graph, pairs)
    weight = (chance >= 0.5).float() if is_greedy else chance
    assert 0 < int((chance < 0.5).sum()) < chance.numel()
    means = []
    for row in weight:
        a = torch.zeros(N, N)
        a[target, source] = row
        means.append(a / a.sum(1, keepdim=True).clamp(min=1e-9))
    shared, local = (plain_sage(net, graph.x, [a, a]) for a in means)
    torch.testing.assert_close(net(graph).detach(), (shared + local) / 2)


def test_logits_are_fused_by_beta_and_masks_are_applied(graph: GraphInput) -> None:
    net = net_of()
    size = len(net.weights())
    net.global_mask = torch.arange(size) % 2 == 0
    net.local_mask = torch.arange(size) % 3 == 0
    views = [graph.with_edges(graph.edge_index)] * 2
    shared, local = (
        net.run_branch(net.effective(masks), views)[1].detach() for masks in net.masks()
    )
    assert not torch.equal(shared, local)
    for beta in (0.0, 0.3, 1.0):
        net.beta = beta
        torch.testing.assert_close(
            net(graph).detach(), beta * shared + (1 - beta) * local
        )


def test_masks_of_zeros_give_the_same_logits_for_every_class(
    graph: GraphInput,
) -> None:
    net = net_of()
    net.global_mask = net.local_mask = torch.zeros_like(net.local_mask)
    assert net(graph).detach().abs().max() == 0


def test_neighbours_beyond_the_fanout_are_sampled_with_a_fixed_seed(
    graph: GraphInput,
) -> None:
    net = net_of()
    everyone = net(graph).detach()
    net.fanout = 2
    first, second = net(graph).detach(), net(graph).detach()
    assert torch.equal(first, second)
    assert not torch.equal(first, everyone)


def test_weights_are_restored_from_their_vector() -> None:
    net = net_of("gat")
    flat = torch.arange(len(net.weights()), dtype=torch.float32)
    net.load_weights(flat)
    assert torch.equal(net.weights(), flat)


def test_only_networks_that_the_settings_use_are_built() -> None:
    def names(**settings: object) -> set[str]:
        values = {f"adpfedgnn.{key}": value for key, value in settings.items()}
        config = parse_config({"method": "adpfedgnn", **values})
        return set(build_networks(config, D, H))

    assert names() == {"agent", "estimator"}
    assert names(rl=False) == {"estimator"}
    assert names(selection="all") == {"estimator"}
    assert names(selection="random-drop") == {"agent", "estimator"}
    assert names(mi=False) == names(decouple=False) == {"agent"}
    assert names(decouple=False, rl=False) == set()


def test_initial_weights_depend_on_the_seed() -> None:
    assert torch.equal(net_of().weights(), net_of().weights())
