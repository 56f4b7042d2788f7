"""Generate neighbours that a graph lacks: FedSage+'s part that knows no federation."""

from flower_fgl.algorithms.fedsageplus.generator import (
    FeatureGenerator,
    NeighbourGenerator,
    closest_rows,
    generator_loss,
    match_loss,
    noise_like,
)
from flower_fgl.algorithms.fedsageplus.graph_mending import (
    Impaired,
    MendedInput,
    impair,
)

__all__ = [
    "FeatureGenerator",
    "Impaired",
    "MendedInput",
    "NeighbourGenerator",
    "closest_rows",
    "generator_loss",
    "impair",
    "match_loss",
    "noise_like",
]
