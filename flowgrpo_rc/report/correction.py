"""The report's charts about rollout correction: curves, timesteps, rejected samples."""

import re
from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rc.monitoring.health_rules import FAULT, MOST_CLIPPED
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.records.metrics_file import MetricsFile, Row
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.series import charts_of, clip_band, series_of

# Title, its word, what the health check warns about, its thresholds, the metrics drawn.
_CHARTS = f"""
Importance weight | weight | warns outside 0.5 to 2 | 0.5 2.0 \
    | rollout_is_mean rollout_is_max rollout_is_min
Effective sample size | ess | fraction of the batch; warns below 0.3 | 0.3 \
    | rollout_is_eff_sample_size
Rejected and vetoed | rejection | fraction; warns above 0.05 of samples | 0.05 0.1 \
    | rollout_rs_masked_fraction rollout_rs_seq_masked_fraction rollout_is_veto_fraction
KL(rollout, training) | kl | warns beyond 0.1 | -0.1 0.1 | kl k3_kl
Log-perplexity difference | mismatch | absolute; warns above 1 | 1.0 | log_ppl_abs_diff
Chi-squared divergence | chi2 | warns above 1 | 1.0 | chi2_token chi2_seq
Clipped by noise before any update | clip | fraction; warns above {MOST_CLIPPED:g} \
    | {MOST_CLIPPED} | pre_update_clip_fraction
Mismatch over what the precisions explain | mismatch | above {FAULT:g} it is a fault | {FAULT} \
    | mismatch_over_expected
"""
_MISMATCH = (
    "logprob_abs_diff_p50",
    "logprob_abs_diff_mean",
    "logprob_abs_diff_p99",
    "policy_drift_abs_mean",
)
_TIMESTEP = re.compile(r"(?:.*/)?logprob_abs_diff/ts_(\d+)")


def curves(rows: Sequence[Row]) -> list[Chart]:
    """Returns the correction metrics by step, with the thresholds of the health check."""
    charts = charts_of(_CHARTS, rows)
    if differences := series_of(rows, _MISMATCH):
        words, band = clip_band(rows)
        floor = Chart(
            title="Noise floor",
            series=differences,
            note="log-probability difference before the first update, and the policy's own "
            f"movement after it{words}",
            log_y=True,
            thresholds=band,
            word="mismatch",
        )
        charts.insert(0, floor)
    return charts


def timesteps(rows: Sequence[Row]) -> Chart | str:
    """Returns the difference by timestep over the whole run; or why there is none."""
    differences = _by_step(rows)
    means = mean_by_timestep(rows)
    if not means:
        return "The run reports no difference by timestep."
    points = [
        (t, max(by_timestep[t] for by_timestep in differences.values() if t in by_timestep))
        for t, _ in means
    ]
    if not any(value > 0 for _, value in points):
        return "The difference is exactly zero at every timestep."
    words, band = clip_band(rows)
    lines = {"mean over steps": means, "largest step": points}
    series = [Series(name=name, points=line) for name, line in lines.items()]
    note = f"absolute, rollout against training, before the first update{words}"
    return timestep_chart(series, note, band)


def timestep_chart(series: Sequence[Series], note: str, band: Sequence[float] = ()) -> Chart:
    """Returns the chart of differences over timesteps."""
    return Chart(
        title="Difference by timestep",
        series=series,
        note=note,
        x_name="timestep",
        log_y=True,
        thresholds=band,
        word="timestep",
    )


def mean_by_timestep(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Returns each timestep with its |difference|, averaged over training steps."""
    values_at: dict[int, list[float]] = {}
    for by_timestep in _by_step(rows).values():
        for t, value in by_timestep.items():
            values_at.setdefault(t, []).append(value)
    return [(t, sum(values) / len(values)) for t, values in sorted(values_at.items())]


def _by_step(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    differences: dict[int, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            match = _TIMESTEP.fullmatch(name)
            if match is not None and value is not None:
                differences.setdefault(row["step"], {})[int(match[1])] = value
    return differences


def rejected(run_dir: Path, rows: Sequence[Row]) -> Chart | None:
    """Returns the largest difference of each step's rejected samples; None without any."""
    file = MetricsFile(run_dir / "rejected.jsonl")
    largest: dict[str, dict[int, float | None]] = {}
    with blaming(file.path):
        for row in file.rows():
            criterion = row["reasons"][0]["criterion"] if row["reasons"] else "rejected"
            by_step = largest.setdefault(str(criterion), {})
            size = None if row["log_ratio"] is None else abs(float(row["log_ratio"]))
            by_step[row["step"]] = max(size, by_step.get(row["step"]), key=lambda y: y or 0.0)
    if not largest:
        return None
    words, band = clip_band(rows)
    return Chart(
        title="Largest rejected difference",
        series=[Series(name=name, points=list(by.items())) for name, by in largest.items()],
        note=f"|log-ratio| of the worst rejected sample of a step, by criterion{words}",
        log_y=True,
        thresholds=band,
        word="rejection",
    )
