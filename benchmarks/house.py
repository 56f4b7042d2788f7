"""Count what the layout and the language of a checkout cost its reader.

    python benchmarks/house.py
    python benchmarks/house.py ../other-checkout

Prints the entries of the package root, import cycles (type annotations included), all
lines, those of code and of docstrings, and docstring lines of private functions. The other
counts have commands of their own: ``lint-imports``, ``benchmarks/round_path.py`` and
``benchmarks/start_up.py``.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CYCLES = """
import grimp, networkx
graph = grimp.build_graph("flower_fgl")
edges = [(m, i) for m in graph.modules for i in graph.find_modules_directly_imported_by(m)]
found = networkx.strongly_connected_components(networkx.DiGraph(edges))
sizes = sorted((len(part) for part in found if len(part) > 1), reverse=True)
print(len(sizes), *sizes)
"""


def import_cycles(checkout: Path) -> list[int]:
    """Return the sizes of all sets of modules that import each other, in modules."""
    done = subprocess.run(
        [sys.executable, "-c", CYCLES],
        check=True,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    return [int(size) for size in done.stdout.split()[1:]]


def count_lines(text: str) -> Counter[str]:
    """Count all lines, those of code, docstrings, and private functions' docstrings."""
    documented: set[int] = set()
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if not isinstance(node, kinds) or ast.get_docstring(node) is None:
            continue
        first = node.body[0]
        lines = range(first.lineno, (first.end_lineno or first.lineno) + 1)
        documented |= set(lines)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            counts["lines of private functions' docstrings"] += len(lines)
            counts["private functions with a docstring"] += 1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and number not in documented:
            counts["lines of code"] += not line.lstrip().startswith("#")
    counts["lines"] = len(text.splitlines())
    counts["lines of docstrings"] = len(documented)
    return counts


def main() -> None:
    """Print the counts of a checkout."""
    checkout = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    root = checkout / "flower_fgl"
    entries = [p for p in root.iterdir() if p.name not in ("__pycache__", "py.typed")]
    print(f"{len(entries):7,}  entries of the package root")
    cycles = import_cycles(checkout)
    sizes = f" (of {', '.join(map(str, cycles))} modules)" if cycles else ""
    print(f"{len(cycles):7,}  import cycles{sizes}")
    modules = sorted(root.rglob("*.py"))
    print(f"{len(modules):7,}  modules")
    total = sum((count_lines(path.read_text("utf-8")) for path in modules), Counter())
    for name, number in sorted(total.items()):
        print(f"{number:7,}  {name}")


if __name__ == "__main__":
    main()
