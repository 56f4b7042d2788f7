"""FedGen's generator of latent vectors, and the losses that use it.

Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning",
ICML 2021.
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

__all__ = ["LatentGenerator", "class_shares", "divergence_terms", "diversity_loss"]
__all__ += ["ensemble_loss", "generator_shapes", "mean_divergence"]


class LatentGenerator(nn.Module):
    """G: a class and noise become an embedding of width p."""

    def __init__(
        self, num_classes: int, width: int, *, noise_channels: int, hidden_channels: int
    ) -> None:
        super().__init__()
        self.num_classes, self.noise_channels = num_classes, noise_channels
        self.layers = nn.Sequential(
            nn.Linear(num_classes + noise_channels, hidden_channels),
            nn.BatchNorm1d(hidden_channels),
            nn.ReLU(),
            nn.Linear(hidden_channels, width),
        )

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Return embeddings (b, p) of classes (b,), int64, and noise (b, e)."""
        one_hot = F.one_hot(labels, self.num_classes).to(noise.dtype)
        out: Tensor = self.layers(torch.cat([one_hot, noise], dim=1))
        return out

    def sent_state(self) -> dict[str, Tensor]:
        """Return all real tensors of the state: what clients need to generate."""
        state = self.state_dict()
        return {n: t.detach() for n, t in state.items() if t.is_floating_point()}


@functools.lru_cache(maxsize=64)
def generator_shapes(
    num_classes: int, width: int, noise_channels: int, hidden_channels: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of :meth:`LatentGenerator.sent_state`, P_G numbers."""
    with torch.device("meta"):
        made = LatentGenerator(
            num_classes,
            width,
            noise_channels=noise_channels,
            hidden_channels=hidden_channels,
        )
    return {name: tuple(tensor.shape) for name, tensor in made.sent_state().items()}


def class_shares(counts: Tensor) -> Tensor:
    """Return each client's share of each class's nodes (K, C); 0 for a class of nobody."""
    return counts / counts.sum(dim=0).clamp(min=1)


def ensemble_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Compute Σ_k mean_b α_k^{y_b} CE(head_k(G(y_b, ε_b)), y_b), Eq. (4).

    ``logits`` (K, b, C) are the predictions of the clients' heads for the same
    embeddings, ``labels`` (b,) the classes of these, and ``weights`` (K, C) are α_k^c.
    """
    # over few classes a softmax along columns takes a third of the time
    likely = logits.mT.contiguous().log_softmax(dim=1)  # (K, C, b)
    own = likely.gather(1, labels.expand(len(logits), 1, -1)).squeeze(1)
    return -(weights[:, labels] * own).mean(dim=1).sum()


def diversity_loss(noise: Tensor, embeddings: Tensor) -> Tensor:
    """Compute exp(−mean_{ab} ‖ε_a − ε_b‖²·‖x_a − x_b‖₁), both norms as means.

    Of ``noise`` (b, e) and the generated ``embeddings`` (b, p), with gradient; small if
    different noise gives different embeddings. Each pair is computed once: it occurs as
    (a, b) and (b, a), and (a, a) adds 0.
    """
    apart = F.pdist(noise).square() / noise.shape[1]
    moved = F.pdist(embeddings, p=1) / embeddings.shape[1]
    return (-2 * (apart * moved).sum() / len(noise) ** 2).exp()


def divergence_terms(student: Tensor, teacher: Tensor, *, tau: float = 1.0) -> Tensor:
    """Compute the terms (b, C) of KL(softmax(teacher/τ) ‖ softmax(student/τ)), Hinton 2015.

    Of logits (b, C). Not scaled by τ²; zero for one column.
    In FedGen the student's are predictions for real nodes, the teacher's those of the head
    for generated embeddings of the same classes.
    """
    return F.kl_div(
        (student / tau).log_softmax(dim=1),
        (teacher / tau).log_softmax(dim=1),
        reduction="none",
        log_target=True,
    )


def mean_divergence(student: Tensor, teacher: Tensor, *, tau: float = 1.0) -> Tensor:
    """Average the rows' sums of :func:`divergence_terms`; the teacher is a constant."""
    return divergence_terms(student, teacher.detach(), tau=tau).sum() / len(student)
