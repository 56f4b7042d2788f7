"""Settings and row of FedGCN, see ``algorithms.fedgcn``."""

from dataclasses import dataclass

from flower_fgl.core.options import option
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.methods.method import Method

__all__ = ["METHOD", "FedGCNSettings"]


@dataclass(frozen=True)
class FedGCNSettings(FedAvgSettings):
    """Settings of FedGCN."""

    hops: int = option(2, ge=0, le=2)
    """distance of the sums that clients exchange before round 1; 0: none, as FedAvg; 1:
    sums of the own nodes, the first layer is exact; 2: also sums of the outside neighbours,
    two layers are exact"""
    min_outside: int = option(1, ge=1)
    """number of other clients' nodes in a sum below which it is left out; with two hops
    also the least number of the owner's nodes in it; above 1 the layers are no longer
    exact"""
    ids: str = option("private", choices="private guessable")
    """how the server compares data owners' ids of nodes; private: by codes that only all
    owners together can compute, guessable: as they are or as hashes without a key, which
    anybody who guesses ids can compare (unless the owners have id-key)"""


METHOD = Method(
    name="fedgcn",
    paper="Yao et al., NeurIPS 2023",
    strategy="flower_fgl.strategies.fedgcn:FedGCN",
    client_app="flower_fgl.client_apps.fedgcn:FedGCNClientApp",
    settings=FedGCNSettings,
    payload="4P up, 4P down; before, 12(b+h)+b + 4r(d+2) up (secure: 8(Bd+B+1) for the "
    "sums), 8B + 4(nd+h) down; data owners: 32 for each of the others' b+h, and for the "
    "own, more in both directions",
    sent_before=(
        "a code for each node with neighbours at other owners and for each of these "
        "neighbours, made from its id with secrets of all owners (its id or the hash of "
        "it, with fedgcn.ids = guessable), and how many such edges it has",
        "the sum of the features around each of these nodes, which can be the features of "
        "a single node",
    ),
    defaults={"weight-by": "equal"},
    graphs=False,
    additive=True,
    weighs_classes=True,
    takes_late_clients=False,
    models=("gcn",),
    needs_cross_edges=True,
)
