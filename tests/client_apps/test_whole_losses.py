"""Each paper's whole client loss: one step of plain SGD against loops over nodes.

A client trains for one epoch. Its loss and its weights afterwards are compared with a
loss in float64, written here from the paper without any function of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.stacked.group import GroupClientApp
from flower_fgl.core.seeds import torch_generator
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.protocols.adpfedgnn import SharedWeights
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedlog import FedLogDownload
from flower_fgl.protocols.opfgl import GraphDownload
from flower_fgl.protocols.prototypes import Prototypes

N, D, C, P, LR = 9, 4, 3, 5, 0.2
EDGES = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (0, 3), (1, 3)]
EDGES += [(3, 7), (4, 7), (5, 7), (2, 7)]  # node 8 has no neighbour
Y = [0, 1, 1, 0, 2, 2, 0, 1, 2]
TRAIN = [0, 1, 2, 4, 6, 8]

State = dict[str, Tensor]


def near(v: int, edges: list[tuple[int, int]] = EDGES) -> list[int]:
    return [a + b - v for a, b in edges if v in (a, b)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def client_of(method: str, *, lr: float = LR, **settings: Any) -> Client:
    """Make a client that trains for one epoch by plain SGD, without dropout."""
    pairs = torch.tensor([*EDGES, *((v, u) for u, v in EDGES)]).T
    masks = {name: torch.zeros(N, dtype=torch.bool) for name in ("train", "test")}
    masks["train"][TRAIN] = True
    masks["test"][3] = True
    graph = Graph(random(N, D), pairs[:, pairs[1].argsort()], torch.tensor(Y), masks)
    config = {
        "method": method, "model": "graphsage", "hidden-channels": P, "num-layers": 2,
        "dropout": 0.0, "local-epochs": 1, "optimizer": "sgd", "lr": lr,
        "weight-decay": 0.0, "min-class-count": 1, "check-every": 0,
        "optimizer-state": "reset",
    }  # fmt: skip
    own = {f"{method}.{key.replace('_', '-')}": v for key, v in settings.items()}
    device = torch.device("cpu")
    data = ClientData.build(
        ClientGraph(0, graph, Target.classes(tuple("abc")), torch.arange(N)), device
    )
    return Client(parse_config(config | own), 0, 2, data, ClientState(), device)


def features(client: Client) -> Tensor:
    return client.data.graph.graph.x.double()


def spread(state: Mapping[str, Tensor], seed: int = 0) -> State:
    """Return random weights; positive biases let every node pass a ReLU."""
    return {
        name: 0.5 * random(*t.shape, seed=seed + number) + name.endswith("l.bias")
        for number, (name, t) in enumerate(state.items())
    }


def leaves(state: Mapping[str, Tensor]) -> State:
    return {name: t.detach().double().requires_grad_() for name, t in state.items()}


def sgd(weights: State, loss: Tensor, lr: float = LR) -> State:
    """Return the weights after a step; those without gradient stay."""
    found = torch.autograd.grad(
        loss, list(weights.values()), retain_graph=True, allow_unused=True
    )
    return {
        name: w.detach() - (0 if grad is None else lr * grad)
        for (name, w), grad in zip(weights.items(), found, strict=True)
    }


def close_to(value: Tensor) -> Any:
    return pytest.approx(float(value.detach()), rel=1e-4)


def assert_moved(found: Mapping[str, Tensor], wanted: State, before: State) -> None:
    """Compare weights by how they moved."""
    assert found.keys() >= wanted.keys()
    for name, want in wanted.items():
        step = want - before[name].detach()
        scale = float(step.abs().max())
        assert scale > 0, name
        moved = found[name].double() - before[name].detach()
        assert torch.allclose(moved, step, atol=2e-4 * scale, rtol=0), name


def mean_of(rows: list[Tensor], width: int) -> Tensor:
    return sum(rows) / len(rows) if rows else torch.zeros(width, dtype=torch.float64)


def sage(w: State, name: str, h: list[Tensor], edges: Any = EDGES) -> list[Tensor]:
    """One layer of GraphSAGE, node by node."""
    return [
        w[f"{name}.lin_l.weight"] @ mean_of([h[u] for u in near(v, edges)], len(h[0]))
        + w[f"{name}.lin_l.bias"]
        + w[f"{name}.lin_r.weight"] @ h[v]
        for v in range(len(h))
    ]


def cross_entropy(logits: Tensor, label: int) -> Tensor:
    return -(logits[label] - logits.exp().sum().log())


def unit(h: Tensor) -> Tensor:
    return h / h.square().sum().sqrt()


def relu(rows: list[Tensor]) -> list[Tensor]:
    return [row.relu() for row in rows]


# ------------------------------------------------------------------------------ FedPG
def at_distance(v: int, hop: int) -> list[int]:
    reached, ring = {v}, {v}
    for _ in range(hop):
        ring = {u for r in ring for u in near(r)} - reached
        reached |= ring
    return sorted(ring)


def attended(f: list[Tensor], v: int, around: list[int], scorer: Tensor) -> Tensor:
    """``Σ_u w_vu f(u)``, Eq. (2★)."""
    mean = mean_of([f[u] for u in around], P)
    scores = [scorer[0] @ f[u] + scorer[1] @ f[v] + scorer[2] @ mean for u in around]
    weights = [torch.where(s > 0, s, 0.2 * s).exp() for s in scores]
    return sum(w * f[u] for w, u in zip(weights, around, strict=True)) / sum(weights)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fedpg_trains_by_cross_entropy_and_distances_of_prototypes(
    reduction: str,
) -> None:
    mu, hops = 5.0, 2
    client = client_of("fedpg", mu=mu, hops=hops, proto_reduction=reduction)
    app = METHODS["fedpg"].load_client_app()()
    annotation = [0, 1, 1, 1, 2, 2, 1, 1, 2]  # of the last round
    client.state.set_group("annotation", {"classes": torch.tensor(annotation).float()})
    scorer = random(3, P, seed=1)
    client.state.set_group("scorer", {"weight": scorer})
    target = torch.nn.functional.normalize(random(C, hops + 1, P, seed=2), dim=-1)
    present = torch.ones(C, hops + 1, dtype=torch.bool)
    present[1, 2] = False
    download = Prototypes(target * present[..., None], present)
    model = spread(app.personal_model(client, download).state_dict())
    client.state.set_group("model", model)
    before = leaves(model) | leaves({"scorer": scorer})

    f = relu(sage(before, "encoder.0", list(features(client))))
    logits = sage(before, "classifier", f)
    loss = sum(cross_entropy(logits[v], Y[v]) for v in TRAIN) / len(TRAIN)
    f, distances = [unit(h) for h in f], []
    for c in range(C):
        for hop in range(hops + 1):
            rows = []
            for v in (v for v in range(N) if annotation[v] == c):
                around = [u for u in at_distance(v, hop) if annotation[u] == c]
                if around:
                    rows.append(attended(f, v, around, before["scorer"]))
            if rows and present[c, hop]:
                apart = mean_of(rows, P) - target[c, hop].double()
                distances.append(apart.square().sum().sqrt())
    assert len(distances) > 4
    proto = sum(distances) / (len(distances) if reduction == "mean" else 1)
    loss = loss + mu * proto
    fit = app.fit(client, 2, download)
    assert fit.loss == close_to(loss)
    after = dict(fit.model.state_dict()) | {
        "scorer": client.state.group("scorer")["weight"]
    }
    assert_moved(after, sgd(before, loss), before)


# ----------------------------------------------------------------------------- FedLoG
S, BETA, LAMBDA, STEP = 2, 0.6, 1.0, 0.05


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def linear(w: State, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def fedlog_embeddings(w: State, x: list[Tensor], edges: Any) -> list[Tensor]:
    """Eq. (1)."""
    first = relu(sage(w, "encoder.encoder.0", x, edges))
    return sage(w, "encoder.classifier", first, edges)


def fedlog_prototypes(w: State) -> dict[str, list[Tensor]]:
    """Embed the learnable nodes; each is its own only neighbour."""
    loops = [(j, j) for j in range(C * S)]
    return {
        name: fedlog_embeddings(w, list(w[f"nodes.{name}"]), loops)
        for name in ("head", "tail")
    }


def fedlog_branch(
    w: State, name: str, prototypes: list[Tensor], h: Tensor, n: Tensor
) -> Tensor:
    """log p of one node, Eqs. (2) and (6) to (10)."""
    start = f"classifier.{name}"
    spread = ((h - h.mean()).square().mean() + 1e-5).sqrt()
    h = (h - h.mean()) / spread * w[f"{start}.norm.weight"] + w[f"{start}.norm.bias"]
    for layer in (f"{start}.layers.0", f"{start}.layers.1"):
        moves = []
        for p in prototypes:
            d = (h - p).square().sum() + (n - p).square().sum()
            m = silu(linear(w, f"{layer}.first", torch.cat([h, n, d[None]])))
            m = silu(linear(w, f"{layer}.second", m))
            m = silu(linear(w, f"{layer}.trans.0", m))
            m = silu(linear(w, f"{layer}.trans.2", m))
            moves.append((h - p) * (w[f"{layer}.scale.weight"] @ m))
        h = h + mean_of(moves, P)
    means = [mean_of(prototypes[S * c : S * (c + 1)], P) for c in range(C)]
    logits = torch.stack([-(h - mean).square().sum() for mean in means])
    return logits.log_softmax(0)


def fedlog_loss(w: State, x: Tensor) -> Tensor:
    """L_cls + β L_norm of all training nodes."""
    h, total = fedlog_embeddings(w, list(x), EDGES), torch.zeros(())
    learnt = fedlog_prototypes(w)
    for v in TRAIN:
        n = mean_of([h[u] for u in near(v)], P)
        alpha = 1 / (1 + torch.tensor(LAMBDA + 1.0 - len(near(v))).exp())
        total = total - alpha * fedlog_branch(w, "head", learnt["head"], h[v], n)[Y[v]]
        total = (
            total
            - (1 - alpha) * fedlog_branch(w, "tail", learnt["tail"], h[v], n)[Y[v]]
        )
    norm = sum(w[f"nodes.{name}"].square().sum().sqrt() for name in ("head", "tail"))
    return total / len(TRAIN) + BETA * norm / 2


def fedlog_general(
    w: State, nodes: Tensor, gamma: Tensor, prompts: State
) -> tuple[Tensor, list[bool]]:
    """L_g of the synthetic nodes, scaled by Eq. (5), and which are classified rightly."""
    total, hits, mean = torch.zeros(()), [], nodes.mean(0)
    learnt = fedlog_prototypes(w)
    for row, c in enumerate(c for c in range(C) for _ in range(S)):
        x = nodes[row] + gamma[c] * (mean - nodes[row])
        pair, edges = [x], [(0, 0)]  # its own neighbour
        if prompts:
            z = x
            for layer in (0, 2, 5):
                z = linear(
                    {k: t[c] for k, t in prompts.items()},
                    str(layer),
                    z.relu() if layer else z,
                )
            pair, edges = [x, z.tanh()], [(0, 1)]
        h = fedlog_embeddings(w, pair, edges)
        head, tail = (fedlog_branch(w, b, p, h[0], h[-1]) for b, p in learnt.items())
        total = total - (head[c] + tail[c]) / 2
        hits.append(int((head.exp() + tail.exp()).argmax()) == c)
    return total / (C * S), hits


@pytest.mark.parametrize("has_prompts", [True, False])
def test_fedlog_trains_by_fitting_and_generalisation(has_prompts: bool) -> None:
    client = client_of(
        "fedlog", nodes_per_class=S, encoder_channels=P, beta=BETA, tail_degree=LAMBDA,
        gamma_step=STEP, gamma_threshold=0.6, pg=has_prompts, lr=0.02,
    )  # fmt: skip
    app = METHODS["fedlog"].load_client_app()()
    shapes = app.download_spec(client)
    weights = spread({n: torch.zeros(s) for n, s in shapes.weights.items()})
    nodes = random(C * S, D, seed=3)
    prompts = {
        name: 0.1 * random(C, *shape, seed=4)
        for name, shape in (shapes.prompts or {}).items()
    }
    gamma = torch.tensor([0.1, 0.4, 0.97])
    client.state.set_group("scaling", {"gamma": gamma})
    download = FedLogDownload(weights, nodes, prompts)
    before = leaves(app.personal_model(client, download).state_dict())
    general, hits = fedlog_general(
        before,
        nodes.double(),
        gamma.double(),
        {k: t.double() for k, t in prompts.items()},
    )
    loss = fedlog_loss(before, features(client)) + general
    fit = app.fit(client, 1, download)
    assert fit.loss == close_to(loss)
    assert_moved(fit.model.state_dict(), sgd(before, loss, 0.02), before)
    shares = [sum(hits[S * c : S * (c + 1)]) / S for c in range(C)]
    assert min(shares) < 0.6 < max(shares)
    wanted = [
        min(1.0, max(0.0, float(g) + (STEP if share > 0.6 else -STEP)))
        for g, share in zip(gamma, shares, strict=True)
    ]
    assert client.state.group("scaling")["gamma"].tolist() == pytest.approx(wanted)


# ----------------------------------------------------------------------------- O-pFGL
def soft_labels(share: float, steps: int) -> tuple[list[Tensor], list[float]]:
    """ỹ of each node by propagation, and w_dist of each class, Eqs. (2) to (4)."""
    start = [
        torch.tensor([float(v in TRAIN and Y[v] == c) for c in range(C)]).double()
        for v in range(N)
    ]
    soft = start
    for _ in range(steps):
        spread = [
            sum(
                (soft[u] / (len(near(u)) * len(near(v))) ** 0.5 for u in near(v)),
                torch.zeros(C).double(),
            )
            for v in range(N)
        ]
        soft = [
            (share * s + (1 - share) * y).clamp(0, 1)
            for s, y in zip(spread, start, strict=True)
        ]
    soft = [y if y.sum() > 0 else torch.full((C,), 1 / C).double() for y in soft]
    homophily = [0.0] * C
    for v in TRAIN:
        known = [u for u in near(v) if u in TRAIN]
        if known:
            homophily[Y[v]] += sum(Y[u] == Y[v] for u in known) / len(known)
    return soft, [1 / (1 + torch.tensor(h + 1).log().item()) for h in homophily]


@pytest.mark.parametrize("variant", ["hre-nd-dist", "ft-imb"])
def test_opfgl_trains_by_the_pseudo_graph_and_then_by_labels_and_distillation(
    variant: str,
) -> None:
    share, steps, beta, low, high = 0.8, 2, 1.5, 0.2, 0.9
    client = client_of(
        "opfgl", variant=variant, propagation_share=share, propagation_steps=steps,
        beta=beta, gamma_min=low, gamma_max=high, lr_global=1.0, lr_personal=LR,
    )  # fmt: skip
    app = METHODS["opfgl"].load_client_app()()
    links = torch.tensor([[0.0, 0.3, 0.8], [0.3, 0.0, 0.0], [0.8, 0.0, 0.0]])
    graph = PseudoGraph(random(3, D, seed=5), torch.tensor([0, 1, 2]), links)
    start = leaves(client.build_model(initialise=True).state_dict())

    def predict(w: State, x: Tensor, edges: Any) -> list[Tensor]:
        return sage(w, "classifier", relu(sage(w, "encoder.0", list(x), edges)), edges)

    def weighted(w: State, name: str, h: list[Tensor]) -> list[Tensor]:
        """One layer of GraphSAGE on the pseudo-graph, whose edges have weights."""
        return [
            w[f"{name}.lin_l.weight"] @ sum(a * x for a, x in zip(row, h, strict=True))
            + w[f"{name}.lin_l.bias"]
            + w[f"{name}.lin_r.weight"] @ h[i]
            for i, row in enumerate((links / links.sum(1, keepdim=True)).double())
        ]

    hidden = relu(weighted(start, "encoder.0", list(graph.features.double())))
    logits = weighted(start, "classifier", hidden)
    first = sum(cross_entropy(z, c) for c, z in enumerate(logits)) / 3  # Eq. (16)
    teacher = sgd(start, first, 1.0)
    starts_anew, has_teacher = variant == "hre-nd-dist", variant != "ft-imb"
    before = start if starts_anew else leaves(teacher)
    target = [z.softmax(0) for z in predict(teacher, features(client), EDGES)]
    logits = predict(before, features(client), EDGES)
    number = [sum(Y[v] == c for v in TRAIN) for c in range(C)]
    weight = [1.0] * C if has_teacher else [1 / n for n in number]
    loss = sum(weight[Y[v]] * cross_entropy(logits[v], Y[v]) for v in TRAIN)
    loss = loss / sum(weight[Y[v]] for v in TRAIN)
    soft, factor = soft_labels(share, steps)
    gammas = []
    for v in range(N if has_teacher else 0):
        gamma = beta * sum(float(soft[v][c]) * factor[c] for c in range(C))
        gammas.append(min(high, max(low, gamma)))
        apart = target[v].log() - logits[v].log_softmax(0)
        loss = loss + gammas[-1] * (target[v] * apart).sum() / N
    assert len(set(gammas)) > 3 or not has_teacher
    fit = GroupClientApp.fit(app, client, 1, GraphDownload(graph))
    assert fit.loss == close_to(loss)
    assert_moved(fit.model.state_dict(), sgd(before, loss), before)


# ---------------------------------------------------------------------------- FedPANO
def test_fedpano_trains_by_its_four_losses_in_turn() -> None:
    m = 3
    client = client_of("fedpano", m=m, noise_std=0.5)
    app = METHODS["fedpano"].load_client_app()()
    shapes = app.download_spec(client)
    shared = spread({n: torch.zeros(s) for n, s in shapes.items()})
    start = leaves(shared)
    initial = app.personal_model(client, Weights(shared)).state_dict()
    own = leaves({name: initial[f"classifier.{name}"] for name in ("weight", "bias")})

    def represent(w: State) -> list[Tensor]:
        """h of all nodes; no activation after the last layer but tanh."""
        first = relu(sage(w, "encoder.encoder.0", list(features(client))))
        return [h.tanh() for h in sage(w, "encoder.encoder.1", first)]

    def classified(w: State, name: str, h: Tensor) -> Tensor:
        return w[f"{name}weight"] @ h + w[f"{name}bias"]

    # step 5, Eqs. (2) and (5); all classes have training nodes
    h = represent(start)
    terms = {"generic": torch.zeros(()), "own": torch.zeros(())}
    for v in TRAIN:
        generic = cross_entropy(classified(start, "classifier.", h[v]), Y[v])
        terms["generic"] = terms["generic"] + generic / len(TRAIN)
        mine = cross_entropy(classified(own, "", h[v]), Y[v])
        terms["own"] = terms["own"] + mine / len(TRAIN)
    both = start | {f"own.{name}": t for name, t in own.items()}
    stepped = sgd(both, terms["generic"] + terms["own"])

    # step 6, Eqs. (6) and (7)
    phi = {k: t for k, t in leaves(stepped).items() if k.startswith("generator")}
    h = represent(stepped)
    draw = torch_generator(client.config.seed, 1, client.partition_id, "noise")

    def synthetic(w: State) -> list[list[Tensor]]:
        noise = 0.5 * torch.randn((len(TRAIN), m, 2 * P), generator=draw).double()
        out = []
        for row, v in zip(noise, TRAIN, strict=True):
            joined = torch.cat([h[v], mean_of([h[u] for u in near(v)], P)])
            out.append(
                [
                    linear(
                        w, "generator.2", linear(w, "generator.0", joined + e).relu()
                    ).tanh()
                    for e in row
                ]
            )
        return out

    made = synthetic(phi)
    terms["generator"] = sum(
        (x - h[v]).square().sum().sqrt() / (m * len(TRAIN))
        for v, copies in zip(TRAIN, made, strict=True)
        for x in copies
    )
    learned = sgd(phi, terms["generator"])

    # step 7, Eq. (8)
    theta = leaves({name: stepped[f"own.{name}"] for name in own})
    terms["synthetic"] = sum(
        cross_entropy(classified(theta, "", x), Y[v]) / (m * len(TRAIN))
        for v, copies in zip(TRAIN, synthetic(learned), strict=True)
        for x in copies
    )
    last = sgd(theta, terms["synthetic"])

    fit = app.fit(client, 1, Weights(shared))
    for name, value in terms.items():
        assert fit.terms[name] == close_to(value), name
    assert fit.loss == close_to(sum(terms.values()))
    wanted = {name: (stepped | learned)[name] for name in start}
    assert_moved(fit.upload.tensors, wanted, start)
    found = {name: fit.model.state_dict()[f"classifier.{name}"] for name in own}
    assert_moved(found, last, own)


# -------------------------------------------------------------------------- ADPFedGNN
def test_adpfedgnn_trains_by_cross_entropy_bound_and_decay() -> None:
    beta, mi, reg, rate = 0.3, 2.0, 0.05, 1e-3
    client = client_of(
        "adpfedgnn", rl=False, beta=beta, lambda_mi=mi, lambda_reg=reg, k=N,
        network_lr=rate,
    )  # fmt: skip
    app = METHODS["adpfedgnn"].load_client_app()()
    spec = app.download_spec(client)
    received = spread({n: torch.zeros(s) for n, s in spec.weights.items()})
    networks = spread({n: torch.zeros(s) for n, s in spec.networks.items()}, seed=1)
    download = SharedWeights(received, networks)
    kept = dict(app.personal_model(client, download).state_dict())
    size = len(kept["global_mask"])
    masks = [random(size, seed=8) > -0.5, random(size, seed=9) > 0.3]
    kept |= {"global_mask": masks[0], "local_mask": masks[1]}
    kept |= {n: 0.5 * t for n, t in kept.items() if t.is_floating_point()}
    client.state.set_group("model", kept)

    start, place, parts = {}, 0, [{}, {}]
    for name, shape in spec.weights.items():
        count = received[name].numel()
        own = {key: t for key, t in kept.items() if key.endswith(f"backbone.{name}")}
        (mine,) = own.values()
        pieces = [mask[place : place + count].view(shape) for mask in masks]
        # Eq. (15)
        start[name] = torch.where(pieces[1], mine, received[name])
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.double()
        place += count
    before, theta = leaves(start), leaves(networks)
    branches = []
    for part in parts:
        w = {name: t * part[name] for name, t in before.items()}
        h = relu(sage(w, "encoder.0", list(features(client))))
        h = relu(sage(w, "encoder.1", h))
        branches.append(
            (h, [w["classifier.weight"] @ x + w["classifier.bias"] for x in h])
        )
    (shared, z_global), (local, z_local) = branches
    logits = [beta * a + (1 - beta) * b for a, b in zip(z_global, z_local, strict=True)]
    task = sum(cross_entropy(logits[v], Y[v]) for v in TRAIN) / len(TRAIN)

    def estimated(kind: str, h: Tensor) -> Tensor:
        name = f"estimator.{kind}"
        return linear(theta, f"{name}.2", linear(theta, f"{name}.0", h).relu())

    bound = residual = torch.zeros(())
    for v in TRAIN:
        mean, log_var = (
            estimated(k, unit(shared[v])) for k in ("mean", "log_variance")
        )
        precision = (-log_var.tanh()).exp()
        squares = {u: (mean - unit(local[u])).square() * precision for u in TRAIN}
        others = sum(squares.values()) / len(TRAIN)
        # Eqs. (6) and (8)
        bound = bound + (others - squares[v]).sum() / 2 / len(TRAIN)
        residual = residual + (squares[v] + log_var.tanh()).sum() / len(TRAIN)
    assert bound.item() > 0  # below, it is clamped
    # λ ‖θ‖² is a step of its own; biases are exempt
    loss = task + mi * bound
    wanted = {
        name: w - (0 if name.endswith("bias") else LR * 2 * reg * before[name].detach())
        for name, w in sgd(before, loss).items()
    }
    fit = app.fit(client, 1, download)
    assert fit.loss == close_to(task)
    assert fit.terms["mutual-information"] == close_to(bound)
    found = {
        name: next(
            t
            for k, t in fit.model.state_dict().items()
            if k.endswith(f"backbone.{name}")
        )
        for name in start
    }
    assert_moved(found, wanted, before)
    # the estimator's first step of Adam has the size of its rate and the sign of Eq. (8)
    signs = torch.autograd.grad(residual, list(theta.values()))
    for (name, t), grad in zip(theta.items(), signs, strict=True):
        step = fit.upload.networks[name].double() - t.detach()
        clear = grad.abs() > 1e-3
        torch.testing.assert_close(
            step[clear], -rate * grad[clear].sign(), atol=1e-5, rtol=1e-2
        )
