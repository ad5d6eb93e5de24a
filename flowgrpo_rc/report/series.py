"""Rows of metrics.jsonl as series and charts, for the report and for figures."""

from collections.abc import Sequence

from flowgrpo_rc.monitoring.health import correction_metric_name
from flowgrpo_rc.records.metrics_file import Row
from flowgrpo_rc.report.charts import Chart, Points, Series, known


def points_of(rows: Sequence[Row], name: str) -> Points:
    """Returns (step, value) of a metric, for each row that has it.

    A name without a slash is one of the correction's.
    """
    if "/" in name:
        return [(row["step"], row[name]) for row in rows if name in row]
    keys = [correction_metric_name(row, name) for row in rows]  # their prefix tells the mode
    return [(row["step"], row[key]) for row, key in zip(rows, keys, strict=True) if key is not None]


def series_of(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """Returns a series for each metric that some row has; null stays as a gap."""
    lines = [Series(name=name, points=points_of(rows, name)) for name in names]
    return [series for series in lines if series.points]


def charts_of(table: str, rows: Sequence[Row]) -> list[Chart]:
    """Returns the charts of a table (title | word | note | thresholds | metrics) that have data."""
    charts = []
    for line in table.strip().splitlines():
        title, word, note, thresholds, names = (cell.strip() for cell in line.split("|"))
        if series := series_of(rows, names.split()):
            bounds = tuple(map(float, thresholds.split()))
            charts.append(
                Chart(title=title, series=series, note=note, thresholds=bounds, word=word)
            )
    return charts


def ends(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Returns the first and the last finite value of a metric; None if there is none."""
    values = known(points_of(rows, name))
    return (values[0], values[-1]) if values else None


def distinct(rows: Sequence[Row], prefix: str, first: str) -> list[str]:
    """Returns `first` and the other names below `prefix` that do not repeat its values.

    A run with one reward reports that reward's values twice.
    """
    names = [name for name in names_below(rows, prefix) if name != first]
    return [first, *(name for name in names if points_of(rows, name) != points_of(rows, first))]


def clip_band(rows: Sequence[Row]) -> tuple[str, tuple[float, ...]]:
    """Returns the clip band in words and as a threshold, or nothing if the run reports none."""
    for row in rows:
        size = correction_metric_name(row, "logprob_abs_diff_p50")
        over = correction_metric_name(row, "mismatch_over_clip")
        if size is not None and over is not None and row[size] and row[over]:
            # The second metric is the first over the band.
            band = row[size] / row[over]
            return f"; the clip band is {band:.2g}", (band,)
    return "", ()


def phases(rows: Sequence[Row]) -> dict[str, float]:
    """Returns seconds by phase over the run, without `step` and `total`, which sum up others."""
    sums = {
        name.removeprefix("timing_s/"): sum(value or 0.0 for _, value in points_of(rows, name))
        for name in names_below(rows, "timing_s/")
    }
    return {name: seconds for name, seconds in sums.items() if name not in ("step", "total")}


def names_below(rows: Sequence[Row], prefix: str) -> list[str]:
    """Returns the names below a prefix that some row has, sorted."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if name.startswith(prefix))
