"""The correction metrics as one figure."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from flowgrpo_rc.records.metrics_file import MetricsFile, Row
from flowgrpo_rc.report.series import series_of

_ESS = "rollout_is_eff_sample_size"
_REJECTED = "rollout_is_veto_fraction rollout_rs_masked_fraction rollout_rs_seq_masked_fraction"
# Panel title, correction metrics, reference lines with what they mean.
_PANELS = (
    ("Mean importance weight", "rollout_is_mean", {1.0: "ideal"}),
    ("Effective sample size", _ESS, {0.5: "good above", 0.3: "warning below"}),
    ("Vetoed and rejected fraction", _REJECTED, {0.1: "warning above"}),
    ("KL divergence", "kl k3_kl", {0.0: "none"}),
    ("Perplexity ratio, training over rollout", "ppl_ratio", {1.0: "ideal"}),
    ("Chi-squared divergence", "chi2_token chi2_seq", {1.0: "warning above"}),
)


def plot_rollout_correction(
    history: Sequence[Row] | Mapping[str, Sequence[float]] | Path | str, path: Path | str
) -> Path:
    """Draws six panels of the correction metrics by step.

    Args:
      history: the rows of a run, the path of its metrics.jsonl, or a list of values for each
        metric, with either prefix. A row without `step` counts by its position.
      path: the file to write; its ending names the format (png, svg, pdf).

    Returns:
      `path`.

    Raises:
      ValueError: no row holds a correction metric.
    """
    from matplotlib.figure import Figure

    rows = [{"step": position, **row} for position, row in enumerate(_history_rows(history))]
    panels = [(title, series_of(rows, names.split()), bounds) for title, names, bounds in _PANELS]
    if not any(series for _, series, _ in panels):
        raise ValueError(
            "plot_rollout_correction: no row of the history holds a rollout_corr/ metric"
        )
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axes, (title, series, bounds) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        for line in series:
            values = [math.nan if y is None else y for _, y in line.points]
            axes.plot([x for x, _ in line.points], values, label=line.name, linewidth=1.8)
        axes.set(title=title, xlabel="step")
        if not series:
            axes.text(0.5, 0.5, "not reported", transform=axes.transAxes, ha="center", color="0.45")
            axes.set(xticks=[], yticks=[])
            continue
        for bound, label in bounds.items():
            color = "tab:red" if label.startswith("warning") else "0.45"
            axes.axhline(bound, color=color, linestyle="--", linewidth=1, label=label)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, edgecolor="none", framealpha=0.85)
    figure.savefig(Path(path), dpi=150)
    return Path(path)


def _history_rows(
    history: Sequence[Row] | Mapping[str, Sequence[float]] | Path | str,
) -> Sequence[Row]:
    if isinstance(history, Path | str):
        return MetricsFile(Path(history)).rows()
    if isinstance(history, Mapping):
        # A list that is shorter than others is filled with gaps.
        rows = zip_longest(*history.values())
        return [dict(zip(history, row, strict=True)) for row in rows]
    return history
