"""Pages of the built documentation site, whose folder ``FLOWER_FGL_SITE`` names."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path

import pytest

SITE = os.environ.get("FLOWER_FGL_SITE", "")
PAGES = sorted(Path(SITE).rglob("*.html")) if SITE else []
ARTICLE = re.compile(r"<article.*?>(.*?)</article>", re.DOTALL)
CODE = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
SOURCE = re.compile(
    r"^\s*(?:title|up|least-nodes|noised): |\|\s*-{3,}\s*\||^\s*```|\]\((?:\.|http)",
    re.MULTILINE,
)
"""Front matter, tables, code blocks and links that Markdown did not convert."""

pytestmark = pytest.mark.skipif(not SITE, reason="FLOWER_FGL_SITE is not set")


def test_the_site_has_the_page_of_every_kind() -> None:
    names = {str(page.relative_to(SITE)) for page in PAGES}
    assert {"index.html", "methods/fedpg/index.html", "costs/index.html"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(SITE)))
def test_no_page_shows_its_source_as_text(page: Path) -> None:
    found = ARTICLE.search(page.read_text("utf-8"))
    if found is None:  # a page of the theme, such as 404.html
        return
    text = unescape(TAG.sub("", CODE.sub("", found[1])))
    assert not (shown := SOURCE.search(text)), text[shown.start() :][:200]
