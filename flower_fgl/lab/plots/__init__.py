"""Figures of a run: pure functions from numbers to a matplotlib ``Figure``.

They use neither pyplot nor global state, so they work in any process or thread.
"""

from flower_fgl.lab.plots.clients import (
    Cloud,
    client_bars,
    client_spread,
    label_heat_map,
    mixture_heat_map,
    node_clouds,
    owner_reliability,
    reliability,
    stacked_bars,
)
from flower_fgl.lab.plots.rounds import (
    Curve,
    by_cost,
    by_round,
    by_value,
    column_curves,
    convergence,
)
from flower_fgl.lab.plots.style import (
    PALETTE,
    distinct,
    first_upper,
    look_of,
    narrow_figures,
    save_figure,
    to_svg,
    variant_look,
)
from flower_fgl.lab.units import scale_bytes

__all__ = [
    "PALETTE",
    "Cloud",
    "Curve",
    "by_cost",
    "by_round",
    "by_value",
    "client_bars",
    "client_spread",
    "column_curves",
    "convergence",
    "distinct",
    "first_upper",
    "label_heat_map",
    "look_of",
    "mixture_heat_map",
    "narrow_figures",
    "node_clouds",
    "owner_reliability",
    "reliability",
    "save_figure",
    "scale_bytes",
    "stacked_bars",
    "to_svg",
    "variant_look",
]
