from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.opfgl import pairwise, pseudo_graph
from flower_fgl.algorithms.opfgl.alignment import ClassTargets, alignment_loss
from flower_fgl.algorithms.opfgl.pairwise import smoothness_loss
from flower_fgl.algorithms.opfgl.pseudo_graph import (
    LinkPredictor,
    PseudoGraphGenerator,
    generate,
    link_weights,
    propagated,
    pseudo_counts,
)
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.opfgl import OPFGLSettings

C, D = 3, 5
COUNTS = torch.tensor([40, 10, 50])
QUICK = OPFGLSettings(server_steps=60, lr_features=0.05, lr_links=0.01, link_channels=8)


@pytest.fixture
def target(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    mean = torch.randn(C, 2 * D, generator=generator)
    return mean, torch.rand(C, 2 * D, generator=generator)


def make(
    target: tuple[Tensor, Tensor],
    num_nodes: list[int],
    settings: OPFGLSettings = QUICK,
    counts: Tensor = COUNTS,
) -> PseudoGraphGenerator:
    return PseudoGraphGenerator(
        *target, counts, torch.tensor(num_nodes), num_features=D, depth=1,
        settings=settings, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip


def all_finite(trainer: PseudoGraphGenerator) -> bool:
    values = [trainer.features, *trainer.links.parameters()]
    return all(bool(v.isfinite().all()) for v in values)


def test_the_link_predictor_is_the_mlp_with_batch_norm_over_all_pairs(
    generator: torch.Generator,
) -> None:
    links = LinkPredictor(D, 8)
    with torch.no_grad():
        for value in links.parameters():
            value.normal_(generator=generator)
    mlp = nn.Sequential(
        nn.Linear(2 * D, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1),
    )  # fmt: skip
    state = {
        "0.weight": torch.cat(links.first.chunk(2), dim=1), "1.weight": links.scale[0],
        "1.bias": links.shift[0], "3.weight": links.second.weight,
        "4.weight": links.scale[1], "4.bias": links.shift[1],
        "6.weight": links.last.weight, "6.bias": links.last.bias,
    }  # fmt: skip
    mlp.load_state_dict(state, strict=False)
    x = torch.randn(6, D, generator=generator, requires_grad=True)
    both = torch.cat([x.repeat_interleave(6, dim=0), x.repeat(6, 1)], dim=1)
    g = mlp(both).view(6, 6)
    want = (g + g.T) / 2
    got = links(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    pull = torch.randn(6, 6, generator=generator)
    (mine,), (theirs,) = (torch.autograd.grad(z, x, pull) for z in (got, want))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_the_adjacency_is_symmetric_thresholded_and_without_loops(
    generator: torch.Generator, monkeypatch
) -> None:
    monkeypatch.setattr(pseudo_graph, "THRESHOLD", 0.2)
    raw = torch.randn(12, 12, generator=generator) * 3
    scores = (raw + raw.T).requires_grad_()
    weight = link_weights(scores)
    assert torch.equal(weight, weight.T)
    assert not weight.diagonal().any()
    kept = weight > 0
    off = ~torch.eye(12, dtype=torch.bool)
    assert torch.equal(kept, (torch.sigmoid(scores) >= 0.2) & off)
    assert (weight[kept] <= 1).all()
    (to_scores,) = torch.autograd.grad(weight.sum(), scores)
    a = weight.detach()
    torch.testing.assert_close(to_scores, a * (1 - a))  # zero where no edge is kept


def test_links_are_kept_from_one_percent_on(monkeypatch) -> None:
    scores = torch.logit(torch.tensor([[0.5, 0.009], [0.009, 0.5]]))
    assert not link_weights(scores).any()
    assert link_weights(torch.zeros(2, 2)).tolist() == [[0.0, 0.5], [0.5, 0.0]]
    monkeypatch.setattr(pseudo_graph, "THRESHOLD", 0.5)  # σ(0) is the threshold
    assert link_weights(torch.zeros(2, 2)).tolist() == [[0.0, 0.5], [0.5, 0.0]]


def test_a_hard_adjacency_is_zero_or_one_with_the_gradient_of_the_weight(
    generator: torch.Generator, monkeypatch
) -> None:
    monkeypatch.setattr(pseudo_graph, "THRESHOLD", 0.3)
    raw = torch.randn(8, 8, generator=generator) * 3
    scores = (raw + raw.T).requires_grad_()
    soft, hard = (link_weights(scores, is_hard=h) for h in (False, True))
    torch.testing.assert_close(hard.detach(), (soft > 0).float())
    to_soft, to_hard = (torch.autograd.grad(a.sum(), scores)[0] for a in (soft, hard))
    assert torch.equal(to_soft, to_hard)
    assert to_hard.any()


def test_propagation_normalises_the_graph_with_its_loops(generator):
    raw = torch.rand(4, 4, generator=generator).triu(1)
    a = (raw + raw.T).requires_grad_()
    x = torch.randn(4, 3, generator=generator, requires_grad=True)
    looped = a + torch.eye(4)
    root = torch.diag(looped.sum(dim=1).rsqrt())
    hop = root @ looped @ root
    want = torch.cat([x, hop @ x, hop @ hop @ x], dim=1)
    got = propagated(x, a, 2)
    torch.testing.assert_close(got, want)
    pull = torch.randn(4, 9, generator=generator)
    mine, theirs = (torch.autograd.grad(out, (x, a), pull) for out in (got, want))
    torch.testing.assert_close(mine[0], theirs[0])
    # A' is symmetric: only the sum of both entries of a pair matters
    mine_sum, their_sum = (to_a + to_a.T for _, to_a in (mine, theirs))
    torch.testing.assert_close(mine_sum, their_sum)


def test_the_alignment_loss_is_that_of_a_slow_loop(generator, target):
    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    x = torch.randn(6, 2 * D, generator=generator, requires_grad=True)
    mean, deviation = target
    want = torch.zeros(())
    for c in range(C):
        own = x[labels == c]
        term = F.mse_loss(own.mean(dim=0), mean[c])
        if len(own) > 1:
            term = term + F.mse_loss(own.std(dim=0), deviation[c])
        want = want + float(COUNTS[c]) / 100 * term
    got = alignment_loss(x, ClassTargets.of(labels, mean, deviation, COUNTS))
    torch.testing.assert_close(got, want)
    (mine,), (theirs,) = (torch.autograd.grad(loss, x) for loss in (got, want))
    torch.testing.assert_close(mine, theirs)


def test_a_class_without_pseudo_nodes_aligns_nothing() -> None:
    mean, deviation = torch.tensor([[3.0], [99.0]]), torch.ones(2, 1)
    one, labels = torch.tensor([[1.0]]), torch.tensor([0])
    counts = torch.tensor([1, 3])
    loss = alignment_loss(one, ClassTargets.of(labels, mean, deviation, counts))
    assert float(loss) == pytest.approx((3 - 1) ** 2 / 4)
    few = ClassTargets.of(labels, mean[:1], deviation[:1], counts[:1])
    alone = alignment_loss(one, few)
    assert float(alone) == pytest.approx((3 - 1) ** 2)


def slow_objective(
    links: LinkPredictor, x: Tensor, labels: list[int], target: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Eqs. (10) to (12) with loops over pairs; alignment and smoothness."""
    size = len(x)
    pairs = [torch.cat([x[i], x[j]]) for i in range(size) for j in range(size)]
    rows = torch.stack(
        [torch.cat(links.first.chunk(2), dim=1) @ pair for pair in pairs]
    )
    for layer in (0, 1):
        variance = (rows - rows.mean(0)).square().mean(0)
        rows = (rows - rows.mean(0)) / (variance + 1e-5).sqrt()
        rows = (rows * links.scale[layer] + links.shift[layer]).relu()
        if layer == 0:
            rows = torch.stack([links.second.weight @ row for row in rows])
    scores = torch.stack([links.last(row)[0] for row in rows]).view(size, size)
    weight: dict[tuple[int, int], Tensor] = {}
    for i in range(size):
        for j in range(size):
            value = 1 / (1 + (-(scores[i, j] + scores[j, i]) / 2).exp())
            if i != j and float(value.detach()) >= 0.01:
                weight[i, j] = value
    degree = [1 + sum(w for (i, _), w in weight.items() if i == v) for v in range(size)]
    hop = []
    for i in range(size):
        row = x[i] / degree[i]
        for (v, j), w in weight.items():
            if v == i:
                row = row + w * x[j] / (degree[i] * degree[j]).sqrt()
        hop.append(row)
    both = torch.cat([x, torch.stack(hop)], dim=1)
    align = torch.zeros(())
    for c in range(C):
        own = [both[v] for v in range(size) if labels[v] == c]
        mean = sum(own) / len(own)
        term = (mean - target[0][c]).square().mean()
        if len(own) > 1:
            squares = sum((row - mean).square() for row in own) / (len(own) - 1)
            term = term + (squares.sqrt() - target[1][c].sqrt()).square().mean()
        align = align + int(COUNTS[c]) / 100 * term
    alike = [
        w * (-(x[i] - x[j]).square() / 2).exp().mean() for (i, j), w in weight.items()
    ]
    return align, sum(alike) / sum(weight.values())


@pytest.mark.parametrize("number", [0, 10])
@pytest.mark.parametrize("kind", ["separate", "attract"])
@pytest.mark.parametrize("counts", [[2, 1, 2], [1, 1, 1]])
@pytest.mark.parametrize("is_few", [True, False])
def test_a_step_descends_the_whole_loss(
    target, number: int, kind: str, counts: list[int], is_few: bool, monkeypatch
) -> None:
    if not is_few:
        monkeypatch.setattr(pseudo_graph, "FEW_NODES", 0)
    sign = 1 if kind == "separate" else -1
    options = replace(QUICK, alignment_weight=3.0, smoothness_weight=2.0)
    trainer = make(target, counts, replace(options, smoothness=kind))
    with torch.no_grad():
        for value in trainer.links.parameters():
            value.normal_(generator=torch.Generator().manual_seed(1))
    trained = [trainer.features] if number else list(trainer.links.parameters())
    x, labels = trainer.features, trainer.labels.tolist()
    align, smooth = slow_objective(trainer.links, x, labels, target)
    wanted = torch.autograd.grad(3 * align + 2 * sign * smooth, trained)
    found = trainer.step(number)
    torch.testing.assert_close(found, (align.detach(), smooth.detach()))
    for parameter, gradient in zip(trained, wanted, strict=True):
        assert parameter.grad is not None
        scale = float(gradient.abs().max())
        assert torch.allclose(parameter.grad, gradient, atol=1e-3 * scale, rtol=0)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("links", ["soft", "hard"])
@pytest.mark.parametrize("number", [0, 10])
def test_few_nodes_have_the_gradients_that_autograd_finds(
    generator: torch.Generator, depth: int, links: str, number: int, monkeypatch
) -> None:
    width = (depth + 1) * D
    mean, deviation = torch.randn(2, C, width, generator=generator).double()
    settings = replace(QUICK, links=links, smoothness_weight=2.0)
    found = []
    for most in (16, 0):
        monkeypatch.setattr(pseudo_graph, "FEW_NODES", most)
        trainer = PseudoGraphGenerator(
            mean, deviation.square(), COUNTS, torch.tensor([2, 1, 2]), num_features=D,
            depth=depth, settings=settings, generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        losses = trainer.step(number)
        trained = [trainer.features] if number else trainer.links.parameters()
        found.append([*losses, *(p.grad for p in trained)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
    assert found[0][2].any()


def test_links_after_a_step_without_edges_see_the_features_of_now(
    target, monkeypatch
) -> None:
    found = []
    for most in (16, 0):
        monkeypatch.setattr(pseudo_graph, "FEW_NODES", most)
        trainer = make(target, [2, 1, 2])
        bias = trainer.links.last.bias
        for number, value in ((10, -50.0), (0, 0.0)):  # without edges, then with all
            nn.init.constant_(bias, value)
            losses = trainer.step(number)
        found.append([*losses, *(p.grad for p in trainer.links.parameters())])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_equal_nodes_of_a_class_leave_the_alignment_gradient_finite(target):
    x = torch.ones(4, 2 * D, requires_grad=True)
    labels = torch.tensor([0, 0, 1, 2])
    loss = alignment_loss(x, ClassTargets.of(labels, *target, COUNTS))
    (to_x,) = torch.autograd.grad(loss, x)
    assert to_x.isfinite().all()
    assert to_x.any()


def test_smoothness_has_the_value_of_the_hand_example():
    # x = (0, 0), (0, 2): κ = (1 + e^{−2})/2 for the one edge, whatever its weight
    x = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    a = torch.tensor([[0.0, 0.3], [0.3, 0.0]])
    want = (1 + math.exp(-2)) / 2
    assert float(smoothness_loss(x, a)) == pytest.approx(want)
    assert float(smoothness_loss(x, a * 0)) == 0


def test_node_counts_are_shares_rounded_up_and_omit_empty_classes():
    counts = torch.tensor([0, 3, 400, 401, 2000])
    assert pseudo_counts(counts).tolist() == [0, 1, 1, 1, 1]
    # .0025·400 = 1 exactly, although not in binary
    assert pseudo_counts(counts, share=0.0025).tolist() == [0, 1, 1, 2, 5]


@pytest.mark.parametrize("number", [0, 9, 50, 109])
def test_the_first_ten_of_fifty_steps_train_the_links_alone(target, number):
    trainer = make(target, [2, 1, 3])
    features = trainer.features.detach().clone()
    before = [p.detach().clone() for p in trainer.links.parameters()]
    trainer.step(number)
    assert torch.equal(trainer.features, features)
    for old, new in zip(before, trainer.links.parameters(), strict=True):
        assert new.grad is not None
        assert new.grad.any()
        assert not torch.equal(old, new)


def make_with_one(loss, target, nodes):
    weights = {"alignment_weight": 0.0, "smoothness_weight": 0.0, f"{loss}_weight": 1.0}
    return make(target, nodes, OPFGLSettings(link_channels=8, **weights))


@pytest.mark.parametrize("loss", ["alignment", "smoothness"])
def test_each_loss_alone_has_a_gradient_in_the_links(target, loss):
    trainer = make_with_one(loss, target, [2, 1, 3])
    trainer.step(0)
    for parameter in trainer.links.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()


@pytest.mark.parametrize("number", [10, 49, 60])
def test_the_other_forty_steps_train_the_features_alone(target, number):
    trainer = make(target, [2, 1, 3])
    features = trainer.features.detach().clone()
    before = [p.detach().clone() for p in trainer.links.parameters()]
    trainer.step(number)
    assert (trainer.features != features).all()
    for old, new in zip(before, trainer.links.parameters(), strict=True):
        assert torch.equal(old, new)


def test_the_gradient_of_the_features_goes_through_the_adjacency(target):
    trainer = make(target, [2, 2, 2])
    trainer.step(10)
    assert trainer.features.grad is not None
    whole = trainer.features.grad.clone()
    x = trainer.result().features.requires_grad_()
    fixed = trainer.adjacency().detach()
    loss = alignment_loss(propagated(x, fixed, 1), trainer.targets)
    (without,) = torch.autograd.grad(loss, x)
    assert whole.any()
    assert not torch.allclose(whole, 10 * without, rtol=0.01)


@pytest.mark.thorough
def test_the_generated_graph_is_well_formed_and_fits_its_target(target):
    calls: list[tuple[int, int, float]] = []
    settings = OPFGLSettings(
        server_steps=400, lr_features=0.05, lr_links=0.01, link_channels=8
    )
    graph, losses = generate(
        *target, COUNTS, torch.tensor([4, 2, 5]), num_features=D, depth=1,
        settings=settings, generator=torch.Generator().manual_seed(0),
        progress=lambda *call: calls.append(call),
    )  # fmt: skip
    assert graph.labels.tolist() == [0] * 4 + [1] * 2 + [2] * 5
    assert graph.features.shape == (11, D)
    a = graph.adjacency
    assert torch.equal(a, a.T)
    assert not a.diagonal().any()
    assert ((a == 0) | (a >= 0.01)).all()
    assert (a <= 1).all()
    assert not any(t.requires_grad for t in (graph.features, a, losses))
    assert losses.shape == (400, 2)
    assert losses[-1, 0] < 0.6 * losses[0, 0]
    assert [done for done, *_ in calls] == [50, 100, 150, 200, 250, 300, 350, 400]
    want = 10 * losses[-1, 0] + 0.1 * losses[-1, 1]
    assert calls[-1][1:] == (400, pytest.approx(float(want), rel=1e-5))


def test_one_node_per_class_gives_no_nan(target):
    trainer = make(target, [1, 1, 1])
    for number in range(60):
        align, smooth = trainer.step(number)
        assert math.isfinite(float(align))
        assert math.isfinite(float(smooth))
    assert all_finite(trainer)


def test_a_class_that_no_client_has_is_omitted(target):
    target[1][1] = math.nan  # its statistics must not be read
    trainer = make(target, [2, 2, 2], counts=torch.tensor([40, 0, 60]))
    trainer.step(0)
    trainer.step(10)
    assert all_finite(trainer)
    assert trainer.result().labels.tolist() == [0, 0, 2, 2]


def test_a_pseudo_graph_of_one_node_is_that_node(target):
    settings = OPFGLSettings(server_steps=400, lr_features=0.05, link_channels=8)
    mean = target[0][:, :D].repeat(1, 2)  # without neighbours both hops are the node
    counts = torch.tensor([0, 12, 0])
    graph, losses = generate(
        mean, target[1], counts, pseudo_counts(counts), num_features=D, depth=1,
        settings=settings, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert graph.adjacency.tolist() == [[0.0]]
    assert graph.labels.tolist() == [1]
    torch.testing.assert_close(graph.features[0], mean[1, :D], rtol=0, atol=0.01)
    assert not losses[:, 1].any()


def test_the_sign_of_the_smoothness_turns_its_gradient(target):
    base = {"link_channels": 8, "alignment_weight": 0.0, "smoothness_weight": 1.0}
    apart, together = (
        make(target, [2, 2, 2], OPFGLSettings(smoothness=s, **base))
        for s in ("separate", "attract")
    )
    for trainer in (apart, together):
        trainer.step(10)
    assert apart.features.grad is not None
    assert together.features.grad is not None
    assert apart.features.grad.any()
    torch.testing.assert_close(apart.features.grad, -together.features.grad)


@pytest.mark.parametrize("loss", ["alignment", "smoothness"])
def test_each_loss_alone_has_a_gradient_in_the_features(target, loss):
    trainer = make_with_one(loss, target, [2, 2, 2])
    trainer.step(10)
    assert trainer.features.grad is not None
    assert trainer.features.grad.any(dim=1).all()


def test_the_same_generator_gives_the_same_graph(target):
    torch.manual_seed(5)
    first = make(target, [2, 1, 3])
    state = torch.random.get_rng_state()
    torch.manual_seed(6)
    second = make(target, [2, 1, 3])
    for trainer in (first, second):
        for number in range(12):
            trainer.step(number)
    assert torch.equal(first.result().adjacency, second.result().adjacency)
    assert torch.equal(first.result().features, second.result().features)
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing was drawn from it


def grown(target, device="cpu"):
    """Generate a graph with 12 nodes in 20 steps on a device."""
    mean, variance = target
    found = generate(
        mean.to(device), variance.to(device), COUNTS.to(device),
        torch.tensor([6, 2, 4], device=device), num_features=D, depth=1,
        settings=replace(QUICK, server_steps=20),
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    graph, losses = found
    return [t.cpu() for t in (graph.features, graph.adjacency, losses)]


def test_the_large_blocks_of_a_gpu_give_the_same_graph(target, monkeypatch):
    monkeypatch.setattr(pairwise, "BLOCK", 100)  # one row of pairs at a time
    small = grown(target)
    monkeypatch.setattr(pairwise, "BLOCK", pairwise.GPU_BLOCK)
    for a, b in zip(small, grown(target), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_graph(target):
    for a, b in zip(grown(target), grown(target, "cuda"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_steps_give_the_initial_graph(target):
    graph, losses = generate(
        *target, COUNTS, torch.tensor([1, 1, 1]), num_features=D, depth=1,
        settings=OPFGLSettings(server_steps=0, link_channels=8),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert losses.shape == (0, 2)
    want = torch.randn(3, D, generator=torch.Generator().manual_seed(0))
    assert torch.equal(graph.features, want)


def test_statistics_without_any_class_are_rejected(target):
    with pytest.raises(PayloadError, match="No client uploaded statistics"):
        make(target, [0, 0, 0], counts=torch.zeros(C, dtype=torch.int64))
