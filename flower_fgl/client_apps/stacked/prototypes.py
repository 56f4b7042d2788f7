"""Stacked form of FedProto and FedTGP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.stacked.cohort import Cohort, Rows
from flower_fgl.client_apps.stacked.half import StackedFit, StackedHalf
from flower_fgl.nn.embedding_recorder import RecordingBackbone
from flower_fgl.protocols.prototypes import LocalPrototypes, Prototypes

__all__ = ["StackedFedProto", "class_distance", "class_means"]


def class_counts(rows: Rows, num_classes: int) -> Tensor:
    """Count the rows of each client and class: (K, C)."""
    cells = rows.client * num_classes + rows.labels
    count = torch.bincount(cells, minlength=rows.num_clients * num_classes)
    return count.view(rows.num_clients, num_classes)


def class_means(embedding: Tensor, rows: Rows, num_classes: int) -> Tensor:
    """Average embeddings by client and class, FedProto Eq. (3).

    Parameters
    ----------
    embedding : Tensor of shape (t, p), float32
        f(x) of the rows.
    rows : Rows
        Their clients and classes.
    num_classes : int
        Number of classes C.

    Returns
    -------
    Tensor of shape (K, C, p), float32
        Zero for a class without nodes.
    """
    cells = rows.client * num_classes + rows.labels
    count = class_counts(rows, num_classes).clamp(min=1)
    total = embedding.new_zeros(count.numel(), embedding.shape[1])
    total = total.index_add(0, cells, embedding)
    return total.view(*count.shape, -1) / count[..., None]


def class_distance(
    embedding: Tensor, rows: Rows, target: Tensor, present: Tensor
) -> Tensor:
    """Sum each client's squared distances of classes to prototypes, FedProto Eq. (7).

    Parameters
    ----------
    embedding : Tensor of shape (t, p), float32
        f(x) of the rows, with gradient.
    rows : Rows
        Their clients and classes.
    target : Tensor of shape (K, C, p), float32
        P̄, a constant.
    present : Tensor of shape (K, C), bool
        Classes that have a prototype; the others add nothing.

    Returns
    -------
    Tensor of shape (K,)
    """
    own = rows.client, rows.labels
    weight = present[own] / class_counts(rows, target.shape[1])[own]
    per_node = F.mse_loss(embedding, target[own], reduction="none").mean(dim=1)
    return rows.sum(weight * per_node)


class StackedFedProto(StackedHalf):
    """Pull the embeddings of each class towards its global prototype."""

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train, then average the embeddings of the training nodes by class."""
        initial = cohort.initial_state()
        model = RecordingBackbone(
            cohort.build_model([own or initial for own in cohort.stored_models()])
        )
        losses = cohort.train(model, penalty=self.penalty(cohort, model, downloads))
        rows, classes = cohort.rows, cohort.num_classes
        means = class_means(rows.pick(model.at_rest(cohort.inputs)), rows, classes)
        counts = class_counts(rows, classes)[..., None].cpu()  # (K, C, 1)
        uploads = [
            LocalPrototypes(*pair)
            for pair in zip(means[:, :, None].cpu(), counts, strict=True)
        ]
        return StackedFit(model.backbone, uploads, losses)

    def penalty(
        self,
        cohort: Cohort,
        model: RecordingBackbone,
        downloads: Sequence[Prototypes],
    ) -> Callable[[], Tensor] | None:
        """Return the prototype terms, or ``None`` while there are no prototypes."""
        present = torch.stack([d.present[:, 0] for d in downloads]).to(cohort.device)
        if not present.any():
            return None
        target = torch.stack([d.values[:, 0] for d in downloads]).to(cohort.device)
        weight = float(cohort.config.method_config.proto_weight)
        rows = cohort.rows

        def term() -> Tensor:
            embedding = rows.pick(model.embedding)
            return weight * class_distance(embedding, rows, target, present)

        return term
