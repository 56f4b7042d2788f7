"""One optimizer for the stacked weights of many clients, with moments per client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import make_optimizer
from flower_fgl.core.config import RunConfig

__all__ = ["StackedOptimizer", "step_counts"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Moments of Adam and AdamW. SGD without momentum has none."""


def step_counts(
    client: Client, known: dict[int, float], group: str = "optimizer"
) -> tuple[tuple[str, float], ...]:
    """Return name and optimizer steps of each parameter in a client's state, sorted.

    Clients of equal counts share one fused step: Adam corrects its moments by the count.
    It is empty if there are none. ``known`` caches counts by the ``id`` of their tensor;
    ``group`` is the group of the state.
    """
    if client.config.optimizer_state != "keep":
        return ()
    start = f"{group}/step/"

    def number(count: Tensor) -> float:
        if id(count) not in known:
            known[id(count)] = float(count)
        return known[id(count)]

    return tuple(
        (name[len(start) :], number(client.state.tensors[name]))
        for name in sorted(n for n in client.state.tensors if n.startswith(start))
    )


def in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Transpose the matrices of ``tensor`` if those of ``parameter`` are column-major.

    A fused optimizer copies every tensor that is not contiguous.
    """
    return tensor if parameter.is_contiguous() else tensor.transpose(-2, -1)


class StackedOptimizer:
    """The clients' optimizer on stacked weights (K, ...); see :func:`step_counts`.

    With a learning rate ``lr`` it starts without moments, and none are kept. Other
    settings than the clients' are in ``config``; their states keep the moments in a
    ``group``, as views of those of all clients if they are ``is_shared``.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        *,
        lr: float | None = None,
        config: RunConfig | None = None,
        group: str = "optimizer",
        is_shared: bool = False,
    ) -> None:
        self._clients, self._lr = clients, lr
        self._group, self._is_shared = group, is_shared
        config = config or clients[0].config
        self._parameters = dict(model.named_parameters())
        self._is_kept = lr is None and config.optimizer_state == "keep"
        has_moments = config.optimizer != "sgd"
        known: dict[int, float] = {}
        counts = [step_counts(client, known, group) if self._is_kept else ()
                  for client in clients]  # fmt: skip
        bounds = [0]
        for _, run in groupby(counts):
            bounds.append(bounds[-1] + len(list(run)))
        self._runs = list(pairwise(bounds))
        self._bases = self._restored() if has_moments else {}
        self._steps: list[dict[str, Tensor]] = []
        self._views: list[dict[str, nn.Parameter]] = []
        views = nn.ParameterList()
        exempt = {id(parameter) for parameter in getattr(model, "undecayed", ())}
        undecayed: list[nn.Parameter] = []
        for low, high in self._runs:
            part = {
                name: nn.Parameter(in_order(p.detach(), p)[low:high], False)
                for name, p in self._parameters.items()
            }
            self._views.append(part)
            views.extend(part.values())
            undecayed += [
                v for n, v in part.items() if id(self._parameters[n]) in exempt
            ]
        views.undecayed = undecayed  # type: ignore[assignment]
        self._optimizer = make_optimizer(views, config, lr=lr)
        for part, (low, high) in zip(self._views, self._runs, strict=True):
            before = dict(counts[low])
            steps = {}
            for name, view in part.items() if has_moments else ():
                steps[name] = torch.tensor(before.get(name, 0.0), device=view.device)
                self._optimizer.state[view] = {"step": steps[name]}
                for key in MOMENTS:
                    base = in_order(self._bases[key, name], self._parameters[name])
                    self._optimizer.state[view][key] = base[low:high]
            self._steps.append(steps)

    def _restored(self) -> dict[tuple[str, str], Tensor]:
        """Return the stacked moments of all clients, zero where a client has none."""
        bases = {}
        for name, parameter in self._parameters.items():
            for key in MOMENTS:
                kept = [
                    client.state.tensors.get(f"{self._group}/{key}/{name}")
                    if self._is_kept
                    else None
                    for client in self._clients
                ]
                base = torch.empty_like(parameter, requires_grad=False)
                found = [
                    in_order(t.to(base.device), parameter)
                    for t in kept
                    if t is not None and t.shape == base.shape[1:]
                ]
                if len(found) == len(kept):
                    torch.stack(found, out=in_order(base, parameter))
                else:
                    base.zero_()
                    for row, t in zip(base.unbind(), kept, strict=True):
                        if t is not None and t.shape == row.shape:
                            row.copy_(t)
                bases[key, name] = base
        return bases

    def part(self, model: nn.Module, places: Sequence[int]) -> StackedOptimizer:
        """Continue with some clients, whose weights are those of a smaller ``model``.

        Only for an optimizer with its own ``lr``: all its clients took the same steps.
        """
        clients = [self._clients[place] for place in places]
        other = StackedOptimizer(model, clients, lr=self._lr)
        for (key, name), base in other._bases.items():
            parameter = self._parameters[name]
            rows = in_order(self._bases[key, name], parameter)[places]
            in_order(base, parameter).copy_(rows)
        for found, steps in zip(other._steps, self._steps, strict=True):
            for name, step in steps.items():
                found[name].copy_(step)
        return other

    def step(self) -> None:
        """Update all weights by their gradients, and reset the gradients."""
        for part, (low, high) in zip(self._views, self._runs, strict=True):
            for name, view in part.items():
                parameter = self._parameters[name]
                grad = parameter.grad
                if grad is not None:
                    grad = in_order(grad, parameter)
                    if len(self._runs) > 1:
                        grad = grad[low:high]
                    grad = grad.contiguous()
                view.grad = grad
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self) -> dict[str, list[Tensor]]:
        """Return the moments of each parameter (K, ...)."""
        found: dict[str, list[Tensor]] = {}
        for (_, name), base in self._bases.items():
            found.setdefault(name, []).append(base)
        return found

    def save(self) -> None:
        """Store each client's moments in its state, if the settings keep them."""
        if not self._is_kept:
            return
        start = f"{self._group}/"
        rows = {
            f"{start}{key}/{name}": base.unbind()
            for (key, name), base in self._bases.items()
        }
        for steps, (low, high) in zip(self._steps, self._runs, strict=True):
            used = {name: step for name, step in steps.items() if float(step)}
            counts = {f"{start}step/{name}": step for name, step in used.items()}
            paths = [f"{start}{key}/{name}" for name in used for key in MOMENTS]
            for place in range(low, high):
                state = self._clients[place].state
                tensors = state.tensors.items()
                kept = {p: t for p, t in tensors if not p.startswith(start)}
                kept |= counts
                for path in paths:
                    row = rows[path][place]
                    kept[path] = row if self._is_shared else row.clone()
                state.tensors = kept
