"""What the report shows of suites: base model and LoRA side by side, and the change by step."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowgrpo_rc.evaluation.intervals import Estimate, PolicyComparison
from flowgrpo_rc.records.metrics_file import Row
from flowgrpo_rc.records.suite_files import BASE, TUNED, read_suite_results, sample_stem
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.folder import Samples, side_by_side
from flowgrpo_rc.report.series import names_below, points_of

_LABELS = {BASE: "base model", TUNED: "with LoRA"}
_CHANGE = "/change"
_PREFIX = "suite/"
# Name of a chart's line, and how the metric of it ends.
_LINES = (("change", ""), ("interval, low", "_low"), ("interval, high", "_high"))


def results(run_dir: Path) -> list[dict[str, object]]:
    """Returns each suite that was evaluated, with the rows of its table and its samples."""
    folder = run_dir / "suites"
    return [
        {
            "result": result,
            "rows": [_row(*item) for item in (*result.comparisons.items(), *result.groups.items())],
            "samples": _samples(folder, result.name),
        }
        for result in read_suite_results(folder)
    ]


def curves(rows: Sequence[Row], protocols: Mapping[str, str]) -> list[Chart]:
    """Returns the change to the base model over the training, a chart for each suite.

    `protocols` are those of the suites, by name.
    """
    charts = []
    for name in names_below(rows, _PREFIX):
        if name.endswith(_CHANGE):
            suite = name.removeprefix(_PREFIX).removesuffix(_CHANGE)
            lines = [Series(name=line, points=points_of(rows, name + e)) for line, e in _LINES]
            note = "0 is no change; the interval is one of 95% over prompts"
            if suite in protocols:
                note += f"; protocol {protocols[suite]}"
            title = f"{suite}: change to the base model"
            chart = Chart(title=title, series=lines, note=note, thresholds=(0.0,), word="suite")
            charts.append(chart)
    return charts


def _row(name: str, comparison: PolicyComparison) -> list[str]:
    change = comparison.change
    # On which side of zero the whole interval lies.
    verdict = "lower" if change.high < 0 else "higher" if change.low > 0 else ""
    return [
        name,
        str(comparison.num_prompts),
        _with_interval(comparison.base),
        _with_interval(comparison.tuned),
        f"{change.mean:+.4f}",
        f"{change.low:+.4f} to {change.high:+.4f}",
        verdict,
    ]


def _with_interval(estimate: Estimate) -> str:
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.mean:.4f}" + ("" if math.isnan(half) else f" \u00b1 {half:.4f}")


def _samples(folder: Path, name: str) -> Samples:
    stems = [(label, sample_stem(folder, name, policy)) for policy, label in _LABELS.items()]
    for ending in (".png", ".jsonl"):
        files = [(label, stem.with_suffix(ending)) for label, stem in stems]
        if all(path.is_file() for _, path in files):
            return side_by_side(files)
    return {}
