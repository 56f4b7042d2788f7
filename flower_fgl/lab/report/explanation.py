"""The page that explains one prediction: text, tables and a picture of the edges."""

from html import escape
from pathlib import Path

import networkx as nx
from matplotlib.figure import Figure

from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.plots import PALETTE
from flower_fgl.lab.report.figures import to_data_uri
from flower_fgl.runs.writer import replace_file
from flower_fgl.simulation.prediction.explain import Explanation

__all__ = ["draw_explanation", "write_explanation"]

MOST_DRAWN = 60
"""Edges of the picture, those of the largest attributions."""
CAPTION = (
    f"At most {MOST_DRAWN} edges, those of the largest attributions. Orange edges raise "
    "the score, purple ones lower it; the text lists those in full color. The wider an "
    "edge, the larger its attribution. Dark nodes are those of the explained item."
)
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2em auto;
padding: 0 1em; }}
pre {{ white-space: pre-wrap; }} figure {{ margin: 0; }} figcaption {{ opacity: 0.75; }}
img {{ width: 100%; }}</style></head>
<body><h1>{title}</h1><p>{about}</p><pre>{text}</pre>{picture}</body></html>
"""


def write_explanation(found: Explanation, path: Path) -> None:
    """Write an explanation as an HTML page of mode 0600, which needs no network.

    Raises a ConfigError for another ending, and a RunError if the page cannot be written.
    """
    if path.suffix != ".html":
        raise ConfigError(f"--output must end in .html, got {path.name}. Rename it.")
    picture = ""
    if found.drawing:
        data = to_data_uri(draw_explanation(found))
        picture = (
            f'<figure><img src="{data}" alt="Edges that influence the score">'
            f"<figcaption>{CAPTION}</figcaption></figure>"
        )
    card = found.card
    about = f"{card.method}, {card.model}, round {card.round}"
    page = PAGE.format(
        title=escape(f"Why {found.item}: {found.what}"),
        about=escape(f"{about}, model of {card.owner}" if card.owner else about),
        text=escape(found.text),
        picture=picture,
    )
    replace_file(path, page.encode(), is_private=True)


def draw_explanation(found: Explanation) -> Figure:
    """Draw the edges that influence a score, by sign and size of their attribution."""
    largest = sorted(found.drawing, key=lambda edge: -abs(edge[2]))[:MOST_DRAWN]
    widest = max(abs(value) for _, _, value in largest) or 1.0
    graph = nx.Graph()
    graph.add_nodes_from(found.ends)
    graph.add_weighted_edges_from(largest)
    named = {edge[:2] for edge in (*found.edges, *found.lowering)}
    place = nx.spring_layout(graph, seed=0)
    figure = Figure(figsize=(7, 5))
    axes = figure.add_subplot()
    axes.set_axis_off()
    for one, other, value in largest:
        axes.plot(
            *zip(place[one], place[other], strict=True),
            color=PALETTE[5] if value > 0 else PALETTE[7],
            alpha=1.0 if (one, other) in named else 0.3,
            linewidth=0.5 + 3 * abs(value) / widest,
            zorder=1,
        )
    for node, (x, y) in place.items():
        size, color = (90, PALETTE[0]) if node in found.ends else (30, PALETTE[4])
        axes.scatter(x, y, s=size, zorder=2, color=color)
        axes.annotate(node[:12], (x, y), fontsize=7, parse_math=False)
    return figure
