"""The blocks of code in README.md and docs/, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# `<!-- not run: why -->` stands right above a block that cannot run just anywhere.
_BLOCK = re.compile(
    r"(?:^<!-- not run: ([^\n]+?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_COMMAND = re.compile(
    r"(?:^|\s)(?:flowgrpo-rc|-m flowgrpo_rc\.train|examples/slurm(?:_workers)?\.sh)(?=\s|$)"
)


class Block(NamedTuple):
    """A block of code in a page; why_not: why it is not run, None if it is."""

    page: Path
    line: int
    language: str
    text: str
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def lines(self) -> list[str]:
        joined = self.text.replace("\\\n", " ").splitlines()
        return [
            line.strip() for line in joined if line.strip() and not line.lstrip().startswith("#")
        ]


def blocks(*languages: str) -> list[Block]:
    """Returns the blocks of all pages in order, of some languages or of all."""
    return [
        block
        for page in PAGES
        for block in _of(page)
        if not languages or block.language in languages
    ]


def python_of(page: str, words: str) -> str:
    """The code of the Python block of a page, such as `extending.md`, that holds some words."""
    return next(
        block.text for block in blocks("python") if block.page.name == page and words in block.text
    )


def arguments(line: str) -> list[str] | None:
    """Returns what a command line hands to `flowgrpo-rc`; None for another command.

    `...` stands for what the reader knows, and is left out.
    """
    found = _COMMAND.search(line)
    if found is None:
        return None
    given = [word for word in shlex.split(line[found.end() :], comments=True) if word != "..."]
    return given if found[0].strip() == "flowgrpo-rc" else ["train", *given]


def _of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        why_not, language, code = found.groups()
        yield Block(page, text.count("\n", 0, found.start(3)), language, code, why_not)
