"""The report's sections about rollout correction: curves, timesteps, histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flowgrpo_rc.monitoring.health import FAULT, MOST_CLIPPED
from flowgrpo_rc.monitoring.histograms import LAST, bin_edges
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.records.metrics_file import LAST_STEP, MetricsFile
from flowgrpo_rc.report import html
from flowgrpo_rc.report.axes import linear_axis, tick_labels
from flowgrpo_rc.report.charts import Chart, Series, draw, gallery
from flowgrpo_rc.report.heat_map import columns_by_step, extent, heat_map, spread_counts
from flowgrpo_rc.report.series import Row, clip_band, correction_series

# Chart title, its word, what the health check warns about, its thresholds, the metrics drawn.
_CORRECTION_CHARTS: tuple[tuple[str, str, str, tuple[float, ...], tuple[str, ...]], ...] = (
    (
        "Importance weight",
        "weight",
        "warns outside 0.5 to 2",
        (0.5, 2.0),
        ("rollout_is_mean", "rollout_is_max", "rollout_is_min"),
    ),
    (
        "Effective sample size",
        "ess",
        "fraction of the batch; warns below 0.3",
        (0.3,),
        ("rollout_is_eff_sample_size",),
    ),
    (
        "Rejected and vetoed",
        "rejection",
        "fraction; warns above 0.05 of samples",
        (0.05, 0.1),
        (
            "rollout_rs_masked_fraction",
            "rollout_rs_seq_masked_fraction",
            "rollout_is_veto_fraction",
        ),
    ),
    ("KL(rollout, training)", "kl", "warns beyond 0.1", (-0.1, 0.1), ("kl", "k3_kl")),
    (
        "Log-perplexity difference",
        "mismatch",
        "absolute; warns above 1",
        (1.0,),
        ("log_ppl_abs_diff",),
    ),
    ("Chi-squared divergence", "chi2", "warns above 1", (1.0,), ("chi2_token", "chi2_seq")),
    (
        "Clipped by noise before any update",
        "clip",
        f"fraction; warns above {MOST_CLIPPED:g}",
        (MOST_CLIPPED,),
        ("pre_update_clip_fraction",),
    ),
    (
        "Mismatch over what the precisions explain",
        "mismatch",
        f"above {FAULT:g} it is a fault",
        (FAULT,),
        ("mismatch_over_expected",),
    ),
)
_MISMATCH = (
    "logprob_abs_diff_p50",
    "logprob_abs_diff_mean",
    "logprob_abs_diff_p99",
    "policy_drift_abs_mean",
)
_HISTOGRAMS = {
    "log_ratio": (
        "Log-ratio, training over rollout",
        "each SDE step or token, before the first update of a training step; the range holds 99% "
        "of all",
    ),
    "log_weight": (
        "Logarithm of the weights in the loss",
        "of the steps that are kept, before the first update; 0 is a weight of 1; the range holds "
        "99% of all",
    ),
}
_ROWS = 41  # of a histogram's map; an odd number, so that one row is around zero
_TIMESTEP = re.compile(r"(?:.*/)?logprob_abs_diff/ts_(\d+)")


def curves(rows: Sequence[Row]) -> str:
    """Draws the correction metrics by step, with the thresholds of the health check."""
    charts = [
        Chart(title=title, series=series, note=note, thresholds=bounds, word=word)
        for title, word, note, bounds, names in _CORRECTION_CHARTS
        if (series := correction_series(rows, names))
    ]
    if differences := correction_series(rows, _MISMATCH):
        words, band = clip_band(rows)
        note = (
            "log-probability difference before the first update, and the policy's own movement "
            f"after it{words}"
        )
        floor = Chart(
            title="Noise floor",
            series=differences,
            note=note,
            log_y=True,
            thresholds=band,
            word="mismatch",
        )
        charts.insert(0, floor)
    return (
        gallery(charts) if charts else html.empty("The run reports no rollout-correction metrics.")
    )


def timesteps(rows: Sequence[Row]) -> str:
    """Draws the difference by timestep: over the whole run, and step by step."""
    found = _by_step(rows)
    mean = Series(name="mean over steps", points=mean_by_timestep(rows))
    levels = [int(t) for t, _ in mean.points]
    if not levels:
        return html.empty("The run reports no difference by timestep.")
    points = [(t, max(here[t] for here in found.values() if t in here)) for t in levels]
    if not any(value > 0 for _, value in points):
        return html.empty("The difference is exactly zero at every timestep.")
    worst = Series(name="largest step", points=points)
    words, band = clip_band(rows)
    note = f"absolute, rollout against training, before the first update{words}"
    chart = Chart(
        title="Difference by timestep",
        series=[mean, worst],
        note=note,
        x_name="timestep",
        log_y=True,
        thresholds=band,
        word="timestep",
    )
    table = {
        step: np.array([here.get(t, math.nan) for t in reversed(levels)])
        for step, here in found.items()
    }
    every = math.ceil(len(levels) / 10)  # at most ten labels
    ticks = [
        ((row + 0.5) / len(levels), str(t)) for row, t in enumerate(levels) if row % every == 0
    ]
    heat = heat_map(
        "Difference by step and timestep",
        columns_by_step(table),
        min(table),
        ticks,
        note="rows: timesteps; empty where no sample was trained there",
        unit="mean |difference|",
        log=True,
    )
    return html.pair([html.wide(draw(chart)), html.wide(heat)])


def mean_by_timestep(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Returns each timestep with its |difference|, averaged over training steps."""
    found: dict[int, list[float]] = {}
    for here in _by_step(rows).values():
        for t, value in here.items():
            found.setdefault(t, []).append(value)
    return [(t, sum(values) / len(values)) for t, values in sorted(found.items())]


def _by_step(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    return {row["step"]: here for row in rows if (here := _by_timestep(row))}


def _by_timestep(row: Row) -> dict[int, float]:
    matches = ((_TIMESTEP.fullmatch(name), value) for name, value in row.items())
    return {
        int(match[1]): value for match, value in matches if match is not None and value is not None
    }


def histograms(run_dir: Path, rows: Sequence[Row]) -> str:
    """Draws the histograms of log-ratios and weights, step by step."""
    file = MetricsFile(run_dir / "histograms.jsonl")
    with blaming(file.path):
        found = {name: _counts(file.rows(), name) for name in _HISTOGRAMS}
    _, band = clip_band(rows)
    charts = []
    for name, (title, note) in _HISTOGRAMS.items():
        counts = found[name]
        if counts:
            charts.append(_histogram(title, note, counts, band if name == "log_ratio" else ()))
    return html.pair(charts) if charts else html.empty("The run has counted none.")


def _counts(rows: Sequence[Row], name: str) -> dict[int, dict[int, int]]:
    """Returns the counts of a histogram by step and bin; ValueError if there are no such bins."""
    counts = {
        row["step"]: {int(bin): int(count) for bin, count in row[name].items()}
        for row in rows
        if row.get(name)
    }
    if any(not 0 <= step <= LAST_STEP for step in counts):
        raise ValueError(f"a step is not in 0 to {LAST_STEP}")
    if any(abs(bin) > LAST or count < 1 for here in counts.values() for bin, count in here.items()):
        raise ValueError(f"{name} has a bin beyond {LAST}, or an empty one")
    return counts


def _histogram(
    title: str, note: str, counts: Mapping[int, Mapping[int, int]], band: Sequence[float]
) -> str:
    size = extent(list(counts.values()), bin_edges)
    limits = np.linspace(-size, size, _ROWS + 1)
    shares = {step: spread_counts(here, bin_edges, limits)[::-1] for step, here in counts.items()}
    axis = linear_axis([-size, size], tight=True)
    labels = tick_labels(axis)
    ticks = [(axis.place(tick), label) for tick, label in zip(axis.ticks, labels, strict=True)]
    lines = [axis.place(bound) for size in band for bound in (-size, size)]
    if any(0 < line < 1 for line in lines):
        note += "; dashed: the clip band"
    chart = heat_map(
        title,
        columns_by_step(shares),
        min(shares),
        ticks,
        note=note,
        unit="share",
        thresholds=lines,
    )
    return html.wide(chart)
