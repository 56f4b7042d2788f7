"""Server-side training of prototypes for FedPG and FedTGP."""

from collections.abc import Callable

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.universal import PrototypeGenerator
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.nn import optimizers

__all__ = ["PrototypeTrainer"]


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

        ``losses`` stores the values.
        """
        self.losses = []
        for _ in range(epochs):
            self.optimizer.zero_grad()
            value = loss(self.generator())
            value.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(float(value.detach()))
        with torch.no_grad():
            out: Tensor = self.generator()
        return out
