"""Optimizers of torch that do not load torch's compiler.

At their first call the methods of ``torch.optim`` import ``torch._dynamo``, which takes as
long as importing torch. The functions that they wrap compute the same.
"""

import inspect
import weakref
from functools import partial
from typing import Any, TypeVar, cast

import torch

__all__ = ["SGD", "Adam", "AdamW", "quick"]

Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

LEAST = 5e-324
"""A number that is zero for a processor that does not compute with such small ones."""


def _without_compiler(kind: Kind) -> Kind:
    """Return a subclass whose methods are those that torch wraps for its compiler."""
    own = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
        "zero_grad": inspect.unwrap(kind.zero_grad),
    }
    return cast(Kind, type(kind.__name__, (kind,), own))


Adam = _without_compiler(torch.optim.Adam)
AdamW = _without_compiler(torch.optim.AdamW)
SGD = _without_compiler(torch.optim.SGD)


def quick(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer ready for thousands of steps; return it.

    A fused step of Adam then takes 15 µs plus its arithmetic, and 50 µs in torch. The
    moments of a weight whose gradient stays zero decay to numbers below 1e-38, with which
    processors take ten times as long; a quick step makes them zero.
    """
    # a reference to itself would keep it, and its moments, until a search for cycles
    vars(optimizer)["step"] = partial(_step, weakref.ref(optimizer))
    return optimizer


def _step(reference: weakref.ref[torch.optim.Optimizer]) -> None:
    optimizer = reference()
    assert optimizer is not None
    was_flushed = LEAST * 1.0 == 0
    torch.set_flush_denormal(True)
    try:
        groups = optimizer.param_groups
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not all(
            _is_ready(group, optimizer.state) for group in groups
        ):
            type(optimizer).step(optimizer)
            return
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (), {})
        with torch.no_grad():
            for group in groups:
                _fused_step(optimizer, group)
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, (), {})
    finally:
        torch.set_flush_denormal(was_flushed)


def _is_ready(group: dict[str, Any], state: Any) -> bool:
    """Return whether a step is fused, and all weights have moments already."""
    is_plain = group["fused"] and not group["amsgrad"] and not group["maximize"]
    return is_plain and all(state[p] for p in group["params"] if p.grad is not None)


def _fused_step(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Take a step of Adam or AdamW as torch does."""
    used = [p for p in group["params"] if p.grad is not None]
    if not used:
        return
    states = [optimizer.state[p] for p in used]
    is_decoupled = isinstance(optimizer, torch.optim.AdamW)
    update = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    update(
        used,
        [p.grad for p in used],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
