"""Run notebooks in one Jupyter kernel, so that torch is loaded once.

    python tests/support/execute_notebooks.py FOLDER NOTEBOOK...

Each notebook runs in a folder of its own, ``FOLDER/<stem>``, with an empty namespace, and
is written there with its outputs. A cell that fails ends its notebook.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbclient.util import run_sync


def execute(notebook: Path, folder: Path, manager: object) -> None:
    """Run one notebook in the kernel of a manager, or start it."""
    folder.mkdir()
    content = nbformat.read(notebook, as_version=4)
    first = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}")
    content.cells.insert(0, first)
    try:
        NotebookClient(content, km=manager, timeout=60).execute()
    except CellExecutionError as error:
        print(f"{notebook.name}: {error}", file=sys.stderr)
    del content.cells[0]
    nbformat.write(content, folder / notebook.name)


def main() -> None:
    """Run all notebooks."""
    folder, *notebooks = map(Path, sys.argv[1:])
    manager = NotebookClient(nbformat.v4.new_notebook()).create_kernel_manager()
    try:
        for notebook in notebooks:
            execute(notebook, folder / notebook.stem, manager)
    finally:
        if manager.has_kernel:
            run_sync(manager.shutdown_kernel)(now=True)


if __name__ == "__main__":
    main()
