"""Hooks of the documentation site."""

from __future__ import annotations

import re
from typing import Any

REFERENCE = re.compile(r"`(flower_fgl[\w.]*):([\w.]+)`")

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn `` `module:function` `` into a link to the API reference."""
    return REFERENCE.sub(r"[`\2`][\1.\2]", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the Sphinx roles of docstrings and keep the names that follow them."""
    return ROLE.sub("", html)
