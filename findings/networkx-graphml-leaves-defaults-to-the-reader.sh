#!/usr/bin/env bash
# networkx 3.6.1: read_graphml gives a node no value where GraphML's <default> holds, and loses defaults of for="all".
#
# In GraphML a key may declare a default, which nodes and edges without a value of their own have. read_graphml leaves
# these without the attribute and puts the default into graph.graph["node_default"] or ["edge_default"]. A key for "all"
# kinds of elements gets into neither. A table of the nodes then has an empty cell for the most common value, such as the
# class of most accounts. Of a document with two graphs only the first is returned, without a word.
#
# Output seen:
#   colour of a and b: None red
#   node_default: {'colour': 'yellow'}
#   default for all kinds of elements: lost
#   nodes of a document with two graphs: ['a', 'b']
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet networkx==3.6.1
"$scratch/venv/bin/python" - <<'END'
import io

import networkx

text = """<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="c" for="node" attr.name="colour" attr.type="string"><default>yellow</default></key>
<key id="s" for="all" attr.name="source" attr.type="string"><default>bank</default></key>
<graph edgedefault="directed">
<node id="a"/><node id="b"><data key="c">red</data></node><edge source="a" target="b"/>
</graph>
<graph edgedefault="directed"><node id="z"/></graph>
</graphml>"""
graph = networkx.read_graphml(io.BytesIO(text.encode()))
colours = [graph.nodes[node].get("colour") for node in ("a", "b")]
print("colour of a and b:", *colours)
print("node_default:", graph.graph["node_default"])
defaults = {**graph.graph["node_default"], **graph.graph["edge_default"]}
is_lost = "source" not in defaults and "source" not in graph.nodes["a"]
print("default for all kinds of elements:", "lost" if is_lost else "kept")
print("nodes of a document with two graphs:", sorted(graph))
assert colours == [None, "red"]
assert graph.graph["node_default"] == {"colour": "yellow"}
assert is_lost
assert sorted(graph) == ["a", "b"]
END
