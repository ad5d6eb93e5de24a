"""Rows of metrics.jsonl as series, for the report and for figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo_rc.monitoring.health import correction_metric_name
from flowgrpo_rc.report.charts import Series

Row = Mapping[str, Any]


def points_of(rows: Sequence[Row], name: str) -> list[tuple[float, float | None]]:
    """Returns (step, value) of a metric, for each row that has it."""
    return [(row["step"], row[name]) for row in rows if name in row]


def series_of(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """Returns a series for each metric that some row has; null stays as a gap."""
    found = [Series(name=name, points=points_of(rows, name)) for name in names]
    return [series for series in found if series.points]


def correction_series(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """Returns a series for each correction metric, in either mode, by its name without prefix."""
    found = []
    for name in names:
        keys = [correction_metric_name(row, name) for row in rows]
        points = [
            (row["step"], row[key]) for row, key in zip(rows, keys, strict=True) if key is not None
        ]
        found.append(Series(name=name, points=points))
    return [series for series in found if series.points]


def ends(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Returns the first and the last finite value of a metric; None if there is none."""
    values = [value for _, value in points_of(rows, name) if value is not None]
    return (values[0], values[-1]) if values else None


def change(ends: tuple[float, float]) -> str:
    """Returns a first and a last value in words, with their difference."""
    return f"{ends[0]:.4f} \u2192 {ends[1]:.4f} ({ends[1] - ends[0]:+.4f})"


def distinct(rows: Sequence[Row], prefix: str, first: str) -> list[str]:
    """Returns `first` and the other names below `prefix` that do not repeat its values.

    A run with one reward reports that reward's values twice.

    Args:
      rows: the rows of metrics.jsonl.
      prefix: beginning of the names.
      first: the metric that comes first.
    """
    others = [name for name in _names(rows, prefix) if name != first]
    return [first, *(name for name in others if points_of(rows, name) != points_of(rows, first))]


def clip_band(rows: Sequence[Row]) -> tuple[str, tuple[float, ...]]:
    """Returns the clip band in words and as a threshold, or nothing if the run reports none."""
    for row in rows:
        size = correction_metric_name(row, "logprob_abs_diff_p50")
        over = correction_metric_name(row, "mismatch_over_clip")
        if size is not None and over is not None and row[size] and row[over]:
            # The second metric is the first over the band.
            band = row[size] / row[over]
            return f"; dashed: the clip band, {band:.2g}", (band,)
    return "", ()


def phases(rows: Sequence[Row]) -> dict[str, float]:
    """Returns seconds by phase over the run, without `step` and `total`, which sum up others."""
    sums = {
        name.removeprefix("timing_s/"): sum(value or 0.0 for _, value in points_of(rows, name))
        for name in _names(rows, "timing_s/")
    }
    return {name: seconds for name, seconds in sums.items() if name not in ("step", "total")}


def _names(rows: Sequence[Row], prefix: str) -> list[str]:
    """Returns the names below a prefix that some row has, sorted."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if name.startswith(prefix))
