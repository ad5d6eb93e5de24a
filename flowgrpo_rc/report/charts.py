"""Line charts of the pages: the data that page.js hands to uPlot, and the same values as a table.

A chart whose lines do not move is not drawn: a sentence says its value. The data stand in the page
as JSON, beside their chart, so that a page needs no other file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from flowgrpo_rc.report.words import link

_MAX_POINTS = 1000  # of a line; more are thinned
_TABLE_ROWS = 16
_FEW = 12  # points; the table shows all of a line that has no more
_CONSTANT = 1e-6  # of its size, by which a line must move to be drawn
_LEAST_SMOOTHED = 20  # points; a shorter line is drawn as it is
_WINDOWS = 15  # of a line, that its smoothed values are means of
_WIDEST = 101  # points of a window

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
      name: in the legend.
      points: (x, y) in the order of x; y is None where the value was not finite, and the line
        breaks there.
      color: number of its colour; None for its place in the chart.
      faint: whether it is the raw line behind the next one, which has its means.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int | None = None
    faint: bool = False

    def finite(self) -> list[Point]:
        """Returns the points whose y is finite."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over one axis.

    Attributes:
      title: heading of the chart.
      series: the lines. One keeps its colour whether or not the others have points.
      note: small text under the title.
      x_name: name of the horizontal axis. Charts of one name share cursor and zoom.
      log_y: whether the vertical axis is logarithmic; only positive points count then.
      thresholds: heights of dashed lines. They appear only inside the range of the data, which they
        do not widen.
      word: the entry of `words.WORDS` that explains the chart; None for none.
    """

    title: str
    series: Sequence[Series]
    note: str = ""
    x_name: str = "step"
    log_y: bool = False
    thresholds: Sequence[float] = ()
    word: str | None = None


def draw(chart: Chart) -> str:
    """Returns the figure of a chart, or a sentence if no line moves."""
    if not _moves(chart):
        return f'<p class="note">{_constant(chart)}</p>'
    lines = _lines(chart)
    note = f"<p><small>{escape(chart.note)}</small></p>" if chart.note else ""
    data = json.dumps(_data(chart, lines), separators=(",", ":"), ensure_ascii=False)
    # "</script>" in a name would end the element; JSON may write "<" otherwise.
    data = data.replace("<", "\\u003c")
    return (
        f'<figure class="chart"><figcaption><b>{link(chart.word, chart.title)}</b>{note}'
        f'</figcaption><div class="legend"></div><div class="plot" role="img" '
        f'aria-label="{escape(chart.title)}; its values are in the table below">'
        f'<script type="application/json">{data}</script></div>{_table(chart, lines)}</figure>'
    )


def gallery(charts: Sequence[Chart]) -> str:
    """Returns charts side by side, and under them a list of those that do not move."""
    moving = [chart for chart in charts if _moves(chart)]
    still = [chart for chart in charts if not _moves(chart)]
    grid = f'<div class="grid">{"".join(map(draw, moving))}</div>' if moving else ""
    items = "".join(f"<li>{_constant(chart)}</li>" for chart in still)
    return grid + (f'<ul class="constants">{items}</ul>' if items else "")


def smoothed(line: Series, color: int | None = None) -> list[Series]:
    """Returns a line behind its centred means; a short or a level line alone.

    Args:
      line: the line.
      color: number of its colour.
    """
    half = _window(line) // 2
    if half == 0:
        return [replace(line, color=color)]
    means = []
    for place, (x, _) in enumerate(line.points):
        window = line.points[max(0, place - half) : place + half + 1]
        known = [y for _, y in window if y is not None and math.isfinite(y)]
        means.append((x, sum(known) / len(known) if known else None))
    raw = replace(line, name=f"{line.name}, each step", color=color, faint=True)
    return [raw, replace(line, points=means, color=color)]


def smoothing(lines: Sequence[Series]) -> str:
    """Says how `smoothed` smoothes some lines; empty if it leaves them alone."""
    windows = sorted({_window(line) for line in lines} - {1})
    if not windows:
        return ""
    counts = " or ".join(map(str, windows))
    return f"thick: means of {counts} steps; thin, and in brackets: each step"


def _window(line: Series) -> int:
    """Returns how many steps a smoothed value is the mean of; 1 where nothing is smoothed."""
    count = len(line.points)
    if count < _LEAST_SMOOTHED or not _line_moves(line):
        return 1
    return min(_WIDEST, 2 * max(2, count // (2 * _WINDOWS)) + 1)


def _lines(chart: Chart) -> list[tuple[int, Series]]:
    """Returns the lines that have something to draw, each with the number of its colour."""
    lines = []
    for index, line in enumerate(chart.series):
        points = [
            (x, None if y is None or not math.isfinite(y) or (chart.log_y and y <= 0) else y)
            for x, y in line.points
        ]
        color = index if line.color is None else line.color
        lines.append((color, replace(line, points=points)))
    return [(color, line) for color, line in lines if line.finite()]


def _moves(chart: Chart) -> bool:
    """Returns whether there is something to draw that is not a level line."""
    return bool(_lines(chart)) and any(_line_moves(line) for line in chart.series)


def _line_moves(line: Series) -> bool:
    values = [y for _, y in line.finite()]
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    return high - low > _CONSTANT * max(abs(low), abs(high))


def _constant(chart: Chart) -> str:
    """Says the values of a chart that does not move."""
    title = f"<b>{link(chart.word, chart.title)}</b>"
    found = [line for line in chart.series if line.finite()]
    if not found:
        return f"{title}: no finite value."
    if any(_line_moves(line) for line in found):
        return f"{title}: no value above zero."
    words = []
    for line in found:
        value = shown(line.finite()[0][1])
        words.append(value if len(chart.series) == 1 else f"{line.name} {value}")
    points = max(len(line.finite()) for line in found)
    first = f"{found[0].finite()[0][0]:.10g}"
    where = f"at {chart.x_name} {first}" if points == 1 else f"at all {points} {chart.x_name}s"
    return f"{title}: {escape(', '.join(words))}, {escape(where)}."


def _data(chart: Chart, lines: Sequence[tuple[int, Series]]) -> dict[str, Any]:
    """Returns what page.js draws."""
    return {
        "x": chart.x_name,
        "log": chart.log_y,
        "thresholds": list(chart.thresholds),
        "series": [
            {"name": line.name, "color": color % 4, "faint": line.faint} for color, line in lines
        ],
        "tables": [_columns(line.points) for _, line in lines],
    }


def _columns(points: Sequence[tuple[float, float | None]]) -> list[list[float | None]]:
    """Returns x and y of a line in columns, thinned and with seven digits."""
    kept = _thinned(points)
    ys = [None if y is None else float(f"{y:.7g}") for _, y in kept]
    return [[x for x, _ in kept], ys]


def _thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Returns at most about 1000 points: the lowest and the highest of each stretch of steps.

    No peak is lost that way.
    """
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [(x, y) for x, y in stretch if y is not None]
        if finite:
            lowest = min(finite, key=lambda point: point[1])
            highest = max(finite, key=lambda point: point[1])
            kept += sorted({lowest, highest})
        else:
            kept.append((stretch[0][0], None))
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _table(chart: Chart, lines: Sequence[tuple[int, Series]]) -> str:
    """Returns some of the values as a table, folded: first, last, and evenly between."""
    columns = [dict(line.points) for _, line in lines]
    places = sorted({x for column in columns for x in column})
    count = min(_TABLE_ROWS, len(places))
    chosen = {places[round(i * (len(places) - 1) / max(1, count - 1))] for i in range(count)}
    for column in columns:
        if len(column) <= _FEW:
            chosen |= column.keys()
    head = "".join(f'<th scope="col">{escape(line.name)}</th>' for _, line in lines)
    rows = "".join(
        f'<tr><th scope="row">{x:.10g}</th>'
        + "".join(f"<td>{_cell(column, x)}</td>" for column in columns)
        + "</tr>"
        for x in sorted(chosen)
    )
    part = "" if len(chosen) == len(places) else f", {len(chosen)} of {len(places)} {chart.x_name}s"
    return (
        f'<details class="values"><summary>Table{part}</summary><div class="scroll"><table>'
        f'<caption>{escape(chart.title)}</caption><tr><th scope="col">{escape(chart.x_name)}</th>'
        f"{head}</tr>{rows}</table></div></details>"
    )


def _cell(column: dict[float, float | None], x: float) -> str:
    if x not in column:
        return ""
    value = column[x]
    return "not finite" if value is None else shown(value)


def shown(value: float) -> str:
    """Returns a number with six digits, as 2e-5 rather than 2e-05."""
    text = f"{value:.6g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text
