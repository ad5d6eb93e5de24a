"""The section about suites: base model and LoRA side by side, and the change over the training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowgrpo_rc.evaluation.intervals import Estimate, PolicyComparison
from flowgrpo_rc.records.suite_files import (
    BASE,
    TUNED,
    StoredResult,
    read_suite_results,
    sample_stem,
)
from flowgrpo_rc.report import html
from flowgrpo_rc.report.charts import Chart, Series, gallery
from flowgrpo_rc.report.sections import pictures, responses
from flowgrpo_rc.report.series import Row, points_of

_LABELS = {BASE: "base model", TUNED: "with LoRA"}
_CHANGE = "/change"
_PREFIX = "suite/"
# Metric of a chart's line, by the line's name.
_LINES = {"change": "", "interval, low": "_low", "interval, high": "_high"}


def sections(run_dir: Path, rows: Sequence[Row]) -> list[str]:
    """Returns the section about suites; none if no suite was asked.

    Args:
      run_dir: folder of the run.
      rows: the rows of metrics.jsonl.
    """
    folder = run_dir / "suites"
    body = _curves(rows)
    body += "".join(_result(folder, result) for result in read_suite_results(folder))
    return [html.section("suites", "Suites", body)] if body else []


def _curves(rows: Sequence[Row]) -> str:
    names = {name for row in rows for name in row if name.startswith(_PREFIX)}
    changes = sorted(name for name in names if name.endswith(_CHANGE))
    charts = [
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
        for name in changes
    ]
    return gallery(charts) if charts else ""


def _result(folder: Path, result: StoredResult) -> str:
    title = (
        f"Suite {result.name}: {result.prompts} prompts, {result.seeds} samples of each, the same "
        "noises for both. Intervals of 95% over prompts."
    )
    found = [*_rows(result.comparisons), *_rows(result.groups)]
    names = ("score", "prompts", "base model", "with LoRA", "change", "interval of the change", "")
    return html.note(title) + html.columns(names, found) + _samples(folder, result.name)


def _rows(comparisons: Mapping[str, PolicyComparison]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(found.num_prompts),
            _with_interval(found.base),
            _with_interval(found.tuned),
            f"{found.change.mean:+.4f}",
            f"{found.change.low:+.4f} to {found.change.high:+.4f}",
            _verdict(found.change),
        )
        for name, found in comparisons.items()
    ]


def _with_interval(estimate: Estimate) -> str:
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.mean:.4f}" if math.isnan(half) else f"{estimate.mean:.4f} \u00b1 {half:.4f}"


def _verdict(change: Estimate) -> str:
    """Says on which side of zero the whole interval lies."""
    if change.high < 0:
        return "lower"
    return "higher" if change.low > 0 else ""


def _samples(folder: Path, name: str) -> str:
    stems = [(label, sample_stem(folder, name, policy)) for policy, label in _LABELS.items()]
    grids = [(label, stem.with_suffix(".png")) for label, stem in stems]
    if all(path.is_file() for _, path in grids):
        return pictures(grids)
    texts = [(label, stem.with_suffix(".jsonl")) for label, stem in stems]
    return responses(texts) if all(path.is_file() for _, path in texts) else ""
