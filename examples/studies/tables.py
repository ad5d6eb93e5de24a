"""Writes the numbers of the evidence pages from the studies' results, or checks them.

    python examples/studies/tables.py [--check]

Every module `*_tables.py` in this folder describes one study:

    STUDY     the file of its results
    ENTRIES   name -> function that turns the study's cells into a text: a table, or a number
              inside a sentence
    CLAIMS    name -> function that says whether a conclusion holds for the cells

and the pages, `PAGES`, hold their markers, which Markdown does not show:

    <!--table:NAME-->            written between the markers, on lines of its own
    <!--/table-->
    <!--value:NAME-->0.93<!--/value-->
    This sentence draws a conclusion.<!--claim:NAME-->
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cells import RESULTS, Cell, load

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"
NAMES = ("evidence", "performance")
PAGES = (*(DOCS / f"{name}.md" for name in NAMES), DOCS.parent / "README.md")
MARKED = re.compile(r"(<!--(table|value):(\w+)-->)(.*?)(<!--/\2-->)", re.DOTALL)
CLAIM = re.compile(r"<!--claim:(\w+)-->")


class Study(NamedTuple):
    """One study.

    Attributes:
      name: of its results' file.
      entries: name -> function that turns the cells into a text.
      claims: name -> function that says whether a conclusion holds.
      cells: name -> results.
    """

    name: str
    entries: Mapping[str, Callable[[Mapping[str, Cell]], str]]
    claims: Mapping[str, Callable[[Mapping[str, Cell]], bool]]
    cells: Mapping[str, Cell]


def studies(results: Path = RESULTS) -> list[Study]:
    """Loads all studies of this folder, with the results in another."""
    modules = [importlib.import_module(path.stem) for path in sorted(FOLDER.glob("*_tables.py"))]
    return [Study(m.STUDY, m.ENTRIES, m.CLAIMS, load(m.STUDY, results)) for m in modules]


def fill(page: str, found: Sequence[Study]) -> str:
    """Returns the page with every table and value written anew.

    Args:
      page: the Markdown text.
      found: the studies.

    Returns:
      The new text.

    Raises:
      KeyError: no study knows a marker.
    """
    texts = {name: (study, entry) for study in found for name, entry in study.entries.items()}

    def text(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        study, entry = texts[name]
        content = entry(study.cells)
        return f"{start}\n{content}\n{end}" if kind == "table" else f"{start}{content}{end}"

    return MARKED.sub(text, page)


def broken_claims(page: str, found: Sequence[Study]) -> list[str]:
    """Lists the conclusions of the page that the data contradicts.

    Args:
      page: the Markdown text.
      found: the studies.

    Returns:
      Their names.

    Raises:
      KeyError: no study knows a conclusion.
    """
    claims = {name: (study, claim) for study in found for name, claim in study.claims.items()}
    used = [(name, *claims[name]) for name in CLAIM.findall(page)]
    return [name for name, study, claim in used if not claim(study.cells)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Formats a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(str(item) for item in line) + "|" for line in lines)


def main(arguments: Sequence[str] | None = None, pages: Sequence[Path] = PAGES) -> None:
    """Parses the command line and writes or checks pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where page and data disagree"
    )
    check = parser.parse_args(arguments).check
    found = studies()
    for page in pages:
        text = page.read_text()
        new = fill(text, found)
        if check and new != text:
            raise SystemExit(
                f"{page.name} does not show the data: run python examples/studies/tables.py"
            )
        page.write_text(new)
        if broken := broken_claims(text, found):
            raise SystemExit(
                f"{page.name} concludes what the data contradicts: {', '.join(broken)}"
            )


if __name__ == "__main__":
    main()
