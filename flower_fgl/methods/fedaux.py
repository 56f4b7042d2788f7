"""Settings and row of FedAux, see ``algorithms.fedaux``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedpub import PersonalMixSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedAuxSettings"]


@dataclass(frozen=True)
class FedAuxSettings(PersonalMixSettings):
    """Settings of FedAux."""

    alpha: float = option(10.0, ge=0)
    """α, sharpness of the similarity of two clients' directions; 0: equal weights; the
    paper's ablation: 0.1, 1, 10"""
    sigma: float = option(1.0, gt=0)
    """σ, width of the kernel that smooths nodes with near scores"""
    score: str = option("longest", choices="longest cosine")
    """scale of the embeddings in a node's score: the longest embedding of the graph, as the
    paper prints, or each embedding's own length (cosine), as the published code has it"""
    mask: bool = option(True)
    """whether a private mask that never leaves the client multiplies its weights, as in the
    backbone of the paper's tables"""


METHOD = Method(
    name="fedaux",
    paper="Zhuo et al., NeurIPS 2025",
    strategy="flower_fgl.strategies.personal_mix:FedAux",
    client_app="flower_fgl.client_apps.fedaux:FedAuxClientApp",
    network="flower_fgl.algorithms.fedaux:FedAuxNet",
    settings=FedAuxSettings,
    payload="4P up, 4P down, P with the direction a of width p",
    defaults={"hidden-channels": 256, "local-epochs": 1},
    has_global_model=False,
    graphs=False,
    sends_mixtures=True,
    weighs_classes=True,
)
