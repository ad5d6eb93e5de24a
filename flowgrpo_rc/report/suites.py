"""What the report shows of suites: base model and LoRA side by side, and the change by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo_rc.evaluation.intervals import Estimate, PolicyComparison
from flowgrpo_rc.records.suite_files import BASE, TUNED, read_suite_results, sample_stem
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.folder import side_by_side
from flowgrpo_rc.report.series import Row, points_of

_LABELS = {BASE: "base model", TUNED: "with LoRA"}
_CHANGE = "/change"
_PREFIX = "suite/"
# Metric of a chart's line, by the line's name.
_LINES = {"change": "", "interval, low": "_low", "interval, high": "_high"}


def results(run_dir: Path) -> list[dict[str, Any]]:
    """Returns title, rows and samples of each suite that was evaluated."""
    folder = run_dir / "suites"
    found = []
    for result in read_suite_results(folder):
        title = (
            f"Suite {result.name}: {result.prompts} prompts, {result.seeds} samples of each, the "
            "same noises for both. Intervals of 95% over prompts."
        )
        comparisons = [*result.comparisons.items(), *result.groups.items()]
        rows = [_row(name, comparison) for name, comparison in comparisons]
        samples = _samples(folder, result.name)
        found.append({"title": title, "rows": rows, "samples": samples})
    return found


def curves(rows: Sequence[Row]) -> list[Chart]:
    """Returns the change to the base model over the training, a chart for each suite."""
    names = {name for row in rows for name in row if name.startswith(_PREFIX)}
    return [
        Chart(
            title=f"{name.removeprefix(_PREFIX).removesuffix(_CHANGE)}: change to the base model",
            series=[
                Series(name=line, points=points_of(rows, name + ending))
                for line, ending in _LINES.items()
            ],
            note="dashed: no change; the interval is one of 95% over prompts",
            thresholds=(0.0,),
            word="suite",
        )
        for name in sorted(names)
        if name.endswith(_CHANGE)
    ]


def _row(name: str, found: PolicyComparison) -> list[str]:
    change = found.change
    # On which side of zero the whole interval lies.
    verdict = "lower" if change.high < 0 else "higher" if change.low > 0 else ""
    return [
        name,
        str(found.num_prompts),
        _with_interval(found.base),
        _with_interval(found.tuned),
        f"{change.mean:+.4f}",
        f"{change.low:+.4f} to {change.high:+.4f}",
        verdict,
    ]


def _with_interval(estimate: Estimate) -> str:
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.mean:.4f}" if math.isnan(half) else f"{estimate.mean:.4f} \u00b1 {half:.4f}"


def _samples(folder: Path, name: str) -> dict[str, Any]:
    stems = [(label, sample_stem(folder, name, policy)) for policy, label in _LABELS.items()]
    for ending in (".png", ".jsonl"):
        files = [(label, stem.with_suffix(ending)) for label, stem in stems]
        if all(path.is_file() for _, path in files):
            return side_by_side(files)
    return {}
