"""Rows of metrics.jsonl as series, for the report and for figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo_rc.monitoring.health import correction_metric_name
from flowgrpo_rc.report.charts import Series

Row = Mapping[str, Any]


def points_of(rows: Sequence[Row], name: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def series_of(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """The metrics that some row has; null stays as a gap."""
    found = [Series(name=name, points=points_of(rows, name)) for name in names]
    return [series for series in found if series.points]


def correction_series(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """As `series_of`, for correction metrics of either mode, named without their prefix."""
    found = []
    for name in names:
        full = [(row["step"], correction_metric_name(row, name), row) for row in rows]
        found.append(
            Series(
                name=name, points=[(step, row[key]) for step, key, row in full if key is not None]
            )
        )
    return [series for series in found if series.points]


def ends(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """First and last finite value."""
    values = [value for _, value in points_of(rows, name) if value is not None]
    return (values[0], values[-1]) if values else None


def change(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4f} \u2192 {ends[1]:.4f} ({ends[1] - ends[0]:+.4f})"


def distinct(rows: Sequence[Row], prefix: str, first: str) -> list[str]:
    """`first`, then the other names below `prefix` except repetitions of it (a run with one reward
    has them).
    """
    names = sorted({name for row in rows for name in row if name.startswith(prefix)} - {first})
    return [first, *(name for name in names if points_of(rows, name) != points_of(rows, first))]


def clip_band(rows: Sequence[Row]) -> tuple[str, tuple[float, ...]]:
    """The clip band in words and as a threshold, where the run has one."""
    for row in rows:
        size, over = (
            correction_metric_name(row, name)
            for name in ("logprob_abs_diff_p50", "mismatch_over_clip")
        )
        if size is not None and over is not None and row[size] and row[over]:
            band = row[size] / row[over]
            return f"; dashed: the clip band, {band:.2g}", (band,)
    return "", ()


def phases(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds by phase over the run; a phase called step or total is the sum of others and left
    out.
    """
    names = sorted({name for row in rows for name in row if name.startswith("timing_s/")})
    sums = {
        name.removeprefix("timing_s/"): sum(value or 0.0 for _, value in points_of(rows, name))
        for name in names
    }
    return {name: seconds for name, seconds in sums.items() if name not in ("step", "total")}
