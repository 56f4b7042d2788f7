from __future__ import annotations

import torch

from flower_fgl.core.seeds import derive_seed, numpy_generator, seeded, torch_generator


def test_a_seed_depends_on_each_of_its_parts() -> None:
    base = derive_seed(0, 1, 2, "dropout")
    others = [
        derive_seed(1, 1, 2, "dropout"),
        derive_seed(0, 2, 2, "dropout"),
        derive_seed(0, 1, 3, "dropout"),
        derive_seed(0, 1, 2, "batches"),
    ]
    assert len({base, *others}) == 5
    assert derive_seed(0, 1, 2, "dropout") == base
    assert 0 <= base < 2**63


def test_a_seed_is_the_same_in_every_version() -> None:
    assert derive_seed(0, 1, 2, "dropout") == 3719375658264748528


def test_generators_repeat() -> None:
    assert torch.equal(
        torch.rand(3, generator=torch_generator(0, 1, 2, "a")),
        torch.rand(3, generator=torch_generator(0, 1, 2, "a")),
    )
    first, second = numpy_generator(0, 1, 2, "a"), numpy_generator(0, 1, 2, "a")
    assert first.random() == second.random()


def test_a_seeded_block_repeats_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    with seeded(7):
        first = torch.rand(3)
    with seeded(7):
        second = torch.rand(3)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
