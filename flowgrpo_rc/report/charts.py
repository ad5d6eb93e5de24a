"""Charts as inline HTML and SVG, without scripts and fonts.

The plot is an SVG that stretches with its box; strokes and dots keep their size. The labels are
HTML, placed in percent, so text stays readable at every width. All colours come from the page's CSS
variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from flowgrpo_rc.report.axes import Axis, linear_axis, log_axis, tick_labels

_WIDTH = 1000.0  # of the plot, in units of the SVG
_HEIGHT = 300.0
_MAX_POINTS = 400  # of a line; more are thinned
_MAX_DOTS = 30  # of a line; more are visible under the pointer only
_MAX_LABELLED = 120  # of a line; more have no labels

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
      name: in the legend.
      points: (x, y) in the order of x; y is None where the value was not finite, and the line
        breaks there.
    """

    name: str
    points: Sequence[tuple[float, float | None]]

    def finite(self) -> list[Point]:
        """Returns the points whose y is finite."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    x_name: str = "step",
    log_y: bool = False,
    thresholds: Sequence[float] = (),
) -> str:
    """Draws lines with a title, or a sentence if no series has a finite point.

    With `log_y` only positive points count. A series keeps its colour whether or not the others
    have points.

    Args:
      title: heading of the chart.
      series: the lines.
      note: small text behind the title.
      x_name: name of the horizontal axis.
      log_y: whether the vertical axis is logarithmic.
      thresholds: heights of dashed lines. They appear only inside the range of the data, which
        they do not widen.
    """
    visible = ((index, _visible(line, log_y)) for index, line in enumerate(series))
    drawn = {index: line for index, line in visible if line.finite()}
    remark = f" <small>{escape(note)}</small>" if note else ""
    head = f"<figcaption><b>{escape(title)}</b>{remark}</figcaption>"
    if not drawn:
        return f'<figure class="chart">{head}<p class="empty">Nothing to draw.</p></figure>'
    points = [point for line in drawn.values() for point in line.finite()]
    x_axis = linear_axis([x for x, _ in points], whole=True, tight=True)
    values = [y for _, y in points]
    y_axis = log_axis(values) if log_y else linear_axis(values)
    lines = [_grid(y_axis)]
    lines += [
        _threshold(y_axis, bound) for bound in thresholds if y_axis.lower < bound < y_axis.upper
    ]
    lines += [_polyline(line, x_axis, y_axis, index) for index, line in drawn.items()]
    svg = (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(lines)}</svg>'
    )
    y_labels = tick_labels(y_axis)
    gutter = max(len(label) for label in y_labels)
    labels = "".join(
        f'<span class="y" style="bottom:{100 * y_axis.place(tick):.2f}%">{label}</span>'
        for tick, label in zip(y_axis.ticks, y_labels, strict=True)
    )
    labels += "".join(
        f'<span class="x" style="left:{100 * x_axis.place(tick):.2f}%">{tick:.0f}</span>'
        for tick in x_axis.ticks
    )
    legend = _legend({index: line.name for index, line in drawn.items()}) if len(series) > 1 else ""
    return (
        f'<figure class="chart">{head}{legend}<div class="plot" '
        f'style="--gutter:{gutter}ch">{svg}{labels}</div>'
        f'<p class="axis">{escape(x_name)}</p></figure>'
    )


def bar_list(rows: Sequence[tuple[str, float, str]]) -> str:
    """Draws horizontal bars.

    Args:
      rows: for each bar its name, its value (the longest bar fills the width), and the value in
        words.
    """
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    bars = "".join(
        f"<tr><th>{escape(name)}</th>"
        f'<td class="bar"><span style="width:{100 * value / longest:.2f}%"></span></td>'
        f"<td>{escape(text)}</td></tr>"
        for name, value, text in rows
    )
    return f'<table class="bars">{bars}</table>'


def _visible(line: Series, log_y: bool) -> Series:
    points = [(x, y if y is None or not log_y or y > 0 else None) for x, y in line.points]
    return Series(name=line.name, points=_thinned(points))


def _thinned(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Returns at most about 400 points: the lowest and the highest of each stretch of steps.

    No peak is lost that way.
    """
    if len(points) <= _MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [(x, y) for x, y in stretch if y is not None and math.isfinite(y)]
        if finite:
            lowest = min(finite, key=lambda point: point[1])
            highest = max(finite, key=lambda point: point[1])
            kept += sorted({lowest, highest})
        else:
            kept.append((stretch[0][0], None))
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _grid(axis: Axis) -> str:
    return "".join(
        f'<path class="grid" d="M0 {_y(axis, tick)}H{_WIDTH:g}"/>' for tick in axis.ticks
    )


def _threshold(axis: Axis, bound: float) -> str:
    return (
        f'<path class="threshold" d="M0 {_y(axis, bound)}H{_WIDTH:g}"><title>threshold '
        f"{bound:g}</title></path>"
    )


def _polyline(line: Series, x_axis: Axis, y_axis: Axis, index: int) -> str:
    path = []
    dots = []
    move = True  # the next point begins a new piece of the line
    for x, y in line.points:
        if y is None or not math.isfinite(y):
            move = True
            continue
        place = f"{x_axis.place(x) * _WIDTH:.1f} {_y(y_axis, y)}"
        path.append(f"{'M' if move else 'L'}{place}")
        move = False
        # A line of length zero with round caps: a dot that stays round however the SVG is
        # stretched.
        label = f"{line.name}: {y:.6g} at {x:g}"
        dots.append(f'<path d="M{place}h0"><title>{escape(label)}</title></path>')
    kind = "dots" if len(dots) <= _MAX_DOTS else "dots hidden"
    labelled = f'<g class="{kind}">{"".join(dots)}</g>' if len(dots) <= _MAX_LABELLED else ""
    return f'<g class="s{index % 4}"><path class="line" d="{"".join(path)}"/>{labelled}</g>'


def _y(axis: Axis, value: float) -> str:
    return f"{(1 - axis.place(value)) * _HEIGHT:.1f}"


def _legend(names: Mapping[int, str]) -> str:
    items = "".join(
        f'<span class="s{index % 4}">{escape(name)}</span>' for index, name in names.items()
    )
    return f'<div class="legend">{items}</div>'
