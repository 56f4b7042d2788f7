"""Fenced blocks of the guides, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:<!-- not executed:(?P<reason>.*?)-->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<text>.*?)^ *```\s*$",
    re.MULTILINE | re.DOTALL,
)
PLACEHOLDER = "PLACEHOLDER"
"""Stands for ``<a run>``, ``$RUN`` and ``$(…)`` in a command."""


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Parameters
    ----------
    guide : Path
        File that contains it.
    line : int
        Line of the opening fence, from 1.
    language : str
        First word of the info string.
    text : str
        Content, without the fence's indentation.
    reason : str or None
        Why it is not executed; ``None`` if it is.
    """

    guide: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        """Return ``docs/guide.md:12``."""
        return f"{self.guide.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        """Return the file that the first line names in a comment, else an empty string."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found[1] if found else ""


@dataclass(frozen=True)
class Command:
    """One command of a bash block: its words, without environment and redirections."""

    block: Block
    words: tuple[str, ...]


def guides() -> list[Path]:
    """Return README.md and every Markdown file under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(guide: Path, language: str) -> list[Block]:
    """Return the blocks of one language, in order."""
    text = guide.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        reason = match["reason"]
        if reason is None and "no-run" in match["info"]:
            reason = ""  # a test wants the reason in a comment before the block
        indent = len(match["indent"])
        body = "".join(x[indent:] or "\n" for x in match["text"].splitlines(True))
        line = text.count("\n", 0, match.start("language")) + 1
        if match["language"] == language:
            found.append(Block(guide, line, language, body, reason))
    return found


def commands(block: Block) -> Iterator[Command]:
    """Split a bash block at line ends, ``&&``, ``|`` and ``;``."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    text = re.sub(r"\$\([^)]*\)|<[a-z][^<>\n]*>|\$\{?\w+\}?", PLACEHOLDER, text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    yield Command(block, tuple(_without_prefix(words)))
                words = []
            elif word not in ("…", "..."):
                words.append(word)


def _without_prefix(words: list[str]) -> list[str]:
    """Drop ``NAME=value``, ``do`` and ``time`` before the program."""
    start = 0
    while start < len(words) and re.fullmatch(r"[A-Z_]+=.*|do|time", words[start]):
        start += 1
    return words[start:]
