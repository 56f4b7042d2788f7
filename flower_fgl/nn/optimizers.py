"""Optimizers of torch that do not load torch's compiler.

At their first call the methods of ``torch.optim`` import ``torch._dynamo``, which takes as
long as importing torch. The functions that they wrap compute the same.
"""

import inspect
from typing import TypeVar, cast

import torch

__all__ = ["SGD", "Adam", "AdamW"]

Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])


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
