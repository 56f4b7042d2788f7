"""FedSage+: generation of missing neighbours, without communication.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS
2021.
"""

from flower_fgl.algorithms.fedsageplus.generator import (
    FeatureGenerator,
    NeighbourGenerator,
    closest_rows,
    generator_loss,
    group_means,
    match_loss,
    noise_like,
)
from flower_fgl.algorithms.fedsageplus.graph_mending import (
    HiddenNodes,
    MendedGraph,
    hide_nodes,
)

__all__ = [
    "FeatureGenerator",
    "HiddenNodes",
    "MendedGraph",
    "NeighbourGenerator",
    "closest_rows",
    "generator_loss",
    "group_means",
    "hide_nodes",
    "match_loss",
    "noise_like",
]
