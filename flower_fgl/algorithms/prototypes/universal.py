"""Prototype aggregation on the server: FedPG Eqs. (4) and (5), FedTGP, FedProto."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn.layers import mlp

__all__ = ["PrototypeGenerator", "adaptive_margin", "class_spread", "contrastive_loss"]
__all__ += ["draw_context", "mean_prototypes", "personalise_prototypes"]
__all__ += ["topology_loss"]

TINY = 1e-12
BLOCK = 1 << 22
"""Pairs of clients that are compared at once."""


class PrototypeGenerator(nn.Module):
    """The global prototype generator of FedPG and FedTGP.

    A trainable table P̈ (C, L + 1, p), passed through Linear-ReLU-Linear. Prototypes
    have unit length if ``is_normalised``.
    """

    def __init__(
        self, num_classes: int, num_hops: int, width: int, *, is_normalised: bool = True
    ) -> None:
        super().__init__()
        self.is_normalised = is_normalised
        self.table = nn.Parameter(torch.randn(num_classes, num_hops, width))
        self.network = mlp(width, width, width)

    def forward(self) -> Tensor:
        """Return P̃, of shape (C, L + 1, p)."""
        out: Tensor = self.network(self.table)
        return F.normalize(out, dim=-1) if self.is_normalised else out


def adaptive_margin(uploads: Tensor, counts: Tensor, *, epsilon: float) -> Tensor:
    """Measure the similarity of the closest classes, M of FedPG Eq. (4★).

    ``M = clip(max_{c≠c'} cos(Q(c), Q(c')), 0, ε)``, Q(c) the mean upload of class c;
    without gradient; 0 with fewer than two classes. ``uploads`` (K, C, H, p) are
    ignored where ``counts`` (K, C, H) are 0.
    """
    query, owned = _class_means(uploads.detach(), counts)
    unit = F.normalize(query[owned], dim=-1)
    if len(unit) < 2:
        return uploads.new_zeros(())
    similar = unit @ unit.T
    similar.fill_diagonal_(-1)
    return similar.max().clamp(0, epsilon)


def class_spread(uploads: Tensor, counts: Tensor, *, limit: float) -> Tensor:
    """Measure the distance between classes, the margin of FedTGP.

    ``m = min(max_c min_{c'≠c} ‖Q(c) − Q(c')‖, κ)``, Q(c) the mean upload of class c, and
    κ = ``limit``. Arguments and result are as in :func:`adaptive_margin`.
    """
    query, owned = _class_means(uploads.detach(), counts)
    query = query[owned]
    if len(query) < 2:
        return uploads.new_zeros(())
    distance = (query[:, None] - query).square().sum(-1).clamp(min=TINY).sqrt()
    distance.fill_diagonal_(torch.inf)
    return distance.min(dim=1).values.max().clamp(max=limit)


def _class_means(uploads: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q (C, p) and whether any client has the class (C,)."""
    present = counts > 0
    number = present.sum(dim=(0, 2))
    total = (uploads * present[..., None]).sum(dim=(0, 2))
    return total / number.clamp(min=1)[:, None], number > 0


def draw_context(
    present: Tensor, *, share: float, generator: torch.Generator
) -> Tensor:
    """Select the uploads that represent each class at each hop, FedPG Eq. (4★).

    These are the uploads of the hop itself. For class c at hop h, ⌈Δs·n⌉ uploads of the
    same class from other hops are added, where n is the number at hop h, Δs = ``share``,
    and ``present`` (K, C, H) tells which prototypes were uploaded. They are drawn
    uniformly without replacement. Entry (h, k, c, g) of the result (H, K, C, H): whether
    P_{c,g}^k is used at hop h.
    """
    clients, classes, hops = present.shape
    same = torch.eye(hops, dtype=torch.bool)[:, None, None, :]  # (H, 1, 1, H)
    own = same & present  # (H, K, C, H)
    wanted = torch.ceil(share * present.sum(dim=0).double() - 1e-9)  # (C, H)
    draw = torch.rand((hops, clients, classes, hops), generator=generator)
    draw = draw.masked_fill(same | ~present, torch.inf)
    flat = draw.permute(0, 2, 1, 3).reshape(hops, classes, clients * hops)
    rank = flat.argsort(dim=-1).argsort(dim=-1)
    chosen = (rank < wanted.T[..., None]) & flat.isfinite()
    chosen = chosen.view(hops, classes, clients, hops).permute(0, 2, 1, 3)
    return own | chosen


def contrastive_loss(
    universal: Tensor,
    uploads: Tensor,
    members: Tensor,
    *,
    shift: Tensor | float,
    tau: float,
) -> Tensor:
    """Move universal prototypes towards the uploads of their class, FedPG Eq. (4★).

    ``ℓ_{c,h} = −log Σ_𝒫 e^{(D_i + s)/τ} + log(Σ_𝒫 e^{(D_i + s)/τ} + Σ_𝒩 e^{D_i/τ})``, D
    the cosine to anchor P̃_{c,h}; the mean over the (c, h) that have positives, 0 if
    none has. P̃ is ``universal`` (C, H, p), with gradient, P ``uploads`` (K, C, H, p),
    of which hop h uses ``members`` (H, K, C, H), see :func:`draw_context`. ``shift`` is
    s, added to the similarity of positives: −M makes the task harder.

    Notes
    -----
    1. In Eq. (4) and the first line of (7) negatives have e^M without a similarity; in
       the second line of (7) they have e^D without margin. The second has a gradient and
       is used.
    2. The paper adds M to the similarity of positives, which makes the task easier, while
       the text wants it harder. Here s = −M; +M is the setting ``literal``.
    """
    classes, hops, _ = universal.shape
    cosine = torch.einsum(
        "chp,kdgp->chkdg", F.normalize(universal, dim=-1), F.normalize(uploads, dim=-1)
    )
    same = torch.eye(classes, dtype=torch.bool)[:, None, None, :, None]
    takes_part = members[None].expand_as(cosine)
    positive = (takes_part & same).reshape(classes * hops, -1)
    negative = (takes_part & ~same).reshape(classes * hops, -1)
    used = positive.any(dim=1)
    if not bool(used.any()):
        return universal.sum() * 0
    flat = cosine.reshape(classes * hops, -1)[used]
    positive, negative = positive[used], negative[used]
    pulled = ((flat + shift) / tau).masked_fill(~positive, -torch.inf)
    pushed = (flat / tau).masked_fill(~negative, -torch.inf)
    both = torch.where(positive, pulled, pushed)
    return (both.logsumexp(dim=1) - pulled.logsumexp(dim=1)).mean()


def topology_loss(
    universal: Tensor, uploads: Tensor, members: Tensor, *, margin: Tensor | float
) -> Tensor:
    """Classify uploads by their distance to global prototypes, FedTGP.

    ``−log(e^{−(d_c + m)} / (e^{−(d_c + m)} + Σ_{c'≠c} e^{−d_{c'}}))`` with ``d_c = ‖P_i^c
    − P̂^c‖`` and m = ``margin``; the mean over uploads and hops, 0 without uploads. P̂,
    with gradient, P and the uploads used are as in :func:`contrastive_loss`.

    Notes
    -----
    1. Zhang et al., AAAI 2024, print the sum over uploads. With the mean, the step does
       not depend on the number of clients.
    2. Classes that no client uploaded at a hop are not candidates there.
    """
    hop, _, label, _ = members.nonzero(as_tuple=True)
    if not len(hop):
        return universal.sum() * 0
    sample = uploads.expand(len(members), *uploads.shape)[members]  # (n, p)
    owned = members.any(dim=3).any(dim=1)  # (H, C)
    candidate = universal.permute(1, 0, 2)[hop]  # (n, C, p)
    sq_norm = (sample[:, None] - candidate).square().sum(dim=-1)
    logits = -sq_norm.clamp(min=TINY).sqrt()
    logits = logits.masked_fill(~owned[hop], -torch.inf)
    logits = logits - margin * F.one_hot(label, universal.shape[0])
    return F.cross_entropy(logits, label)


def mean_prototypes(uploads: Tensor, counts: Tensor) -> Tensor:
    """Average over clients that have the class, FedProto Eq. (6), FedPG Eq. (3): (C, H, p).

    ``P̄_c = Σ_i n_i^c P_i^c / Σ_i n_i^c`` of uploads (K, C, H, p) and counts n (K, C, H);
    zero where no client has the class.

    Notes
    -----
    1. Both papers print a further factor 1/|N_c|, which would shrink the mean with the
       number of clients; it is omitted here.
    """
    weight = counts / counts.sum(dim=0).clamp(min=1)
    return torch.einsum("kch,kchp->chp", weight, uploads)


def personalise_prototypes(
    universal: Tensor,
    uploads: Tensor,
    counts: Tensor,
    *,
    alpha: float,
    threshold: float,
    is_fresh: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Blend the universal prototype with those of similar clients, FedPG Eq. (5).

    ``universal`` (C, H, p) are the universal prototypes, weighted by α, of unit length;
    ``uploads`` (K, C, H, p) the local ones of ``counts`` (K, C, H) centre nodes, of which
    0 marks a missing prototype. ``threshold`` is λ, the cosine similarity from which two
    clients share prototypes. An upload that is not ``is_fresh`` (K,), bool, is of an
    earlier round: it only determines which clients its own client is similar to, and is
    used in that client's blend alone.

    Returns the personalized prototypes (K, C, H, p), zero where ``counts == 0``, and how
    often another client's prototype is used: the share of the pairs of two clients that
    both have a prototype of one class and hop in which the first uses the second's; NaN
    without such a pair.

    Notes
    -----
    1. The paper leaves the weight n_j undefined; here it is the count of the same class
       and hop.
    2. The published code takes the two most similar clients and divides by one more than
       their number. Here the printed threshold and weights are used.
    """
    present = counts > 0
    own = counts.permute(1, 2, 0).flatten(0, 1)  # (C · H, K)
    cells = uploads.permute(1, 2, 0, 3).flatten(0, 1)  # (C · H, K, p)
    has = present.permute(1, 2, 0).flatten(0, 1)[..., None].to(cells.dtype)
    number = own[..., None].to(cells.dtype)
    columns = torch.cat([cells * number, number, has], dim=-1)
    unit, sums = F.normalize(cells, dim=-1), []
    step = max(1, BLOCK // len(uploads) ** 2)
    for part in zip(torch.split(unit, step), torch.split(columns, step), strict=True):
        similar = part[0] @ part[0].mT >= threshold  # Ṡ_i of client i, (b, K, K)
        if is_fresh is not None:
            similar &= is_fresh
        # rounding may put cos(i, i) just below 1
        similar.diagonal(dim1=1, dim2=2).fill_(True)
        sums.append(similar.to(cells.dtype) @ part[1])
    total, weight, found = torch.split(
        torch.cat(sums), [uploads.shape[-1], 1, 1], dim=-1
    )
    mixture = total / weight.clamp(min=1)  # zero where no client uploaded any
    mixture = mixture.view(*uploads.shape[1:3], *mixture.shape[1:]).permute(2, 0, 1, 3)
    made = (alpha * universal + (1 - alpha) * mixture) * present[..., None]
    rivals = has.sum(dim=1).double() - 1
    pairs = float((has.sum(dim=1).double() * rivals).sum())
    fused = float((found * has).double().sum() - has.double().sum())
    return made, fused / pairs if pairs else math.nan
