"""The report's page: its style sheet and the few HTML shapes that its sections are made of. All
text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Nothing may be fetched, whatever a run's files contain.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #ffffff; --ink: #161614; --soft: #5d5c57; --rule: #e0dfda;
  --s0: #2a6fc9; --s1: #d9622b; --s2: #1d8a63; --s3: #8a57c2; --warn: #c22f2f; --good: #1d7a46; }
@media (prefers-color-scheme: dark) { :root { --page: #141413; --card: #1d1d1b; --ink: #f2f1ee; --soft: #a9a8a1;
  --rule: #35342f; --s0: #5b9bea; --s1: #ef8a55; --s2: #4dbb90; --s3: #b48be4; --warn: #f07a72; --good: #5cc58a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px clamp(12px, 3vw, 32px) 48px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px;
  margin-top: 16px; }
header p { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
header p.outcome { color: var(--ink); font-size: 1.1rem; }
p { margin: 0 0 8px; } .empty, .axis, small, .note { color: var(--soft); font-size: .87rem; font-weight: 400; }
.good { color: var(--good); } .bad { color: var(--warn); }
.grid { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.pair { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
.tiles div { border-left: 3px solid var(--rule); padding-left: 10px; } .tiles b { display: block; font-size: 1.25rem; }
figure { margin: 0; min-width: 0; } figure img { width: 100%; height: auto; border-radius: 6px; display: block; }
figcaption { margin-bottom: 6px; }
.plot { position: relative; height: 190px; margin: 16px 14px 24px calc(var(--gutter) + 12px);
  font: 12px/1 ui-monospace, monospace; }
.wide .plot { height: 280px; } .wide + .grid { margin-top: 24px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot img { position: absolute; inset: 0; width: 100%; height: 100%; border-radius: 0; image-rendering: pixelated; }
.plot span { position: absolute; color: var(--soft); white-space: nowrap; }
.plot .y { right: calc(100% + 8px); transform: translateY(50%); }
.plot .x { top: calc(100% + 8px); transform: translateX(-50%); }
.plot path { fill: none; vector-effect: non-scaling-stroke; }
path.grid { stroke: var(--rule); stroke-width: 1; }
path.threshold { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 5 4; }
path.line { stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dots path { stroke: var(--c); stroke-width: 7; stroke-linecap: round; pointer-events: stroke; }
.dots.hidden path { stroke: transparent; stroke-width: 12; } .dots.hidden path:hover { stroke: var(--c); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.axis { text-align: right; margin: 4px 14px 0 0; line-height: 1; }
.scale span { display: inline-flex; gap: 8px; align-items: center; } .heat path.threshold { stroke: #ffffff; }
.scale { font: 12px/1.6 ui-monospace, monospace;
  color: var(--soft); }
.scale img { width: 110px; height: 9px; border-radius: 2px; }
.cards { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(clamp(134px, 15vw, 190px), 1fr)); }
.cards p { margin: 0; overflow-wrap: anywhere; } .cards img { margin-bottom: 6px; max-width: 260px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .87rem; color: var(--soft); }
.legend span::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  background: var(--c); margin-right: 6px; vertical-align: middle; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 500; color: var(--soft); width: 30%; min-width: 13em; } td { font-variant-numeric: tabular-nums; }
.columns th { width: auto; min-width: 4em; } .columns td { white-space: pre-wrap; }
.even { table-layout: fixed; } .even th:first-child { width: 40%; min-width: 0; }
.bars th { width: 22%; min-width: 5em; } .bars td:last-child { width: 26%; white-space: nowrap; text-align: right;
  padding-right: 0; }
.bar { vertical-align: middle; } .bar span { display: block; height: 12px; min-width: 2px; border-radius: 0 4px 4px 0;
  background: var(--s0); }
ul.warnings { margin: 0; padding: 0; list-style: none; }
ul.warnings li { border-left: 3px solid var(--warn); padding: 2px 0 2px 10px; margin-bottom: 8px;
  overflow-wrap: anywhere; }
ul.warnings b { margin-right: 8px; white-space: nowrap; }
summary { cursor: pointer; } pre { overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; margin: 8px 0 0; }
"""


def page(title: str, header: str, sections: Iterable[str]) -> str:
    """The whole document. `header` and `sections` are HTML; `title` is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><header>{header}</header>\n{chr(10).join(sections)}\n</main></body></html>\n"
    )


def section(name: str, heading: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{body}</section>'


def empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'


def header(title: str, outcome: str, progress: str) -> str:
    return (
        f'<h1>{escape(title)}</h1><p class="outcome">{escape(outcome)}</p><p>{escape(progress)}</p>'
    )


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def cards(items: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(items)}</div>'


def card(heading: str, data_uri: str | None, lines: Sequence[str], texts: Sequence[str]) -> str:
    """A picture, if there is one, over a heading, short facts and longer texts."""
    name = escape(heading)
    picture = "" if data_uri is None else f'<img alt="{name}" src="{data_uri}">'
    facts = "".join(f"<p><small>{escape(line)}</small></p>" for line in lines)
    return f"<figure>{picture}<b>{name}</b>{facts}{''.join(f'<p>{escape(text)}</p>' for text in texts)}</figure>"


def wide(chart: str) -> str:
    return f'<div class="wide">{chart}</div>'


def pair(figures: Sequence[str]) -> str:
    return f'<div class="pair">{"".join(figures)}</div>'


def grid(charts: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(charts)}</div>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Large numbers with their names under them."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><small>{escape(name)}</small></div>" for name, value in values
    )
    return f'<div class="tiles">{cells}</div>'


def table(rows: Sequence[tuple[str, str]]) -> str:
    return f"<table>{''.join(f'<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)}</table>"


def columns(names: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "columns") -> str:
    """A table with a heading over each column. Line breaks in the texts are kept."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<table class="{kind}"><tr>{head}</tr>{body}</table>'


def warnings(rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li><b>{escape(when)}</b>{escape(text)}</li>" for when, text in rows)
    return f'<ul class="warnings">{items}</ul>'


def folded(heading: str, text: str) -> str:
    return f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>"


def image(caption: str, data_uri: str) -> str:
    text = escape(caption)
    return (
        f'<figure><figcaption><b>{text}</b></figcaption><img alt="{text}" '
        f'src="{data_uri}"></figure>'
    )
