"""Charts as inline HTML and SVG: no script, no font, no colour of their own beyond the page's CSS variables.

The plot is an SVG that stretches with its box (strokes and dots keep their size) and the labels are HTML at
percentages, so text stays readable at every width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 1000.0, 300.0
_MAX_POINTS = 400
_MAX_DOTS = 30
_MAX_LABELLED = 120

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: its points are ordered by x; y is None where the value was not finite (the line breaks there)."""

    name: str
    points: Sequence[tuple[float, float | None]]

    def finite(self) -> list[Point]:
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to 0..1 and says where its labelled ticks are."""

    lower: float
    upper: float
    ticks: Sequence[float]
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            lower, upper = math.log10(self.lower), math.log10(self.upper)
            return (math.log10(value) - lower) / (upper - lower)
        return (value - self.lower) / (self.upper - self.lower)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    x_name: str = "step",
    log_y: bool = False,
    thresholds: Sequence[float] = (),
) -> str:
    """A titled chart, or a sentence where no series has a finite point (positive, with `log_y`).

    thresholds: drawn as dashed lines where they fall inside the data's range, which they do not widen.
    """
    drawn = [_visible(line, log_y) for line in series]
    drawn = [line for line in drawn if line.finite()]
    head = f"<figcaption><b>{escape(title)}</b>{f' <small>{escape(note)}</small>' if note else ''}</figcaption>"
    if not drawn:
        return f'<figure class="chart">{head}<p class="empty">Nothing to draw.</p></figure>'
    points = [point for line in drawn for point in line.finite()]
    x_axis = _linear_axis([x for x, _ in points], whole=True, tight=True)
    values = [y for _, y in points]
    y_axis = _log_axis(values) if log_y else _linear_axis(values)
    lines = [_grid(y_axis)]
    lines += [_threshold(y_axis, bound) for bound in thresholds if y_axis.lower < bound < y_axis.upper]
    lines += [_polyline(line, x_axis, y_axis, index) for index, line in enumerate(drawn)]
    svg = (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(lines)}</svg>'
    )
    y_labels = _tick_labels(y_axis)
    gutter = max(len(label) for label in y_labels)
    plot = "".join(
        f'<span class="y" style="bottom:{100 * y_axis.place(tick):.2f}%">{label}</span>'
        for tick, label in zip(y_axis.ticks, y_labels, strict=True)
    ) + "".join(
        f'<span class="x" style="left:{100 * x_axis.place(tick):.2f}%">{tick:.0f}</span>' for tick in x_axis.ticks
    )
    legend = _legend([line.name for line in drawn]) if len(series) > 1 else ""
    return (
        f'<figure class="chart">{head}{legend}<div class="plot" style="--gutter:{gutter}ch">{svg}{plot}</div>'
        f'<p class="axis">{escape(x_name)}</p></figure>'
    )


def bar_list(rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: a name, a length relative to the longest, and the value in words."""
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
    """At most about 400 points: of each stretch of steps the lowest and the highest, so that no spike is lost."""
    if len(points) <= _MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        finite = [(x, y) for x, y in points[start : start + size] if y is not None and math.isfinite(y)]
        extremes = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else set()
        kept += sorted(extremes) or [(points[start][0], None)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _linear_axis(values: Sequence[float], *, whole: bool = False, tight: bool = False) -> _Axis:
    lower, upper = min(values), max(values)
    if upper - lower <= 1e-12 * max(abs(lower), abs(upper)):
        pad = 0.5 if whole or lower == 0 else abs(lower) * 0.1
        lower, upper = lower - pad, upper + pad
    step = _nice_step((upper - lower) / 4)
    if whole:
        step = max(1.0, step)
    if not tight:
        lower, upper = math.floor(lower / step + 1e-9) * step, math.ceil(upper / step - 1e-9) * step
    first = math.ceil(lower / step - 1e-9)
    count = math.floor(upper / step + 1e-9) - first + 1
    return _Axis(lower, upper, [(first + i) * step for i in range(count)])


def _nice_step(rough: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * (1 - 1e-9))


def _log_axis(values: Sequence[float]) -> _Axis:
    """Ticks at 1, 2 and 5 over a decade or two, at powers of ten over more."""
    first, last = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    last = max(last, first + 1)
    fine = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)] + [10.0**last]
    lower = max(tick for tick in fine[:-1] if tick <= min(values) * (1 + 1e-9))
    upper = min(tick for tick in fine if tick >= max(values) * (1 - 1e-9) and tick > lower)
    ticks = [tick for tick in fine if lower <= tick <= upper]
    if len(ticks) > 6:
        every = math.ceil((last - first) / 6)
        lower, upper, ticks = 10.0**first, 10.0**last, [10.0**power for power in range(first, last + 1, every)]
    return _Axis(lower, upper, ticks, log=True)


def _tick_labels(axis: _Axis) -> list[str]:
    if axis.log:
        return [_scientific(tick) for tick in axis.ticks]
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else axis.upper - axis.lower
    largest = max(abs(tick) for tick in axis.ticks)
    if 0 < largest < 1e-3 or largest >= 1e6:
        return ["0" if abs(tick) < step / 2 else _scientific(tick) for tick in axis.ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{0.0 if abs(tick) < step / 2 else tick:.{decimals}f}" for tick in axis.ticks]


def _scientific(value: float) -> str:
    """2e-5 rather than 2.00e-05."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _grid(axis: _Axis) -> str:
    return "".join(f'<path class="grid" d="M0 {_y(axis, tick)}H{_WIDTH:g}"/>' for tick in axis.ticks)


def _threshold(axis: _Axis, bound: float) -> str:
    return f'<path class="threshold" d="M0 {_y(axis, bound)}H{_WIDTH:g}"><title>threshold {bound:g}</title></path>'


def _polyline(line: Series, x_axis: _Axis, y_axis: _Axis, index: int) -> str:
    path, dots, move = [], [], True
    for x, y in line.points:
        if y is None or not math.isfinite(y):
            move = True
            continue
        place = f"{x_axis.place(x) * _WIDTH:.1f} {_y(y_axis, y)}"
        path.append(f"{'M' if move else 'L'}{place}")
        move = False
        # A line of length zero with round caps: a dot that stays round however the SVG is stretched.
        label = f"{line.name}: {y:.6g} at {x:g}"
        dots.append(f'<path d="M{place}h0"><title>{escape(label)}</title></path>')
    kind = "dots" if len(dots) <= _MAX_DOTS else "dots hidden"
    labelled = f'<g class="{kind}">{"".join(dots)}</g>' if len(dots) <= _MAX_LABELLED else ""
    return f'<g class="s{index % 4}"><path class="line" d="{"".join(path)}"/>{labelled}</g>'


def _y(axis: _Axis, value: float) -> str:
    return f"{(1 - axis.place(value)) * _HEIGHT:.1f}"


def _legend(names: Sequence[str]) -> str:
    items = "".join(f'<span class="s{index % 4}">{escape(name)}</span>' for index, name in enumerate(names))
    return f'<div class="legend">{items}</div>'
