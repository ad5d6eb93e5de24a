"""Line charts of the pages: the data that page.js hands to uPlot.

The data stand in the page as JSON, beside their chart, so that a page needs no other file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

_MAX_POINTS = 1000  # of a line; more are thinned
_CONSTANT = 1e-6  # of its size, by which a line must move to be drawn
_LEAST_SMOOTHED = 20  # points; a shorter line is drawn as it is
_WINDOWS = 15  # of a line, that its smoothed values are means of
_WIDEST = 101  # points of a window

Points = Sequence[tuple[float, float | None]]


def known(points: Points) -> list[float]:
    """Returns the finite values of a line."""
    return [y for _, y in points if y is not None]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str  # in the legend
    points: Points  # in the order of x; the line breaks where y was not finite, None
    color: int | None = None  # number of its colour; None for its place in the chart
    faint: bool = False  # the raw line behind the next one, which has its means

    @property
    def moves(self) -> bool:
        """Whether the line is not level."""
        values = known(self.points)
        low = min(values, default=0.0)
        high = max(values, default=0.0)
        return high - low > _CONSTANT * max(abs(low), abs(high))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over one axis."""

    title: str
    series: Sequence[Series]  # one keeps its colour whether or not the others have points
    note: str = ""  # small text under the title
    x_name: str = "step"  # charts of one name share cursor and zoom
    log_y: bool = False  # only positive points count then
    thresholds: Sequence[float] = ()  # dashed lines, which do not widen the range of the data
    word: str = ""  # the entry of words.yaml that explains the chart

    @cached_property
    def lines(self) -> list[Series]:
        """The lines that have something to draw, each with its colour; equal ones are one line."""
        lines = []
        for index, line in enumerate(self.series):
            points = line.points
            if self.log_y:
                points = [(x, y if y and y > 0 else None) for x, y in points]
            if known(points):
                color = index if line.color is None else line.color
                lines.append(replace(line, points=points, color=color % 4))
        return _joined(lines)

    @property
    def moves(self) -> bool:
        """Whether there is something to draw that is not a level line."""
        return any(line.moves for line in self.series) and bool(self.lines)

    def level(self) -> str:
        """Returns the values of a chart that does not move in words."""
        lines = self.lines
        if not lines:
            return "no value above zero" if self.log_y else "no finite value"
        names = [f"{line.name} " if len(lines) > 1 else "" for line in lines]
        values = [known(line.points) for line in lines]
        words = [name + shown(ys[0]) for name, ys in zip(names, values, strict=True)]
        points = max(map(len, values))
        first = lines[0].points[0][0]
        where = f"all {points} {self.x_name}s" if points > 1 else f"{self.x_name} {first:.10g}"
        return f"{', '.join(words)}, at {where}"

    def data(self) -> dict[str, object]:
        """Returns what page.js draws: the numbers of a line have seven digits."""
        tables = []
        for line in self.lines:
            points = _thinned(line.points)
            ys = [None if y is None else float(f"{y:.7g}") for _, y in points]
            tables.append([[x for x, _ in points], ys])
        series = [
            {"name": line.name, "color": line.color, "faint": line.faint} for line in self.lines
        ]
        axes = {"x": self.x_name, "log": self.log_y, "thresholds": list(self.thresholds)}
        return {**axes, "series": series, "tables": tables}


def merged(charts: Sequence[Chart]) -> list[Chart]:
    """Returns the charts; those that draw the same curves are one, with the titles of all."""
    groups: dict[object, list[Chart]] = {}
    for chart in charts:
        # Levels may be equal by chance, as many fractions are 0.
        curves = tuple((line.color, *line.points) for line in chart.lines if chart.moves)
        groups.setdefault(curves or chart.title, []).append(chart)
    return [
        replace(equal[0], title=" = ".join(chart.title for chart in equal))
        for equal in groups.values()
    ]


def _joined(lines: Sequence[Series]) -> list[Series]:
    groups: dict[object, list[Series]] = {}
    for line in lines:
        groups.setdefault((line.faint, *line.points), []).append(line)
    return [
        replace(equal[0], name=" = ".join(line.name for line in equal)) for equal in groups.values()
    ]


def smoothed(line: Series, color: int | None = None) -> list[Series]:
    """Returns a line behind its centred means; a short or a level line alone."""
    count = len(line.points)
    half = min(_WIDEST // 2, max(2, count // (2 * _WINDOWS)))
    if count < _LEAST_SMOOTHED or not line.moves:
        return [replace(line, color=color)]
    means = []
    for place, (x, _) in enumerate(line.points):
        window = line.points[max(0, place - half) : place + half + 1]
        values = known(window)
        means.append((x, sum(values) / len(values) if values else None))
    raw = replace(line, name=f"{line.name}, each step", color=color, faint=True)
    return [raw, replace(line, points=means, color=color)]


def shown(value: float) -> str:
    """Returns a number with six digits, as 2e-5 rather than 2e-05."""
    text = f"{value:.6g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def _thinned(points: Points) -> Points:
    """Returns at most about 1000 points: the lowest and the highest of each stretch of steps."""
    # Means would hide the peaks that a reader looks for.
    if len(points) <= _MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    extremes = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [(y, x) for x, y in stretch if y is not None]
        extremes |= {(x, y) for y, x in (min(finite), max(finite))} if finite else {stretch[0]}
    return sorted(extremes, key=lambda point: point[0])
