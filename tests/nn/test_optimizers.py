"""Optimizers that do not load torch's compiler, and quick ones, against torch's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from flower_fgl.nn import optimizers
from flower_fgl.nn.optimizers import quick

KINDS = ["Adam", "AdamW", "SGD"]


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_steps_and_state_are_those_of_torch(
    name: str, is_fused: bool, is_quick: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=draw)
    target = torch.randn(4, 3, generator=draw)
    found = []
    for module in (optimizers, torch.optim):
        first, second = (torch.nn.Parameter(start.clone()) for _ in range(2))
        kind: Any = getattr(module, name)
        optimizer = kind([first], lr=0.1, weight_decay=0.01, fused=is_fused)
        optimizer.add_param_group({"params": [second], "lr": 0.2})
        if is_quick and module is optimizers:
            quick(optimizer)
        steps = []
        optimizer.register_step_pre_hook(lambda *_, steps=steps: steps.append(1))
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        for _ in range(3):
            optimizer.zero_grad()
            ((first - target).square() + (second - first).square()).sum().backward()
            optimizer.step()
        assert len(steps) == 6
        assert isinstance(optimizer, getattr(torch.optim, name))
        moments = [t for s in optimizer.state.values() for t in s.values()]
        found.append([first, second, *(t for t in moments if t is not None)])
    assert len(found[0]) == len(found[1])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_quick_steps_turn_moments_that_decay_below_1e_38_into_zeros() -> None:
    found = []
    for is_quick in (True, False):
        weight = torch.nn.Parameter(torch.ones(8))
        optimizer = optimizers.Adam([weight], lr=0.1, fused=True)
        if is_quick:
            quick(optimizer)
        for step in range(860):
            weight.grad = torch.full((8,), float(step == 0))
            optimizer.step()
        found.append((optimizer.state[weight]["exp_avg"], weight.detach()))
    (mine, weight), (theirs, expected) = found
    assert torch.equal(mine, torch.zeros(8))
    assert 0 < float(theirs.max()) < torch.finfo(torch.float32).tiny
    assert torch.equal(weight, expected)
    assert optimizers.LEAST * 1.0 > 0  # as before the steps


def test_a_quick_optimizer_is_freed_without_a_search_for_cycles() -> None:
    optimizer = quick(optimizers.Adam([torch.nn.Parameter(torch.ones(2))], fused=True))
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
