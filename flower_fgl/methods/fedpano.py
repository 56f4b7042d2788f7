"""Settings of FedPANO; its payload is FedAvg's ``Weights``, of the parts it shares.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedPANOSettings"]


@dataclass(frozen=True)
class FedPANOSettings:
    """Settings of FedPANO.

    Notes
    -----
    1. The ablations of Table 3: nT is ``use-client-classifier = false``, nS
       ``use-shared-classifier = false``, nN ``use-generator = false``, nF
       ``aggregate-generator = false``, nG ``augment = "gaussian"``.
    2. The paper does not say how h is bounded, but φ ends in tanh, so that Eq. (7) cannot
       be small for unbounded h. Under unit length, the other candidate, classifiers learn
       slowly at lr 0.1 (docs/results/fedpano.md). L^g falls to half its first value, but
       the synthetic nodes carry no class: the origin is at distance 1 from all of them.
    """

    REMOVED: ClassVar[Mapping[str, Scalar]] = {
        "gaussian-std": 0.1,
        "mask-to-local-labels": False,
    }

    m: int = option(5, "synthetic nodes of each training node", ge=1)
    noise_std: float = option(
        1.0, "standard deviation of ε in Eq. (6); the paper: 1", ge=0
    )
    noise_on: str = option(
        "both",
        "what ε is added to: the node's and its neighbours' representation, or theirs",
        choices="both agg",
    )
    rep_norm: str = option(
        "tanh",
        "what bounds representations: tanh, unit length or nothing",
        choices="tanh l2 none",
    )
    use_client_classifier: bool = option(
        True, "whether clients have classifiers of their own; false is nT"
    )
    use_shared_classifier: bool = option(
        True, "whether Eq. (5) trains a classifier over all classes; false is nS"
    )
    use_generator: bool = option(
        True, "whether there are synthetic nodes, Eq. (6) to (8); false is nN"
    )
    aggregate_generator: bool = option(
        True, "whether generators are averaged; false is nF"
    )
    augment: str = option(
        "generator",
        "what makes synthetic nodes: φ, or noise on the training nodes (nG)",
        choices="generator gaussian",
    )

    def __post_init__(self) -> None:
        """Refuse a model without any classifier, and noise that nothing asks for."""
        if self.augment != "generator" and not self.use_generator:
            raise ConfigError(
                f'fedpano.augment = "{self.augment}" says what makes synthetic nodes, but '
                "fedpano.use-generator = false makes none. Leave one of them out."
            )
        if not (self.use_client_classifier or self.use_shared_classifier):
            raise ConfigError(
                "fedpano.use-client-classifier and fedpano.use-shared-classifier are both "
                "false: nothing would classify. Set one of them to true."
            )

    @property
    def has_generator(self) -> bool:
        """Whether φ is trained."""
        return self.use_generator and self.augment == "generator"

    @property
    def sends_generator(self) -> bool:
        """Whether φ is among what is averaged."""
        return self.has_generator and self.aggregate_generator


METHOD = Method(
    name="fedpano",
    paper="Zhao et al., Sci China Inf Sci 68(1):112105, 2025",
    strategy="flower_fgl.strategies.fedpano:FedPANO",
    client_app="flower_fgl.client_apps.fedpano:FedPANOClientApp",
    settings=FedPANOSettings,
    payload="4(P_g+P_s+P_φ) up and down: network, generic classifier, generator",
    defaults={
        "model": "graphsage",
        "hidden-channels": 128,
        "dropout": 0.0,
        "rounds": 500,
        "local-epochs": 5,
        "optimizer": "sgd",
        "lr": 0.1,
        "weight-decay": 0.0,
        "participants": 5,
        "eval-policy": "refresh",
    },
    has_global_model=False,
    graphs=False,
    additive=True,
    takes_batches=False,
)
