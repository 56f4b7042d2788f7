from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch_geometric.nn import SAGEConv

from flower_fgl.algorithms.fedlog import matching
from flower_fgl.algorithms.fedlog.matching import (
    HIDDEN,
    OUT,
    PromptTask,
    RandomNets,
    TaskStack,
)
from flower_fgl.algorithms.fedlog.prompts import (
    apply_generators,
    blend_generators,
    make_generator,
    prompt_pairs,
    train_prompt_generators,
)
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput

D, C = 5, 3


def train_prompt_generator(
    generator: torch.nn.Module,
    task: PromptTask,
    *,
    epochs: int,
    networks: int,
    lr: float,
    batch_size: int = 0,
    is_mean: bool = False,
) -> tuple[float, float]:
    """Train the generator of one client, with draws of torch's global generator."""
    seed = int(torch.randint(2**31, ()))

    def draw(epoch: int) -> RandomNets:
        generator = torch.Generator().manual_seed(seed + epoch)
        return RandomNets.draw(networks, D, C, generator=generator)

    (losses,) = train_prompt_generators(
        [generator],
        [task],
        epochs=epochs,
        networks=draw,
        seeds=lambda place, epoch: seed + 1000 * (place + 1) + epoch,
        lr=lr,
        batch_sizes=[batch_size],
        is_mean=is_mean,
    )
    return losses


def random_task(*, is_sparse: bool = False) -> PromptTask:
    """A path of five nodes and one node alone."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(6, D, generator=draw)
    path = [(0, 1), (1, 2), (2, 3), (3, 4)]
    edges = torch.tensor(path + [(v, u) for u, v in path]).T
    graph = GraphInput(x.to_sparse_csr() if is_sparse else x, edges)
    return PromptTask(graph, torch.tensor([0, 2, 5]), torch.tensor([0, 1, 2]), C)


def one_network(nets: RandomNets, number: int) -> tuple[list[SAGEConv], Tensor, Tensor]:
    """Take one of the networks out as PyG's layers and a linear classifier."""
    rows = slice(number * HIDDEN, (number + 1) * HIDDEN)
    first, second = SAGEConv(D, HIDDEN), SAGEConv(HIDDEN, OUT)
    with torch.no_grad():
        first.lin_r.weight.copy_(nets.own[:, rows].T)
        first.lin_l.weight.copy_(nets.around[:, rows].T)
        first.lin_l.bias.copy_(nets.bias[rows])
        second.lin_r.weight.copy_(nets.own_2[number].T)
        second.lin_l.weight.copy_(nets.around_2[number].T)
        second.lin_l.bias.copy_(nets.bias_2[number])
    return [first, second], nets.classifier[number], nets.classifier_bias[number]


def slow_loss(
    nets: RandomNets, number: int, graph: GraphInput, index: Tensor, labels: Tensor
) -> tuple[Tensor, list[Tensor]]:
    (first, second), weight, bias = one_network(nets, number)
    h = second(first(graph.x, graph.edge_index).relu(), graph.edge_index)
    loss = F.cross_entropy(h[index] @ weight + bias, labels)
    weights = [first.lin_r.weight, first.lin_l.weight, first.lin_l.bias]
    weights += [second.lin_r.weight, second.lin_l.weight, second.lin_l.bias]
    return loss, list(torch.autograd.grad(loss, weights, create_graph=True))


def mismatch(
    nets: RandomNets, task: PromptTask, prompts: Tensor, **options: bool
) -> tuple[Tensor, Tensor]:
    """Eq. (12) of one client, and its derivative by the prompts (m, d)."""
    stack = TaskStack([task], [task.features()])
    made = prompts.detach()[None]
    loss, slope = nets.mismatch(stack, made, **options)
    return loss[0], slope[0]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("by_nodes", [False, True])
def test_batched_networks_equal_single_networks(
    is_sparse: bool, by_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "has_few_nodes", lambda *_: by_nodes)
    torch.manual_seed(0)
    task, dense = random_task(is_sparse=is_sparse), random_task()
    nets = RandomNets.draw(3, D, C)
    x, _, labels = task.features()
    prompts = torch.randn(len(x), D, requires_grad=True)
    pairs = prompt_pairs(x, prompts)
    losses, total, mean = torch.zeros(2), torch.zeros(()), torch.zeros(())
    for number in range(3):
        true, target = slow_loss(nets, number, dense.graph, task.index, task.labels)
        made, found = slow_loss(nets, number, pairs, torch.arange(len(x)), labels)
        losses += torch.stack([true, made]).detach()
        parts = [(a - b.detach()).square() for a, b in zip(found, target, strict=True)]
        total = total + sum(part.sum() for part in parts)
        mean = mean + sum(part.mean() for part in parts)
    stack = TaskStack([task], [task.features()])
    true, _ = nets.true_slopes(stack)
    assert true.losses.item() == pytest.approx(losses[0].item(), rel=1e-5)
    loss, slope = mismatch(nets, task, prompts)
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    published, mean_slope = mismatch(nets, task, prompts, is_mean=True)
    assert published.item() == pytest.approx(mean.item(), rel=1e-4)
    for found, slow in ((slope, total), (mean_slope, mean)):
        (slow_slope,) = torch.autograd.grad(slow, prompts, retain_graph=True)
        assert slow_slope.norm() > 0
        torch.testing.assert_close(found, slow_slope, rtol=1e-3, atol=1e-7)
    part, same = mismatch(nets, task, prompts, is_whole=False)
    assert (part.item() < 0.99 * loss.item()) == by_nodes
    torch.testing.assert_close(same, slope)


def test_products_over_nodes_are_chosen_where_they_are_fewer() -> None:
    assert matching.has_few_nodes(903, 270, 1433)  # Cora, 3 clients
    assert not matching.has_few_nodes(6572, 2600, 500)  # PubMed, 3 clients


@pytest.mark.parametrize(("share", "layout"), [(0.03, "sparse_csr"), (0.1, "strided")])
def test_features_with_many_entries_are_strided(share: float, layout: str) -> None:
    task = random_task()
    x = torch.zeros(task.graph.num_nodes, 100)
    x[:, : round(100 * share)] = 1
    strided = replace(task, graph=GraphInput(x, task.graph.edge_index))
    assert strided.with_fast_features() is strided
    sparse = replace(task, graph=GraphInput(x.to_sparse_csr(), task.graph.edge_index))
    found = sparse.with_fast_features()
    assert found.graph.x.layout == getattr(torch, layout)
    nets = RandomNets.draw(2, 100, task.num_classes)
    torch.testing.assert_close(nets.first(found), nets.first(strided))


def test_prompts_that_are_the_true_neighbours_match_the_gradients() -> None:
    torch.manual_seed(0)
    x, neighbours = torch.randn(4, D), torch.randn(4, D)
    index, labels = torch.arange(4), torch.tensor([0, 1, 2, 0])
    task = PromptTask(prompt_pairs(x, neighbours), index, labels, C)
    nets = RandomNets.draw(2, D, C)
    none, _ = mismatch(nets, task, neighbours)
    loss, slope = mismatch(nets, task, neighbours + 1)
    assert loss.item() > 1e-2
    # the squares of sums are rounded, on some processors not to the same value
    assert abs(none.item()) < 1e-5 * loss.item()
    assert slope.any(dim=1).all()


def test_a_node_without_neighbours_is_not_a_training_target() -> None:
    task = random_task()
    x, around, labels = task.features()
    raw = task.graph.x
    assert labels.tolist() == [0, 1]
    assert torch.equal(x, raw[[0, 2]])
    torch.testing.assert_close(around, torch.stack([raw[1], (raw[1] + raw[3]) / 2]))


def test_the_first_loss_is_equation_11_and_training_lowers_it() -> None:
    torch.manual_seed(0)
    task, generator = random_task(), make_generator(D)
    with torch.no_grad():
        for p in generator.parameters():
            p.zero_()  # prompts are 0, whatever dropout does
    _, around, _ = task.features()
    start = around.square().sum(1).mean().item()
    of_features, _ = train_prompt_generator(
        generator, task, epochs=1, networks=1, lr=1e-9
    )
    assert of_features == pytest.approx(start, rel=1e-6)
    mean, _ = train_prompt_generator(
        generator, task, epochs=1, networks=1, lr=1e-9, is_mean=True
    )
    assert mean == pytest.approx(start / D, rel=1e-4)
    generator = make_generator(D)
    first = train_prompt_generator(generator, task, epochs=1, networks=2, lr=0.01)
    last = train_prompt_generator(generator, task, epochs=60, networks=2, lr=0.01)
    assert last[0] < first[0] / 2
    assert sum(last) < sum(first)
    assert not generator.training


def _nothing(
    nets: RandomNets, stack: TaskStack, *_: Any, **options: bool
) -> tuple[Tensor, Tensor]:
    return stack.x.new_zeros(len(stack.x)), torch.zeros_like(stack.x)


def test_equation_11_alone_moves_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomNets, "mismatch", _nothing)
    torch.manual_seed(0)
    task, generator = random_task(), make_generator(D)
    for layer in generator:
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    loss, none = train_prompt_generator(generator, task, epochs=1, networks=1, lr=1e-9)
    assert none == 0
    made = [p.grad for p in generator.parameters()]
    x, around, _ = task.features()
    generator.zero_grad()
    prompts = generator(x)
    slow = torch.stack(
        [((prompts[i] - around[i]) ** 2).sum() for i in range(len(x))]
    ).mean()
    slow.backward()
    assert loss == pytest.approx(slow.item(), rel=1e-5)
    for got, parameter in zip(made, generator.parameters(), strict=True):
        expected = parameter.grad
        assert expected is not None
        assert expected.any()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_step_descends_the_sum_of_equations_11_and_12(
    is_mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomNets, "draw", _constant_nets)
    torch.manual_seed(0)
    task, generator = random_task(), make_generator(D)
    for layer in generator:
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    loss = sum(
        train_prompt_generator(
            generator, task, epochs=1, networks=2, lr=1e-9, is_mean=is_mean
        )
    )
    made = [p.grad for p in generator.parameters()]
    x, around, labels = task.features()
    generator.zero_grad()
    prompts = generator(x)
    features = sum(((p - a) ** 2).sum() for p, a in zip(prompts, around, strict=True))
    nets, gradients = RandomNets.draw(2, D, C), torch.zeros(())
    for number in range(2):
        _, target = slow_loss(nets, number, task.graph, task.index, task.labels)
        pairs, rows = prompt_pairs(x, prompts), torch.arange(len(x))
        _, found = slow_loss(nets, number, pairs, rows, labels)
        for a, b in zip(found, target, strict=True):
            far = (a - b.detach()).square()
            gradients = gradients + (far.mean() if is_mean else far.sum()) / 2
    slow = features / len(x) / (D if is_mean else 1) + gradients
    slow.backward()
    assert loss == pytest.approx(slow.item(), rel=1e-6)
    for got, parameter in zip(made, generator.parameters(), strict=True):
        expected = parameter.grad
        assert expected is not None
        assert got is not None
        assert torch.allclose(
            got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0
        )
    assert gradients.item() > 1e-4 * slow.item() * (1 if is_mean else 1000)


def test_networks_in_groups_give_the_same_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, out = random_task(), []
    for budget in (1 << 24, 1):  # all at once; one by one
        monkeypatch.setattr("flower_fgl.algorithms.fedlog.prompts.BUDGET", budget)
        monkeypatch.setattr(RandomNets, "draw", _constant_nets)
        torch.manual_seed(0)
        generator = make_generator(D)
        out.append(
            train_prompt_generator(generator, task, epochs=3, networks=4, lr=0.01)
        )
    assert out[0] == pytest.approx(out[1], rel=1e-5)


def _constant_nets(
    number: int, num_features: int, num_classes: int, **_: Any
) -> RandomNets:
    draw = torch.Generator().manual_seed(7)
    shapes = [(num_features, HIDDEN), (num_features, HIDDEN), (HIDDEN,)]
    first = [torch.randn(s, generator=draw) / 3 for s in shapes]
    deep = [(HIDDEN, OUT), (HIDDEN, OUT), (OUT,), (OUT, num_classes), (num_classes,)]
    rest = [torch.randn(s, generator=draw) / 9 for s in deep]
    parts = [t.repeat(*[1] * (t.dim() - 1), number) for t in first]
    parts += [t.expand(number, *t.shape).clone() for t in rest]
    return RandomNets(number, *parts)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_task_of_a_batch_reads_only_its_surroundings(is_sparse: bool) -> None:
    # a path of 40 nodes: a batch of two needs six hidden representations
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, D, generator=draw)
    path = torch.stack([torch.arange(39), torch.arange(1, 40)])
    edges = torch.cat([path, path.flip(0)], dim=1)
    graph = GraphInput(x.to_sparse_csr() if is_sparse else x, edges)
    labels = torch.arange(20) % C
    task = PromptTask(graph, torch.arange(0, 40, 2), labels, C)
    batch = task.batch(torch.tensor([7, 2]))
    assert (task.num_rows, batch.num_rows) == (40, 6)
    torch.manual_seed(0)
    nets = RandomNets.draw(2, D, C)
    dense = GraphInput(x, edges)
    wanted = [
        slow_loss(nets, n, dense, torch.tensor([14, 4]), labels[[7, 2]])
        for n in range(2)
    ]
    stack = TaskStack([batch], [tuple(part[[7, 2]] for part in task.features())])
    true, slopes = nets.true_slopes(stack)
    expected = sum(w[0].item() for w in wanted)
    assert true.losses.item() == pytest.approx(expected, rel=1e-5)
    assert slopes.shape[1] == 6
    slow = torch.stack([gradients[5] for _, gradients in wanted])
    torch.testing.assert_close(true.weights[2][0], slow, rtol=1e-4, atol=1e-7)
    biases = slopes.sum(1).view(2, HIDDEN)
    slow = torch.stack([gradients[2] for _, gradients in wanted])
    torch.testing.assert_close(biases, slow, rtol=1e-4, atol=1e-7)


def test_a_batch_of_most_nodes_reads_the_whole_graph() -> None:
    task = random_task()
    batch = task.batch(torch.tensor([2, 0, 1]))
    assert batch.graph is task.graph
    assert batch.index.tolist() == [5, 0, 2]
    assert batch.labels.tolist() == [2, 0, 1]


def test_a_generator_learns_from_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, D, generator=draw)
    edges = torch.randint(60, (2, 90), generator=draw)
    graph = GraphInput(x, torch.cat([edges, edges.flip(0)], dim=1))
    task = PromptTask(graph, torch.arange(40), torch.arange(40) % C, C)
    inputs, around, _ = task.features()
    used = []
    batch = PromptTask.batch

    def counted(task: PromptTask, places: Tensor) -> PromptTask:
        used.append(places)
        return batch(task, places)

    monkeypatch.setattr(PromptTask, "batch", counted)

    def error(epochs: int, batch_size: int) -> float:
        torch.manual_seed(0)
        generator = make_generator(D)
        train_prompt_generator(
            generator, task, epochs=epochs, networks=1, lr=0.01, batch_size=batch_size
        )
        with torch.no_grad():
            return float((generator(inputs) - around).square().sum(1).mean())

    start = error(0, 8)
    assert error(60, 8) < 0.7 * start
    assert len(used) == 60
    assert all(len(set(places.tolist())) == 8 for places in used)
    assert len({tuple(places.tolist()) for places in used}) > 50  # drawn anew
    assert error(3, len(inputs)) == error(3, 0)  # all nodes: no draw, the same numbers
    assert len(used) == 60


@pytest.mark.parametrize("by_nodes", [False, True])
def test_clients_together_train_as_each_alone(
    by_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no training node with a neighbour, one draws batches."""
    monkeypatch.setattr(matching, "has_few_nodes", lambda *_: by_nodes)
    lone = GraphInput(torch.randn(3, D), torch.zeros((2, 0), dtype=torch.int64))
    first = torch.tensor([0, 1])
    ring = torch.tensor([[0, 1, 2, 1, 2, 3], [1, 2, 3, 0, 1, 2]])
    small = GraphInput(torch.randn(4, D), ring)
    tasks = [random_task(), PromptTask(lone, first, first, C), random_task()]
    tasks.append(PromptTask(small, torch.tensor([3]), torch.tensor([1]), C))
    sizes = [0, 0, 1, 0]

    def train(places: list[int]) -> list[list[Tensor]]:
        torch.manual_seed(3)
        generators = [make_generator(D) for _ in tasks]
        losses = train_prompt_generators(
            [generators[place] for place in places],
            [tasks[place] for place in places],
            epochs=3,
            networks=lambda epoch: RandomNets.draw(
                4, D, C, generator=torch.Generator().manual_seed(epoch)
            ),
            seeds=lambda place, epoch: 100 * places[place] + epoch,
            lr=0.01,
            batch_sizes=[sizes[place] for place in places],
        )
        return [
            [torch.tensor(loss), *(p.detach() for p in generators[place].parameters())]
            for loss, place in zip(losses, places, strict=True)
        ]

    together, alone = train([0, 1, 2, 3]), [train([place])[0] for place in range(4)]
    assert not together[1][0].any()
    for found, expected in zip(together, alone, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_a_node_that_has_neighbours_nothing_is_trained() -> None:
    graph = GraphInput(torch.randn(3, D), torch.zeros((2, 0), dtype=torch.int64))
    task = PromptTask(graph, torch.tensor([0, 1]), torch.tensor([0, 1]), C)
    generator = make_generator(D)
    before = generator[0].weight.clone()
    losses = train_prompt_generator(generator, task, epochs=2, networks=1, lr=0.1)
    assert losses == (0, 0)
    assert torch.equal(generator[0].weight, before)


def test_stacked_generators_work_class_by_class() -> None:
    torch.manual_seed(0)
    generators = [make_generator(D).eval() for _ in range(2)]
    states = [g.state_dict() for g in generators]
    # class 0 is client 0's alone, class 1 client 1's, class 2 half and half
    weights = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    stacked = blend_generators(states, weights)
    half = make_generator(D).eval()
    half.load_state_dict({n: (states[0][n] + states[1][n]) / 2 for n in states[0]})
    x = torch.randn(3 * 4, D)
    made = apply_generators(stacked, x)
    with torch.no_grad():
        for c, generator in enumerate([*generators, half]):
            rows = slice(4 * c, 4 * c + 4)
            torch.testing.assert_close(made[rows], generator(x[rows]))


def test_a_pair_is_a_node_and_its_prompt() -> None:
    x, prompts = torch.randn(2, D), torch.randn(2, D)
    graph = prompt_pairs(x, prompts)
    around = graph.operator("mean").matmul(graph.x)
    torch.testing.assert_close(around, torch.cat([prompts, x]))


@pytest.mark.thorough
def test_gradients_act_on_prompts_of_cora_as_printed_and_hardly_as_means(
    real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"method": "fedlog", "dataset": "cora", "clients": 3}
    values |= {"setting": "closed-set", "data-dir": str(real_data)}
    data = open_store(parse_config(values), 3).load(0)
    index = data.graph.masks["train"].nonzero().squeeze(1)
    graph = GraphInput(data.graph.x, data.graph.edge_index)
    task = PromptTask(graph, index, data.graph.y[index], len(data.class_names))

    def prompts(*, is_mean: bool) -> Tensor:
        torch.manual_seed(0)
        generator = make_generator(graph.num_features)
        train_prompt_generators(
            [generator],
            [task],
            epochs=15,
            networks=lambda epoch: RandomNets.draw(
                20,
                graph.num_features,
                task.num_classes,
                generator=torch.Generator().manual_seed(epoch),
            ),
            seeds=lambda place, epoch: epoch,
            lr=0.01,
            batch_sizes=[0],
            is_mean=is_mean,
        )
        with torch.no_grad():
            return generator(task.features()[0])

    printed, mean = prompts(is_mean=False), prompts(is_mean=True)

    monkeypatch.setattr(RandomNets, "mismatch", _nothing)
    change = {}
    for name, made, is_mean in (("sum", printed, False), ("mean", mean, True)):
        without = prompts(is_mean=is_mean)
        change[name] = float((made - without).norm() / without.norm())
    assert change["sum"] > 1e-3
    assert change["mean"] < change["sum"] / 3
