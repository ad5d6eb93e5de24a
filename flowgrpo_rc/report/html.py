"""The report's page and the few HTML shapes that its sections are made of.

Text is escaped here; arguments named `body`, `header`, `sections`, `items`, `chart`, `charts` and
`figures` are HTML already. page.css, page.js and uPlot become part of the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from flowgrpo_rc.report.words import link

_FOLDER = Path(__file__).parent
# The browser fetches nothing, even if a run's files contain HTML that asks for it, and runs no
# script but those that are named by their hashes.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; script-src"
)
_STACKS = 8  # of pictures, that are shown without a click
_WITHOUT_SCRIPTS = (
    "The curves need JavaScript, which is off here. Some values of each are in the table at its "
    "place."
)


def page(title: str, header: str, sections: Iterable[str]) -> str:
    """Returns the whole document.

    Args:
      title: text of the browser's tab.
      header: HTML above the sections.
      sections: HTML of the sections.
    """
    style = "".join(_read(name) for name in ("uplot/uPlot.min.css", "page.css"))
    # The charts' library keeps its licence in the page, too.
    licence = f"/*\n{_read('uplot/LICENSE')}\n*/\n"
    scripts = [licence + _read("uplot/uPlot.iife.min.js"), _read("page.js")]
    policy = " ".join([_POLICY, *map(_hash, scripts)])
    code = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><main><header>{header}<noscript>{note(_WITHOUT_SCRIPTS)}</noscript></header>\n"
        f"{chr(10).join(sections)}\n</main>"
        '<button type="button" class="reset" hidden>Reset zoom</button>\n'
        f"{code}</body></html>\n"
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Returns a script's name in a Content-Security-Policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _breakable(text: str) -> str:
    """Escapes a text, and lets long names break behind their dots, slashes and the like alone."""
    return re.sub(r"(?<=[A-Za-z])([_/.=-])(?=[A-Za-z])", r"\1<wbr>", escape(text))


def section(name: str, heading: str, body: str) -> str:
    """Returns a section.

    Args:
      name: its anchor.
      heading: its heading.
      body: its HTML.
    """
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{body}</section>'


def empty(text: str) -> str:
    """Returns a sentence in place of something that is not there."""
    return f'<p class="empty">{escape(text)}</p>'


def header(title: str, outcome: str, progress: str) -> str:
    """Returns the top of the page.

    Args:
      title: the heading.
      outcome: the result in a sentence.
      progress: how far the run came.
    """
    return (
        f'<h1>{escape(title)}</h1><p class="outcome">{escape(outcome)}</p><p>{escape(progress)}</p>'
    )


def facts(lines: Sequence[tuple[str | None, str, str]]) -> str:
    """Returns short lines of name and value, from triples of word, name and value.

    A word is a key of `words.WORDS`, which the name links to; None for no link.
    """
    cells = "".join(
        f"<div><dt>{link(word, name)}</dt><dd>{_breakable(value)}</dd></div>"
        for word, name, value in lines
    )
    return f'<dl class="facts">{cells}</dl>'


def note(text: str) -> str:
    """Returns a small remark."""
    return f'<p class="note">{escape(text)}</p>'


def cards(items: Sequence[str]) -> str:
    """Puts cards side by side."""
    return f'<div class="cards">{"".join(items)}</div>'


def card(heading: str, data_uri: str | None, lines: Sequence[str], texts: Sequence[str]) -> str:
    """Returns a picture, if there is one, over a heading, short facts and longer texts.

    Args:
      heading: name of the card.
      data_uri: the picture; None for none.
      lines: the short facts.
      texts: the longer texts.
    """
    name = escape(heading)
    picture = "" if data_uri is None else f'<img alt="{name}" src="{data_uri}">'
    facts = "".join(f"<p><small>{_breakable(line)}</small></p>" for line in lines)
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f"<figure>{picture}<b>{name}</b>{facts}{paragraphs}</figure>"


def wide(chart: str) -> str:
    """Returns a chart that fills the width."""
    return f'<div class="wide">{chart}</div>'


def pair(figures: Sequence[str]) -> str:
    """Puts figures side by side, as wide as they can be."""
    return f'<div class="pair">{"".join(figures)}</div>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Returns large numbers with their names under them, from pairs of name and value."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><small>{_breakable(name)}</small></div>"
        for name, value in values
    )
    return f'<div class="tiles">{cells}</div>'


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a table of names and values."""
    body = "".join(
        f"<tr><th>{_breakable(name)}</th><td>{_breakable(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{body}</table>"


def columns(names: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "columns") -> str:
    """Returns a table with a heading over each column. Line breaks in the texts are kept.

    Args:
      names: the headings.
      rows: the cells.
      kind: class in the style sheet: "columns", or "columns even" for columns of one width.
    """
    head = "".join(f'<th scope="col">{_breakable(name)}</th>' for name in names)
    body = "".join(f"<tr>{_cells(names, row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cells(names: Sequence[str], row: Sequence[str]) -> str:
    """Returns the cells of a row; a narrow window shows each with its heading."""
    return "".join(
        f'<td data-name="{escape(name)}">{_breakable(cell)}</td>'
        for name, cell in zip(names, row, strict=True)
    )


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Draws horizontal bars.

    Args:
      rows: for each bar its name, its value (the longest bar fills the width), and the value in
        words.
    """
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    found = "".join(
        f"<tr><th>{_breakable(name)}</th>"
        f'<td class="bar"><span style="width:{100 * value / longest:.2f}%"></span></td>'
        f"<td>{escape(text)}</td></tr>"
        for name, value, text in rows
    )
    return f'<table class="bars">{found}</table>'


def warnings(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a list of warnings, from pairs of when and what."""
    items = "".join(f"<li><b>{escape(when)}</b>{_breakable(text)}</li>" for when, text in rows)
    return f'<ul class="warnings">{items}</ul>'


def folded(heading: str, text: str) -> str:
    """Returns a text that opens at a click on its heading."""
    return f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>"


def image(caption: str, data_uri: str) -> str:
    """Returns a picture under its caption."""
    text = escape(caption)
    return (
        f'<figure><figcaption><b>{text}</b></figcaption><img alt="{text}" '
        f'src="{data_uri}"></figure>'
    )


def picture_stacks(stacks: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Puts pictures of one thing above one another, and the stacks side by side.

    The first few stacks are shown, the others at a click.

    Args:
      stacks: what a stack shows, and for each picture its label and its data URI.
    """
    cells = []
    for subject, pictures in stacks:
        name = escape(subject)
        shown = "".join(
            f'<div><img alt="{name}, {escape(label)}" src="{data_uri}">{escape(label)}</div>'
            for label, data_uri in pictures
        )
        cells.append(f"<figure>{shown}<figcaption>{name}</figcaption></figure>")
    # Pairs are large; more pictures in a stack have to be seen at once.
    kind = "stacks" if len(stacks[0][1]) <= 2 else "stacks small"
    first = f'<div class="{kind}">{"".join(cells[:_STACKS])}</div>'
    if len(cells) <= _STACKS:
        return first
    rest = f'<div class="{kind}">{"".join(cells[_STACKS:])}</div>'
    summary = f"<summary>{len(cells) - _STACKS} more</summary>"
    return f'{first}<details class="more">{summary}{rest}</details>'
