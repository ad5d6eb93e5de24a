"""The report's page and the few HTML shapes that its sections are made of.

Text is escaped here; arguments named `body`, `header`, `sections`, `items`, `chart`, `charts` and
`figures` are HTML already. The style sheet is page.css, which becomes part of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

# The browser fetches nothing, even if a run's files contain HTML that asks for it.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, header: str, sections: Iterable[str]) -> str:
    """Returns the whole document.

    Args:
      title: text of the browser's tab.
      header: HTML above the sections.
      sections: HTML of the sections.
    """
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><main><header>{header}</header>\n{chr(10).join(sections)}\n</main></body></html>\n"
    )


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
    facts = "".join(f"<p><small>{escape(line)}</small></p>" for line in lines)
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f"<figure>{picture}<b>{name}</b>{facts}{paragraphs}</figure>"


def wide(chart: str) -> str:
    """Returns a chart that fills the width."""
    return f'<div class="wide">{chart}</div>'


def pair(figures: Sequence[str]) -> str:
    """Puts figures side by side, as wide as they can be."""
    return f'<div class="pair">{"".join(figures)}</div>'


def grid(charts: Sequence[str]) -> str:
    """Puts charts side by side, several in a row."""
    return f'<div class="grid">{"".join(charts)}</div>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Returns large numbers with their names under them, from pairs of name and value."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><small>{escape(name)}</small></div>" for name, value in values
    )
    return f'<div class="tiles">{cells}</div>'


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a table of names and values."""
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{body}</table>"


def columns(names: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "columns") -> str:
    """Returns a table with a heading over each column. Line breaks in the texts are kept.

    Args:
      names: the headings.
      rows: the cells.
      kind: class in the style sheet: "columns", or "columns even" for columns of one width.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<table class="{kind}"><tr>{head}</tr>{body}</table>'


def warnings(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a list of warnings, from pairs of when and what."""
    items = "".join(f"<li><b>{escape(when)}</b>{escape(text)}</li>" for when, text in rows)
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
