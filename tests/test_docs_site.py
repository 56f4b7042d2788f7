from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import kebab
from flower_fgl.core.settings import GeneralSettings, SyntheticSettings
from flower_fgl.methods import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "experiments" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"`(flower_fgl[\w.]*):([\w.]+)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def method_page(name: str) -> Path:
    return DOCS / "methods" / f"{name.replace('-', '').replace('+', 'plus')}.md"


def anchors_of(page: Path) -> set[str]:
    headings = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    kept = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s]+", "-", text) for text in kept}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_that_names_both_halves(name: str) -> None:
    text = method_page(name).read_text("utf-8")
    assert f"`{METHODS[name].strategy}" in text
    assert f"`{METHODS[name].client_app}" in text
    assert f"flower-fgl run --engine local --method {name}\n" in text


@pytest.mark.parametrize("script", ["method-pages", "experiment-index"])
def test_the_generated_pages_are_current(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    text = CODE.sub("", FENCE.sub("", page.read_text("utf-8")))
    for link in LINK.findall(text):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{link} names no heading"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_function_in_the_tables_of_equations_exists(name: str) -> None:
    references = REFERENCE.findall(method_page(name).read_text("utf-8"))
    assert references
    for module, path in references:
        found: object = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_every_method_is_in_the_tables_of_methods_settings_and_costs() -> None:
    index = (DOCS / "methods" / "index.md").read_text("utf-8")
    costs = (DOCS / "costs.md").read_text("utf-8")
    settings = (DOCS / "all-settings.md").read_text("utf-8")
    for name, method in METHODS.items():
        assert f"| [`{name}`]({method_page(name).name}) | {method.paper} |" in index
        assert f"| `{name}` |" in costs
        for field in fields(method.settings) if method.settings else ():
            assert f"| `{name}.{kebab(field.name)}` |" in settings


@pytest.mark.parametrize("table", [GeneralSettings, SyntheticSettings, NodeSettings])
def test_the_page_of_all_settings_has_every_key(table: type) -> None:
    text = (DOCS / "all-settings.md").read_text("utf-8")
    prefix = "synthetic." if table is SyntheticSettings else ""
    for field in fields(table):
        key = f"{prefix}{kebab(field.name)}"
        assert re.search(rf"^\| `{re.escape(key)}`(?:, limit)? \|", text, re.M), key


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    notebooks = {path.stem for path in (ROOT / "examples").glob("*.ipynb")}
    assert listed == pages | {f"notebooks/{stem}.md" for stem in notebooks}
    table = (DOCS / "notebooks.md").read_text("utf-8")
    assert set(re.findall(r"examples/([\w-]+)\.ipynb", table)) == notebooks


def test_numbers_of_the_page_on_reproduction_stand_on_the_pages_it_names() -> None:
    text = (DOCS / "results" / "reproduces.md").read_text("utf-8")
    checked = 0
    for section in text.split("\n## ")[1:]:
        linked = re.findall(r"\]\((\w+\.md)\)", section)
        assert len(linked) == 1
        known = (DOCS / "results" / linked[0]).read_text("utf-8")
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        for row in rows[1:]:
            _, published, ours, _, reason = row.strip("| ").split(" | ")
            numbers = f"{published} {ours} {reason}"
            for number in re.findall(r"\d[\d,]*(?:\.\d+|/\d+)?", numbers):
                checked += 1
                number = number.rstrip(",")
                assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", known), row
    assert checked > 100
