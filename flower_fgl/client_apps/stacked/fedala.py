"""Stacked form of FedALA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_fgl.client_apps.fedala import (
    WEIGHT_LR,
    blend,
    blend_step,
    is_learned,
    last_layers,
    num_sampled,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.stacked.averaging import StackedFedAvg
from flower_fgl.client_apps.stacked.cohort import Cohort, Rows, cross_entropy
from flower_fgl.client_apps.stacked.half import StackedFit
from flower_fgl.nn.stacked import split_state
from flower_fgl.protocols.fedavg import Weights

__all__ = ["StackedFedALA"]


class StackedFedALA(StackedFedAvg):
    """Blend the last layers of the old and the received models, then train."""

    def key(self, client: Client) -> tuple[bool, bool]:
        """Separate clients without an old model, and without blending weights."""
        names = client.state.tensors
        old, kept = (
            any(name.startswith(f"{prefix}/") for name in names)
            for prefix in ("model", "blend")
        )
        return old, kept

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train as FedAvg, but from the blended weights."""
        has_old, has_weights = self.key(cohort.clients[0])
        if has_old:
            states = self.learn(cohort, downloads, is_first=not has_weights)
            downloads = [Weights(state) for state in states]
        return super().fit(cohort, downloads)

    def learn(
        self, cohort: Cohort, downloads: Sequence[Weights], *, is_first: bool
    ) -> list[dict[str, Tensor]]:
        """Learn W of every client, store it, and return the blended states."""
        settings = cohort.config.method_config
        old = cohort.build_model(cohort.stored_models()).state_dict()
        model = cohort.build_model([d.tensors for d in downloads]).eval()
        state = {name: t.detach().clone() for name, t in model.state_dict().items()}
        names = last_layers(
            (name for name, _ in model.named_parameters()), settings.layers
        )
        weights = {name: torch.ones_like(state[name]) for name in names}
        if not is_first:
            weights = {
                name: torch.stack(
                    [client.state.tensors[f"blend/{name}"] for client in cohort.clients]
                ).to(cohort.device)
                for name in names
            }
        rows = self.sample_nodes(cohort, share=settings.sample / 100)
        losses: list[list[float]] = [[] for _ in cohort.clients]
        active = [True] * len(cohort)
        parameters = dict(model.named_parameters())
        while any(active):
            with torch.no_grad():
                for name in names:
                    new = blend(old[name], state[name], weights[name])
                    parameters[name].copy_(new)
            logits = rows.pick(model(cohort.inputs))
            loss = rows.mean(cross_entropy(logits, rows.labels))
            gradients = torch.autograd.grad(
                loss.sum(), [parameters[name] for name in names]
            )
            learning = torch.tensor(active, device=cohort.device)
            for name, gradient in zip(names, gradients, strict=True):
                step = blend_step(
                    weights[name], gradient, old[name], state[name], lr=WEIGHT_LR
                )
                moves = learning.view(-1, *[1] * (step.dim() - 1))
                weights[name] = torch.where(moves, step, weights[name])
            for place, value in enumerate(loss.tolist()):
                if active[place]:
                    losses[place].append(value)
                    active[place] = not is_learned(losses[place], is_first=is_first)
        self.store(cohort, weights)
        state |= {name: blend(old[name], state[name], weights[name]) for name in names}
        return split_state(state, len(cohort))

    def sample_nodes(self, cohort: Cohort, *, share: float) -> Rows:
        """Return a random share of each client's training nodes."""
        counts = cohort.rows.count.tolist()
        first, places = 0, []
        for generator, count in zip(cohort.generators("blend"), counts, strict=True):
            order = torch.randperm(count, generator=generator)
            number = num_sampled(count, share=share)
            places.append(first + order[:number].sort().values)
            first += count
        return cohort.rows.select(torch.cat(places).to(cohort.device))

    def store(self, cohort: Cohort, weights: Mapping[str, Tensor]) -> None:
        """Store W in the state of each client."""
        rows = split_state(weights, len(cohort))
        for client, own in zip(cohort.clients, rows, strict=True):
            client.state.set_group("blend", own)
