"""A run's folder as one HTML page that needs nothing else, and the correction metrics as one figure.

The page is a function of the folder's files alone: no clock, no network, the same bytes each time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo_rc.training import report_files as files
from flowgrpo_rc.training import report_page as html
from flowgrpo_rc.training.charts import Series, bar_list, line_chart
from flowgrpo_rc.training.health import FAULT, MOST_CLIPPED, correction_metric_name
from flowgrpo_rc.training.tracking import MetricsFile, write_atomic

Row = Mapping[str, Any]

# Chart title, what the health check warns about, its thresholds, the correction metrics drawn.
_CORRECTION_CHARTS: tuple[tuple[str, str, tuple[float, ...], tuple[str, ...]], ...] = (
    (
        "Importance weight",
        "warns outside 0.5 to 2",
        (0.5, 2.0),
        ("rollout_is_mean", "rollout_is_max", "rollout_is_min"),
    ),
    ("Effective sample size", "fraction of the batch; warns below 0.3", (0.3,), ("rollout_is_eff_sample_size",)),
    (
        "Rejected and vetoed",
        "fraction; warns above 0.05 of samples",
        (0.05, 0.1),
        ("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction", "rollout_is_veto_fraction"),
    ),
    ("KL(rollout, training)", "warns beyond 0.1", (-0.1, 0.1), ("kl", "k3_kl")),
    ("Log-perplexity difference", "absolute; warns above 1", (1.0,), ("log_ppl_abs_diff",)),
    ("Chi-squared divergence", "warns above 1", (1.0,), ("chi2_token", "chi2_seq")),
    (
        "Clipped by noise before any update",
        f"fraction; warns above {MOST_CLIPPED:g}",
        (MOST_CLIPPED,),
        ("pre_update_clip_fraction",),
    ),
    (
        "Mismatch over what the precisions explain",
        f"above {FAULT:g} it is a fault",
        (FAULT,),
        ("mismatch_over_expected",),
    ),
)
_UPDATE_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Policy loss", ("actor/pg_loss",)),
    ("Clipped fraction", ("actor/clip_fraction", "actor/clip_fraction_higher", "actor/clip_fraction_lower")),
    ("Standard deviation of the ratio", ("actor/ratio_std",)),
    ("KL to the reference", ("actor/kl_loss",)),
    ("Gradient norm", ("actor/grad_norm",)),
    ("Learning rate", ("actor/lr",)),
)
# Panel title, correction metrics, reference lines with what they mean.
_PANELS: tuple[tuple[str, tuple[str, ...], tuple[tuple[float, str], ...]], ...] = (
    ("Mean importance weight", ("rollout_is_mean",), ((1.0, "ideal"),)),
    ("Effective sample size", ("rollout_is_eff_sample_size",), ((0.5, "good above"), (0.3, "warning below"))),
    (
        "Vetoed and rejected fraction",
        ("rollout_is_veto_fraction", "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"),
        ((0.1, "warning above"),),
    ),
    ("KL divergence", ("kl", "k3_kl"), ((0.0, "none"),)),
    ("Perplexity ratio, training over rollout", ("ppl_ratio",), ((1.0, "ideal"),)),
    ("Chi-squared divergence", ("chi2_token", "chi2_seq"), ((1.0, "warning above"),)),
)
_RESPONSE_CHARTS = (
    ("Response length, tokens", ("response/length_mean", "response/length_max")),
    ("Responses cut at the limit, or empty", ("response/limit_fraction", "response/empty_fraction")),
)
_FLOOR = (*(f"logprob_abs_diff_{part}" for part in ("p50", "mean", "p99")), "policy_drift_abs_mean")
_TIMESTEP = re.compile(r"(?:.*/)?logprob_abs_diff/ts_(\d+)")


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run's folder, finished or not, and returns its path.

    Raises ValueError where the folder holds no metrics.jsonl.
    """
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    if not metrics.path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: it has no metrics.jsonl")
    rows = metrics.rows()
    config = files.config(run_dir)
    sections = (
        html.section("summary", "Summary", _summary(rows)),
        html.section("reward", "Reward", _reward(rows)),
        html.section("samples", "Samples before and after", files.samples(run_dir)),
        html.section("health", "Health warnings", files.health(run_dir)),
        html.section("correction", "Rollout correction by step", _correction(rows)),
        html.section("timesteps", "Log-probability difference by timestep", _timesteps(rows)),
        html.section("update", "Policy update", _update(rows)),
        html.section("timing", "Time by phase", _timing(rows)),
        html.section("config", "Configuration", files.config_text(config)),
        html.section("environment", "Environment", files.environment(run_dir)),
        html.section("checkpoints", "Checkpoints and weights", files.checkpoints(run_dir)),
    )
    trainer = config.get("trainer", {})
    title = str(trainer.get("experiment_name") or run_dir.resolve().name)
    page = html.page(title, html.header(title, *_outcome(rows, trainer.get("total_training_steps"))), sections)
    path = run_dir / "report.html"
    write_atomic(path, page.encode())
    return path


def plot_rollout_correction(
    history: Sequence[Row] | Mapping[str, Sequence[float]] | Path | str, path: Path | str
) -> Path:
    """Draws six panels of the correction metrics by step into `path`, whose ending names the format (png, svg, pdf).

    history: the rows of a run, the path of its metrics.jsonl, or a list of values for each metric; either prefix. A row
        without `step` counts by its position. Raises ValueError where no row holds a correction metric.
    """
    from matplotlib.figure import Figure

    rows = [{"step": position, **row} for position, row in enumerate(_history_rows(history))]
    if not any(_correction_series(rows, names) for _, names, _ in _PANELS):
        raise ValueError("plot_rollout_correction: no row of the history holds a rollout_corr/ metric")
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axes, (title, names, bounds) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        series = _correction_series(rows, names)
        for line in series:
            values = [math.nan if y is None else y for _, y in line.points]
            axes.plot([x for x, _ in line.points], values, label=line.name, linewidth=1.8)
        axes.set(title=title, xlabel="step")
        if not series:
            axes.text(0.5, 0.5, "not reported", transform=axes.transAxes, ha="center", color="0.45")
            axes.set(xticks=[], yticks=[])
            continue
        for bound, label in bounds:
            color = "tab:red" if label.startswith("warning") else "0.45"
            axes.axhline(bound, color=color, linestyle="--", linewidth=1, label=label)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, edgecolor="none", framealpha=0.85)
    figure.savefig(Path(path), dpi=150)
    return Path(path)


def _history_rows(history: Sequence[Row] | Mapping[str, Sequence[float]] | Path | str) -> Sequence[Row]:
    if isinstance(history, Path | str):
        return MetricsFile(Path(history)).rows()
    if isinstance(history, Mapping):
        length = max((len(values) for values in history.values()), default=0)
        return [{name: values[i] for name, values in history.items() if i < len(values)} for i in range(length)]
    return history


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _series(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """The metrics that some row has; null stays as a gap."""
    found = [Series(name=name, points=_points(rows, name)) for name in names]
    return [series for series in found if series.points]


def _correction_series(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """As `_series`, for correction metrics of either mode, named without their prefix."""
    found = []
    for name in names:
        full = [(row["step"], correction_metric_name(row, name), row) for row in rows]
        found.append(Series(name=name, points=[(step, row[key]) for step, key, row in full if key is not None]))
    return [series for series in found if series.points]


def _ends(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """First and last finite value."""
    values = [value for _, value in _points(rows, name) if value is not None]
    return (values[0], values[-1]) if values else None


def _change(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4f} \u2192 {ends[1]:.4f} ({ends[1] - ends[0]:+.4f})"


def _outcome(rows: Sequence[Row], total_steps: int | None) -> tuple[str, str]:
    """The result in one sentence, and how far the run came."""
    steps = rows[-1]["step"] if rows else 0
    progress = f"Training steps: {steps}" + ("" if total_steps in (None, steps) else f" of {total_steps}")
    evaluations = [value for _, value in _points(rows, "val/reward") if value is not None]
    if len(evaluations) > 1:
        return f"Held-out reward {_change((evaluations[0], evaluations[-1]))}", progress
    held_out = f"Held-out reward {evaluations[0]:.4f}, evaluated once" if evaluations else "Not evaluated yet"
    trained = _ends(rows, "reward/mean")
    return held_out + (f"; training reward {_change(trained)}" if trained else ""), progress


def _summary(rows: Sequence[Row]) -> str:
    names = _distinct(rows, "val/", "val/reward")
    values = [(name.removeprefix("val/"), _ends(rows, name)) for name in names]
    tiles = [
        (f"held-out {name}", f"{ends[0]:.3f} \u2192 {ends[1]:.3f}" if ends[0] != ends[1] else f"{ends[1]:.3f}")
        for name, ends in values
        if ends is not None
    ]
    speeds = [value for _, value in _points(rows, "perf/samples_per_second") if value is not None]
    memory = [value for _, value in _points(rows, "perf/peak_memory_gib") if value is not None]
    seconds = sum(_phases(rows).values()) if rows else 0.0
    tiles += [("training samples per second", f"{sum(speeds) / len(speeds):.1f}")] if speeds else []
    tiles += [("peak memory, GiB", f"{max(memory):.2f}")] if memory else []
    tiles += [("measured time", _duration(seconds))] if seconds else []
    return html.tiles(tiles) if tiles else html.empty("No metrics yet.")


def _reward(rows: Sequence[Row]) -> str:
    series = _series(rows, ("reward/mean", "val/reward"))
    names = {"reward/mean": "training", "val/reward": "held-out"}
    renamed = [Series(name=names[line.name], points=line.points) for line in series]
    parts = _distinct(rows, "reward/", "reward/mean")[1:]
    charts = [line_chart(name, _series(rows, (name,))) for name in parts]
    charts += [line_chart(title, found) for title, keys in _RESPONSE_CHARTS if (found := _series(rows, keys))]
    return html.wide(line_chart("Mean reward", renamed)) + html.grid(charts)


def _distinct(rows: Sequence[Row], prefix: str, first: str) -> list[str]:
    """`first`, then the other names below `prefix` except repetitions of it (a run with one reward has them)."""
    names = sorted({name for row in rows for name in row if name.startswith(prefix)} - {first})
    return [first, *(name for name in names if _points(rows, name) != _points(rows, first))]


def _correction(rows: Sequence[Row]) -> str:
    charts = [
        line_chart(title, series, note=note, thresholds=bounds)
        for title, note, bounds, names in _CORRECTION_CHARTS
        if (series := _correction_series(rows, names))
    ]
    if differences := _correction_series(rows, _FLOOR):
        words, band = _band(rows)
        note = f"log-probability difference before the first update, and the policy's own movement after it{words}"
        charts.append(line_chart("Noise floor", differences, note=note, log_y=True, thresholds=band))
    return html.grid(charts) if charts else html.empty("The run reports no rollout-correction metrics.")


def _band(rows: Sequence[Row]) -> tuple[str, tuple[float, ...]]:
    """The clip band in words and as a threshold, where the run has one."""
    for row in rows:
        size, over = (correction_metric_name(row, name) for name in ("logprob_abs_diff_p50", "mismatch_over_clip"))
        if size is not None and over is not None and row[size] and row[over]:
            band = row[size] / row[over]
            return f"; dashed: the clip band, {band:.2g}", (band,)
    return "", ()


def _timesteps(rows: Sequence[Row]) -> str:
    values: dict[int, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if (match := _TIMESTEP.fullmatch(name)) and value is not None:
                values.setdefault(int(match[1]), []).append(value)
    if not values:
        return html.empty("The run reports no difference by timestep.")
    if not any(max(found) > 0 for found in values.values()):
        return html.empty("The difference is exactly zero at every timestep.")
    mean = Series(name="mean over steps", points=[(t, sum(found) / len(found)) for t, found in sorted(values.items())])
    worst = Series(name="largest step", points=[(t, max(found)) for t, found in sorted(values.items())])
    words, band = _band(rows)
    note = f"absolute, rollout against training, before the first update; 1000 is pure noise{words}"
    chart = line_chart(
        "Difference by timestep", [mean, worst], note=note, x_name="timestep", log_y=True, thresholds=band
    )
    return html.wide(chart)


def _update(rows: Sequence[Row]) -> str:
    charts = [line_chart(title, series) for title, names in _UPDATE_CHARTS if (series := _series(rows, names))]
    return html.grid(charts) if charts else html.empty("No update yet.")


def _phases(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds by phase over the run; a phase called step or total is the sum of others and left out."""
    names = sorted({name for row in rows for name in row if name.startswith("timing_s/")})
    sums = {name.removeprefix("timing_s/"): sum(value or 0.0 for _, value in _points(rows, name)) for name in names}
    return {name: seconds for name, seconds in sums.items() if name not in ("step", "total")}


def _timing(rows: Sequence[Row]) -> str:
    phases = sorted(_phases(rows).items(), key=lambda phase: -phase[1])
    total = sum(seconds for _, seconds in phases)
    if not total:
        return html.empty("No timings yet.")
    bars = [(name, seconds, f"{_duration(seconds)}, {seconds / total:.0%}") for name, seconds in phases]
    return bar_list(bars)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
