"""The report's charts about rollout correction: curves, timesteps, rejected samples."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo_rc.monitoring.health_rules import FAULT, MOST_CLIPPED
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.rejected import in_words
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.series import Row, charts_of, clip_band, series_of

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
_MAX_CARDS = 12


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
    found = _by_step(rows)
    means = mean_by_timestep(rows)
    if not means:
        return "The run reports no difference by timestep."
    points = [(t, max(here[t] for here in found.values() if t in here)) for t, _ in means]
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
    found: dict[int, list[float]] = {}
    for here in _by_step(rows).values():
        for t, value in here.items():
            found.setdefault(t, []).append(value)
    return [(t, sum(values) / len(values)) for t, values in sorted(found.items())]


def _by_step(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            match = _TIMESTEP.fullmatch(name)
            if match is not None and value is not None:
                found.setdefault(row["step"], {})[int(match[1])] = value
    return found


def rejected(run_dir: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the largest difference of each step's rejected samples, and the newest of these."""
    file = MetricsFile(run_dir / "rejected.jsonl")
    largest: dict[str, dict[int, float | None]] = {}
    with blaming(file.path):
        found = file.rows()
        for row in found:
            first = row["reasons"][0]["criterion"] if row["reasons"] else "rejected"
            by_step = largest.setdefault(str(first), {})
            size = None if row["log_ratio"] is None else abs(float(row["log_ratio"]))
            by_step[row["step"]] = max(size, by_step.get(row["step"]), key=lambda one: one or 0.0)
        cards = [_card(run_dir, row) for row in found[-_MAX_CARDS:]]
    words, band = clip_band(rows)
    chart = Chart(
        title="Largest rejected difference",
        series=[Series(name=name, points=list(by.items())) for name, by in largest.items()],
        note=f"|log-ratio| of the worst rejected sample of a step, by criterion{words}",
        log_y=True,
        thresholds=band,
        word="rejection",
    )
    return {"chart": chart, "cards": cards, "total": len(found)}


def _card(run_dir: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    where = f"timestep {row['timestep']}" if "timestep" in row else f"token {row['position']}"
    lines = [in_words(reason) for reason in row["reasons"]]
    for name, value in (("log-ratio", row["log_ratio"]), ("reward", row["reward"])):
        lines += [] if value is None else [f"{name} {value:.3g}"]
    # Only the name, so that no page shows a file from elsewhere.
    picture = run_dir / "rejected" / Path(row.get("picture") or "none").name
    return {
        "heading": f"Step {row['step']}, {where}",
        "lines": lines,
        "texts": [text for text in (row["prompt"], row.get("text")) if text],
        "picture": picture.read_bytes() if picture.is_file() else None,
    }
