"""Settings and row of FedPANO, see ``algorithms.fedpano``."""

from dataclasses import dataclass
from typing import ClassVar

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import option
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedPANOSettings"]


@dataclass(frozen=True)
class FedPANOSettings:
    """Settings of FedPANO.

    Notes
    -----
    1. Ablations of Table 3: nT is ``use-client-classifier = false``, nS
       ``use-shared-classifier = false``, nN ``use-generator = false``, nF
       ``aggregate-generator = false`` and nG ``augment = "gaussian"``.
    2. The paper does not say how h is bounded. φ ends in tanh, so Eq. (7) cannot become
       small for unbounded h. The alternative, unit length, makes classifiers learn slowly
       at lr 0.1 (docs/results/fedpano.md): L^g falls to half its initial value, but the
       synthetic nodes carry no class, since the origin is at distance 1 from all of them.
    """

    REMOVED: ClassVar = {
        "gaussian-std": 0.1,
        "mask-to-local-labels": False,
    }

    m: int = option(5, "m, synthetic nodes per training node", ge=1)
    noise_std: float = option(1.0, ge=0)
    """standard deviation of the noise ε in Eq. (6); the paper: 1"""
    noise_on: str = option("both", choices="both agg")
    """representations to which Eq. (6) adds ε: the node's and its neighbours' (both), or
    its neighbours' only (agg)"""
    rep_norm: str = option("tanh", choices="tanh l2 none")
    """bound on the representations: tanh, unit length (l2), or none"""
    use_client_classifier: bool = option(True)
    """whether each client has its own classifier; false: ablation nT of Table 3"""
    use_shared_classifier: bool = option(True)
    """whether a shared classifier of all classes is trained, Eq. (5); false: ablation nS of
    Table 3"""
    use_generator: bool = option(True)
    """whether synthetic nodes are generated, Eqs. (6)-(8); false: ablation nN of Table 3"""
    classifier_steps: int = option(1, ge=1, le=2)
    """steps on the client's classifier per epoch without generator (ablation nN of Table
    3); 2: as many as the full method takes"""
    aggregate_generator: bool = option(True)
    """whether the server averages the clients' generators; false: ablation nF of Table 3"""
    augment: str = option("generator", choices="generator gaussian")
    """source of the synthetic nodes: the generator φ, or Gaussian noise on the training
    nodes (gaussian, ablation nG of Table 3)"""

    def __post_init__(self) -> None:
        """Reject settings without a classifier, or without effect."""
        if self.classifier_steps > 1 and self.use_generator:
            raise ConfigError(
                "fedpano.classifier-steps counts steps without generator, but "
                "fedpano.use-generator is true: its second step learns from synthetic "
                "nodes. Set use-generator = false, or remove classifier-steps."
            )
        if self.augment != "generator" and not self.use_generator:
            raise ConfigError(
                f'fedpano.augment = "{self.augment}" sets the source of synthetic nodes, '
                "but fedpano.use-generator = false disables them. Remove one."
            )
        if not (self.use_client_classifier or self.use_shared_classifier):
            raise ConfigError(
                "fedpano.use-client-classifier and fedpano.use-shared-classifier are both "
                "false, so there is no classifier. Set one of them to true."
            )

    @property
    def has_generator(self) -> bool:
        """Whether the generator φ is trained."""
        return self.use_generator and self.augment == "generator"

    @property
    def sends_generator(self) -> bool:
        """Whether the server averages the generators φ."""
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
        "eval-policy": "refresh-all",
    },
    has_global_model=False,
    graphs=False,
    additive=True,
    robust=True,
    takes_batches=False,
)
