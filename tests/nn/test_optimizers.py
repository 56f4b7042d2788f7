"""Optimizers that do not load torch's compiler, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl.nn import optimizers


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", optimizers.__all__)
def test_steps_and_state_are_those_of_torch(name: str, is_fused: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=draw)
    target = torch.randn(4, 3, generator=draw)
    found = []
    for module in (optimizers, torch.optim):
        first, second = (torch.nn.Parameter(start.clone()) for _ in range(2))
        kind: Any = getattr(module, name)
        optimizer = kind([first], lr=0.1, weight_decay=0.01, fused=is_fused)
        optimizer.add_param_group({"params": [second], "lr": 0.2})
        steps = []
        optimizer.register_step_pre_hook(lambda *_, steps=steps: steps.append(1))
        for _ in range(3):
            optimizer.zero_grad()
            ((first - target).square() + (second - first).square()).sum().backward()
            optimizer.step()
        assert len(steps) == 3
        assert isinstance(optimizer, getattr(torch.optim, name))
        moments = [t for s in optimizer.state.values() for t in s.values()]
        found.append([first, second, *(t for t in moments if t is not None)])
    assert len(found[0]) == len(found[1])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
