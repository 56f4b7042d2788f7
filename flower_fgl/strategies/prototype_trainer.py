"""Server-side training of prototypes for FedPG and FedTGP; the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_fgl.algorithms.prototypes.universal import PrototypeGenerator
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.nn import optimizers
from flower_fgl.runs.checkpoints import Snapshot

__all__ = ["PrototypeTrainer", "copy_moments", "load_moments"]


def copy_moments(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Copy the tensors that an optimizer keeps, named ``<moment>/<parameter>``."""
    return {
        f"{moment}/{name}": tensor.clone()
        for name, parameter in parameters.items()
        for moment, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_moments(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    moments: Mapping[str, Tensor],
) -> None:
    """Replace the state of an optimizer by that of :func:`copy_moments`."""
    optimizer.state.clear()
    for path, tensor in moments.items():
        moment, _, name = path.partition("/")
        optimizer.state[parameters[name]][moment] = tensor.clone()


class PrototypeTrainer:
    """Generator of prototypes and its Adam optimizer, both kept between rounds.

    ``table`` is (C, H, p). With ``is_fused`` Adam steps in one kernel: faster, and
    different in the last bits.
    """

    def __init__(
        self,
        table: tuple[int, int, int],
        *,
        seed: int,
        is_normalised: bool,
        lr: float,
        weight_decay: float = 0.0,
        is_fused: bool = False,
    ) -> None:
        with seeded(derive_seed(seed, 0, SERVER, "prototypes")):
            self.generator = PrototypeGenerator(*table, is_normalised=is_normalised)
        self.optimizer = optimizers.Adam(
            self.generator.parameters(),
            lr=lr,
            weight_decay=weight_decay,
            fused=is_fused or None,
        )
        self.losses: list[float] = []

    def train(self, epochs: int, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Minimise a loss of the prototypes (C, H, p), and return them, one step per epoch.

        ``losses`` stores the values. A PayloadError says that a weight is no longer
        finite.
        """
        self.losses = []
        for _ in range(epochs):
            self.optimizer.zero_grad()
            value = loss(self.generator())
            value.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(float(value.detach()))
        if not all(bool(w.isfinite().all()) for w in self.generator.parameters()):
            raise PayloadError("the trained prototypes are not finite")
        with torch.no_grad():
            out: Tensor = self.generator()
        return out

    def state(self) -> Snapshot:
        """Return tensors ``weights/<name>`` and ``adam/<moment>/<name>``."""
        named = dict(self.generator.named_parameters())
        moments = copy_moments(self.optimizer, named)
        weights = {n: t.clone() for n, t in self.generator.state_dict().items()}
        tensors = {f"weights/{name}": tensor for name, tensor in weights.items()}
        return Snapshot(tensors | {f"adam/{n}": t for n, t in moments.items()})

    def load_state(self, state: Snapshot) -> None:
        """Restore a state; one of another generator raises a RuntimeError or KeyError."""
        self.generator.load_state_dict(state.part("weights").tensors)
        named = dict(self.generator.named_parameters())
        load_moments(self.optimizer, named, state.part("adam").tensors)
