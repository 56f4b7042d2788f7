from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes import universal as universal_module
from flower_fgl.algorithms.prototypes.universal import (
    PrototypeGenerator,
    adaptive_margin,
    class_spread,
    contrastive_loss,
    draw_context,
    mean_prototypes,
    personalise_prototypes,
    topology_loss,
)
from flower_fgl.strategies.fedproto import PrototypeTrainer

K, C, H, P = 4, 3, 3, 6


@pytest.fixture
def counts(generator: torch.Generator) -> Tensor:
    made = torch.randint(0, 6, (K, C, H), generator=generator)
    made[0, 0] = torch.tensor([4, 2, 0])  # client 0: class 0 without ring 2
    made[:, 2] = 0
    made[3, 2] = torch.tensor([5, 0, 0])  # class 2: client 3 alone, hop 0 alone
    return made


@pytest.fixture
def uploads(counts: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(K, C, H, P, generator=generator) / 3
    return made * (counts > 0)[..., None]


@pytest.fixture
def universal(generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(C, H, P, generator=generator), dim=-1)


def cos(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a, b, dim=0))


def one_positive_one_negative() -> tuple[Tensor, Tensor, Tensor]:
    """Anchor e_1 of class 0; its upload has cosine .8, that of class 1 cosine .3."""
    universal = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    positive = [0.8, math.sqrt(1 - 0.8**2)]
    negative = [0.3, math.sqrt(1 - 0.3**2)]
    uploads = torch.tensor([[[positive], [negative]]])
    return universal, uploads, torch.ones(1, 1, 2, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("shift", "value"),
    [
        # log(1 + e^{.3 − .8}) = log 1.60653 = 0.4741
        (0.0, 0.4741),
        # margin .5 against the positive: log(1 + e^{.3 − .3}) = log 2 = 0.6931, harder
        (-0.5, 0.6931),
        # the printed sign, for the positive: log(1 + e^{.3 − 1.3}) = 0.3133, easier
        (0.5, 0.3133),
    ],
)
def test_the_contrastive_loss_has_the_values_of_the_hand_example(
    shift: float, value: float
) -> None:
    universal, uploads, members = one_positive_one_negative()
    # the anchor of class 1 sees cosine √(1 − .09) = .953939 to its own and .6 to the
    # other: log(1 + e^{.6 − .953939 − s}); the loss is the mean over both anchors
    other = math.log1p(math.exp(0.6 - math.sqrt(0.91) - shift))
    loss = contrastive_loss(universal, uploads, members, shift=shift, tau=1.0)
    assert 2 * float(loss) - other == pytest.approx(value, abs=5e-5)


def test_negatives_use_their_own_similarity() -> None:
    # the first line of (7) has e^M in their place: log(1 + e^{0 − .8}) = 0.3711 always
    universal, uploads, members = one_positive_one_negative()
    before = contrastive_loss(universal, uploads, members, shift=0.0, tau=1.0)
    uploads[0, 1, 0] = torch.tensor([-1.0, 0.0])
    anchor = torch.cat([universal[:1], universal[:1]])
    after = contrastive_loss(anchor, uploads, members, shift=0.0, tau=1.0)
    # anchor e_1 twice: log(1 + e^{−1 − .8}) and log(1 + e^{.8 + 1})
    want = (math.log1p(math.exp(-1.8)) + math.log1p(math.exp(1.8))) / 2
    assert float(after) == pytest.approx(want, rel=1e-5)
    assert float(after) != pytest.approx(float(before))


@pytest.mark.parametrize(("shift", "tau"), [(-0.4, 1.0), (0.3, 0.5), (0.0, 0.1)])
def test_the_contrastive_loss_is_that_of_a_slow_loop(
    universal: Tensor,
    uploads: Tensor,
    counts: Tensor,
    generator: torch.Generator,
    shift: float,
    tau: float,
) -> None:
    members = draw_context(counts > 0, share=0.5, generator=generator)
    terms = []
    for c, h in itertools.product(range(C), range(H)):
        positive, negative = 0.0, 0.0
        for k, d, g in itertools.product(range(K), range(C), range(H)):
            if members[h, k, d, g]:
                similar = cos(universal[c, h], uploads[k, d, g])
                if d == c:
                    positive += math.exp((similar + shift) / tau)
                else:
                    negative += math.exp(similar / tau)
        if positive:
            terms.append(-math.log(positive) + math.log(positive + negative))
    got = contrastive_loss(universal, uploads, members, shift=shift, tau=tau)
    assert len(terms) < C * H
    assert float(got) == pytest.approx(sum(terms) / len(terms), rel=1e-4)


def test_a_class_that_no_client_has_gets_no_gradient_and_no_nan(
    universal: Tensor, uploads: Tensor, counts: Tensor
) -> None:
    counts = counts.clone()
    counts[:, 1] = 0
    members = draw_context(counts > 0, share=0.5, generator=torch.Generator())
    anchor = universal.clone().requires_grad_()
    contrastive_loss(anchor, uploads, members, shift=-0.1, tau=1.0).backward()
    assert bool(anchor.grad.isfinite().all())
    assert not anchor.grad[1].any()
    assert anchor.grad[0].any()


def test_each_class_that_clients_have_gets_a_gradient_from_their_distances(
    universal: Tensor, generator: torch.Generator
) -> None:
    uploads = torch.randn(K, C, H, P, generator=generator) / 3
    present = torch.ones(K, C, H, dtype=torch.bool)
    present[:, 1] = False
    members = draw_context(present, share=0.5, generator=generator)
    made = universal.clone().requires_grad_()
    topology_loss(made, uploads, members, margin=0.7).backward()
    assert made.grad is not None
    assert made.grad.isfinite().all()
    assert not made.grad[1].any()
    assert made.grad[[0, *range(2, C)]].any(dim=2).all()
    # against a finite difference
    step = torch.zeros_like(universal)
    step[0, 0, 0] = 0.01
    losses = [
        float(topology_loss(universal + s, uploads, members, margin=0.7))
        for s in (step, -step)
    ]
    assert (losses[0] - losses[1]) / 0.02 == pytest.approx(
        float(made.grad[0, 0, 0]), abs=1e-3
    )


def test_without_uploads_the_loss_is_zero(universal: Tensor, uploads: Tensor) -> None:
    nobody = torch.zeros(H, K, C, H, dtype=torch.bool)
    for loss in (
        contrastive_loss(universal, uploads, nobody, shift=0.0, tau=1.0),
        topology_loss(universal, uploads, nobody, margin=0.0),
    ):
        assert float(loss) == 0


def test_the_context_has_the_stated_number_of_uploads_of_other_hops(
    counts: Tensor, generator: torch.Generator
) -> None:
    present = counts > 0
    members = draw_context(present, share=0.5, generator=generator)
    assert not (members & ~present).any()
    for h, c in itertools.product(range(H), range(C)):
        assert torch.equal(members[h, :, c, h], present[:, c, h])
        others = [g for g in range(H) if g != h]
        available = int(present[:, c, others].sum())
        wanted = math.ceil(0.5 * int(present[:, c, h].sum()))
        assert int(members[h, :, c, others].sum()) == min(wanted, available)


def test_without_context_only_uploads_of_the_hop_are_used(counts: Tensor) -> None:
    members = draw_context(counts > 0, share=0.0, generator=torch.Generator())
    for h in range(H):
        others = [g for g in range(H) if g != h]
        assert not members[h][..., others].any()


def test_every_epoch_draws_a_new_context(generator: torch.Generator) -> None:
    present = torch.ones(K, C, H, dtype=torch.bool)
    first = draw_context(present, share=0.5, generator=generator)
    assert not torch.equal(first, draw_context(present, share=0.5, generator=generator))


def test_the_margin_is_the_largest_cosine_of_two_classes() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.8])
    uploads = torch.stack([a, b])[None, :, None]
    counts = torch.ones(1, 2, 1, dtype=torch.int64)
    assert float(adaptive_margin(uploads, counts, epsilon=1.0)) == pytest.approx(0.6)
    assert float(adaptive_margin(uploads, counts, epsilon=0.5)) == pytest.approx(0.5)
    uploads[0, 1, 0] = -a
    assert float(adaptive_margin(uploads, counts, epsilon=0.5)) == 0


def test_missing_prototypes_do_not_enter_the_margin(
    uploads: Tensor, counts: Tensor
) -> None:
    spoilt = torch.where((counts > 0)[..., None], uploads, 99.0)
    for margin in (
        lambda x: adaptive_margin(x, counts, epsilon=1.0),
        lambda x: class_spread(x, counts, limit=100.0),
    ):
        torch.testing.assert_close(margin(spoilt), margin(uploads))


def test_a_single_class_has_no_margin() -> None:
    one = torch.ones(2, 1, 1, 3)
    counts = torch.ones(2, 1, 1, dtype=torch.int64)
    assert float(adaptive_margin(one, counts, epsilon=0.5)) == 0
    assert float(class_spread(one, counts, limit=100.0)) == 0


def test_the_spread_is_the_largest_distance_to_the_nearest_class() -> None:
    # on a line at 0, 1, 4: nearest other classes at 1, 1, 3
    uploads = torch.tensor([0.0, 1.0, 4.0]).view(1, 3, 1, 1)
    counts = torch.ones(1, 3, 1, dtype=torch.int64)
    assert float(class_spread(uploads, counts, limit=100.0)) == pytest.approx(3)
    assert float(class_spread(uploads, counts, limit=2.0)) == pytest.approx(2)
    two = class_spread(uploads[:, 1:], counts[:, 1:], limit=100.0)
    assert float(two) == pytest.approx(3)


def test_fedtgp_classifies_uploads_by_distance(
    universal: Tensor, uploads: Tensor, counts: Tensor
) -> None:
    members = draw_context(counts > 0, share=0.5, generator=torch.Generator())
    terms = []
    for h, k, c, g in members.nonzero().tolist():
        known = [d for d in range(C) if members[h, :, d].any()]
        away = {d: float((uploads[k, c, g] - universal[d, h]).norm()) for d in known}
        away[c] += 0.7
        total = sum(math.exp(-value) for value in away.values())
        terms.append(away[c] + math.log(total))
    got = topology_loss(universal, uploads, members, margin=0.7)
    assert float(got) == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_fedproto_weights_by_count_and_omits_missing_classes() -> None:
    uploads = torch.tensor([[[[1.0]]], [[[4.0]]], [[[99.0]]]])
    counts = torch.tensor([[[1]], [[2]], [[0]]])
    # (1·1 + 2·4) / 3 = 3
    assert float(mean_prototypes(uploads, counts)) == pytest.approx(3)
    assert float(mean_prototypes(uploads, counts * 0)) == 0
    # a second class, of one node: its mean is that node's
    both = torch.cat([uploads, torch.tensor([[[[7.0]]], [[[0.0]]], [[[0.0]]]])], dim=1)
    number = torch.cat([counts, torch.tensor([[[1]], [[0]], [[0]]])], dim=1)
    assert mean_prototypes(both, number).flatten().tolist() == pytest.approx([3, 7])


def slow_personalise(
    universal: Tensor, uploads: Tensor, counts: Tensor, alpha: float, threshold: float
) -> Tensor:
    """Eq. (5) with loops over clients, classes and hops."""
    out = torch.zeros_like(uploads)
    for i, c, h in itertools.product(range(K), range(C), range(H)):
        if counts[i, c, h] == 0:
            continue
        near = [
            j
            for j in range(K)
            if counts[j, c, h] > 0
            and (i == j or cos(uploads[i, c, h], uploads[j, c, h]) >= threshold)
        ]
        total = sum(int(counts[j, c, h]) for j in near)
        mixed = sum(int(counts[j, c, h]) / total * uploads[j, c, h] for j in near)
        out[i, c, h] = alpha * universal[c, h] + (1 - alpha) * mixed
    return out


@pytest.mark.parametrize(
    ("alpha", "threshold"), [(0.5, 0.8), (0.3, 0.1), (0.0, -1.0), (0.7, 1.0)]
)
def test_personalising_is_that_of_a_slow_loop(
    universal: Tensor, uploads: Tensor, counts: Tensor, alpha: float, threshold: float
) -> None:
    got, _ = personalise_prototypes(
        universal, uploads, counts, alpha=alpha, threshold=threshold
    )
    want = slow_personalise(universal, uploads, counts, alpha, threshold)
    torch.testing.assert_close(got, want)


def test_alpha_one_ignores_the_other_clients(
    universal: Tensor, uploads: Tensor, counts: Tensor
) -> None:
    out, _ = personalise_prototypes(
        universal, uploads, counts, alpha=1.0, threshold=0.0
    )
    has = counts > 0
    torch.testing.assert_close(out[has], universal.expand_as(uploads)[has])


def test_threshold_one_mixes_only_the_clients_own_prototype(
    universal: Tensor, uploads: Tensor, counts: Tensor
) -> None:
    out, _ = personalise_prototypes(
        universal, uploads, counts, alpha=0.0, threshold=1.0
    )
    torch.testing.assert_close(out, uploads)


def test_a_class_of_one_client_is_not_fused(
    universal: Tensor, uploads: Tensor, counts: Tensor
) -> None:
    out, _ = personalise_prototypes(
        universal, uploads, counts, alpha=0.0, threshold=-1.0
    )
    torch.testing.assert_close(out[3, 2, 0], uploads[3, 2, 0])
    assert not out[:3, 2].any()


def test_old_uploads_affect_only_their_own_client(
    universal: Tensor, uploads: Tensor, counts: Tensor
) -> None:
    fresh = torch.tensor([False, True, True, True])
    out, _ = personalise_prototypes(
        universal, uploads, counts, alpha=0.0, threshold=-1.0, is_fresh=fresh
    )
    alone, _ = personalise_prototypes(
        universal, uploads[1:], counts[1:], alpha=0.0, threshold=-1.0
    )
    torch.testing.assert_close(out[1:], alone)
    assert not torch.equal(out[0], uploads[0])


def class_cosine(universal: Tensor) -> float:
    """Mean cosine between prototypes of different classes at one hop."""
    unit = F.normalize(universal, dim=-1)
    both = torch.einsum("chp,dhp->hcd", unit, unit)
    return float(both[:, ~torch.eye(len(unit), dtype=torch.bool)].mean())


@pytest.fixture
def crowded(generator: torch.Generator) -> Tensor:
    """Uploads of classes that point almost the same way."""
    centre = torch.ones(1, C, H, 16) + 0.5 * torch.randn(
        1, C, H, 16, generator=generator
    )
    return centre + 0.1 * torch.randn(K, C, H, 16, generator=generator)


def trained(crowded: Tensor, *, margin: float) -> tuple[PrototypeTrainer, Tensor]:
    counts = torch.ones(K, C, H, dtype=torch.int64)
    trainer = PrototypeTrainer((C, H, 16), seed=0, is_normalised=True, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    shift = -adaptive_margin(crowded, counts, epsilon=margin)

    def loss(made: Tensor) -> Tensor:
        members = draw_context(counts > 0, share=0.0, generator=generator)
        return contrastive_loss(made, crowded, members, shift=shift, tau=0.2)

    return trainer, trainer.train(60, loss)


def test_server_training_lowers_its_loss_and_separates_the_classes(
    crowded: Tensor,
) -> None:
    uploads_cosine = class_cosine(crowded.mean(0))
    trainer, made = trained(crowded, margin=0.5)
    assert trainer.losses[-1] < trainer.losses[0]
    assert class_cosine(made) < uploads_cosine
    torch.testing.assert_close(made.norm(dim=-1), torch.ones(C, H))


def test_the_adaptive_margin_separates_the_classes_further(crowded: Tensor) -> None:
    _, without = trained(crowded, margin=0.0)
    _, with_margin = trained(crowded, margin=0.5)
    assert class_cosine(with_margin) < class_cosine(without)


def test_table_and_network_both_learn(universal: Tensor, uploads: Tensor) -> None:
    made = PrototypeGenerator(C, H, P)
    members = torch.ones(H, K, C, H, dtype=torch.bool)
    contrastive_loss(made(), uploads, members, shift=0.0, tau=1.0).backward()
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_the_fused_share_counts_pairs_of_two_clients_that_have_the_prototype() -> None:
    # one class, one hop; clients 0 and 1 are 30° apart, client 2 is orthogonal to 0
    values = torch.tensor([[1.0, 0.0], [3**0.5, 1.0], [0.0, 2.0], [1.0, 0.0]])
    uploads = values[:, None, None]
    counts = torch.tensor([2, 1, 3, 0])[:, None, None]

    def share(fresh: list[bool], clients: int = 4) -> float:
        _, found = personalise_prototypes(
            torch.zeros(1, 1, 2),
            uploads[:clients],
            counts[:clients],
            alpha=0.5,
            threshold=0.8,
            is_fresh=torch.tensor(fresh[:clients]),
        )
        return found

    # of the pairs of 0, 1 and 2, (0, 1) and (1, 0) have cosine 0.87
    assert share([True] * 4) == pytest.approx(2 / 6)
    assert share([False, True, True, True]) == pytest.approx(1 / 6)
    assert math.isnan(share([True] * 4, clients=1))


def test_blocks_of_classes_and_hops_give_the_same(
    universal: Tensor, uploads: Tensor, counts: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"alpha": 0.3, "threshold": 0.1}
    whole = personalise_prototypes(universal, uploads, counts, **settings)
    monkeypatch.setattr(universal_module, "BLOCK", 1)
    blocks = personalise_prototypes(universal, uploads, counts, **settings)
    torch.testing.assert_close(blocks, whole)
