"""Hooks of the documentation site."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]

REFERENCE = re.compile(r"`(flower_fgl[\w.]*):([\w.]+)`")

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code)")

SPREAD = re.compile(r"(?<=\d) ± (?=\d)|(?<=\d) (?=[≈↑↓])|(?<=≈) (?=[↑↓])")

NOTEBOOK = re.compile(r"\]\(\.\./examples/([\w-]+)\.ipynb\)")


def on_config(config: Any, **_: Any) -> Any:
    """Show the version, and the repository if pyproject.toml names one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    config.copyright = f"flower-fgl {project['version']}, {project['license']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add a page for every notebook of examples/."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        place = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, place, content=notebook_page(path)))
    return files


def notebook_page(path: Path) -> str:
    """Return the text and code of a notebook as Markdown."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{text}\n```" if is_code else text)
    parts.insert(1, f"This is the notebook `examples/{path.name}` without its outputs.")
    return "\n\n".join(parts).replace("](../docs/", "](../")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link `` `module:function` `` to the API reference, and notebooks to their pages."""
    markdown = REFERENCE.sub(r"[`\2`][\1.\2]", markdown)
    return NOTEBOOK.sub(r"](notebooks/\1.md)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the Sphinx roles of docstrings, and keep a number with its spread and marks."""
    return SPREAD.sub(lambda found: found[0].replace(" ", "\u00a0"), ROLE.sub("", html))
