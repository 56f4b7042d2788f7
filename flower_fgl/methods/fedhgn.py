"""Settings and row of FedHGN, see ``client_apps.fedhgn``."""

from dataclasses import dataclass, replace

from flower_fgl.core.options import option
from flower_fgl.methods import fedavg

__all__ = ["METHOD", "FedHGNSettings"]


@dataclass(frozen=True)
class FedHGNSettings:
    """Settings of FedHGN."""

    alignment: str = option("none", choices="none peers")
    """whether owners' coefficients are drawn to the nearest ones of other owners, which
    then see them without the owner's name; peers is the paper's form"""
    weight: float = option(0.5, ge=0)
    """λ, weight of the alignment of coefficients (alignment = peers)"""


METHOD = replace(
    fedavg.METHOD,
    stacks_checks=False,
    name="fedhgn",
    paper="Fu and King, IJCAI 2023",
    strategy="flower_fgl.strategies.fedhgn:FedHGN",
    client_app="flower_fgl.client_apps.fedhgn:FedHGNClientApp",
    settings=FedHGNSettings,
    payload="4P_s up, 4P_s down, P_s parameters of bases and head; peers: coefficients",
    defaults={"model": "rgcn", "schema-align": "private"},
    floors={"share-coefficients": ("fedhgn.alignment", "none")},
    models=("rgcn", "rgcn-mean"),
    has_global_model=False,
    additive=False,
    robust=False,
    predicts_links=False,
    graphs=False,
    samples_neighbors=False,
)
