#!/usr/bin/env bash
# torch-geometric 2.8.1: constructing a layer writes a generated Python file into the temporary folder and leaves it
# there after the process has ended.
#
# Each process writes one file per kind of layer under a new name (two for layers that update edges). A SuperNode
# that starts a process for every message, or a grid of runs, fills the temporary folder: a thousand processes with
# two kinds of layers leave two thousand files.
#
# Output seen:
#   files after 2 processes: 2
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = tempfile.mkdtemp()
code = "from torch_geometric.nn import GCNConv; GCNConv(2, 2); GCNConv(3, 3)"
for _ in range(2):
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": folder})
found = [path for path in Path(folder).rglob("*GCNConv*.py")]
print(f"files after 2 processes: {len(found)}")
assert len(found) == 2, found
END
