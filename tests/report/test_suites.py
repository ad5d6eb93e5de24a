"""The section of the report about suites: side by side, with intervals, and over the training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.report_pages import chart_data, visible_text, write_rows

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.evaluation.intervals import PolicyComparison, compare
from flowgrpo_rc.evaluation.suite import Suite, SuiteProtocol
from flowgrpo_rc.evaluation.suite_runner import SuiteResult, SuiteScores
from flowgrpo_rc.records.samples import save_grid, save_texts
from flowgrpo_rc.records.suite_files import read_suite_results, sample_stem, write_suite_result
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.rewards.manager import RewardConfig

PROMPTS = [Prompt(text=f"p{i}", index=i) for i in range(4)]


def result(changes: Sequence[float], **groups: PolicyComparison) -> SuiteResult:
    base = np.array([[0.5, 0.25], [0.75, 0.5], [0.25, math.nan], [1.0, 1.0]])
    tuned = base + np.array(changes).reshape(4, 1)
    columns = [{"reward": scores, "ocr/edit": scores * 2} for scores in (base, tuned)]
    comparisons = {name: compare(columns[0][name], columns[1][name]) for name in columns[0]}
    before, after = (SuiteScores(scores, ()) for scores in columns)
    return SuiteResult("mine", before, after, comparisons, groups, SuiteProtocol({}, "1a2b3c4d"))


def section(run: Path, rows: Sequence[dict[str, Any]] = ()) -> str:
    """Returns the section about suites of a run's report; empty without one."""
    _, _, rest = write_report(write_rows(run, rows)).read_text().partition('<section id="suites">')
    return rest.partition("</section>")[0]


def suite() -> Suite:
    return Suite(name="mine", prompts=PROMPTS, reward=RewardConfig(), seeds=2, by=None)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    alone = compare(np.array([[0.5]]), np.array([[0.75]]))
    written = result([-0.25, -0.2, -0.3, -0.25], few=alone)
    write_suite_result(tmp_path / "suites", suite(), written)
    (stored,) = read_suite_results(tmp_path / "suites")
    assert (stored.name, stored.prompts, stored.seeds) == ("mine", 4, 2)
    assert stored.comparisons == written.comparisons
    assert stored.groups["few"].change.mean == 0.25
    assert math.isnan(stored.groups["few"].change.low)
    row = json.loads((tmp_path / "suites" / "mine.json").read_text())
    assert row["scores"]["base"]["reward"][2] == [0.25, None]
    assert row["texts"] == ["p0", "p1", "p2", "p3"]


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    assert section(tmp_path) == ""  # without suites
    (tmp_path / "suites").mkdir()
    result = '{"prompts": 4, "seeds": 2, "sampler": {}, "digest": "", "comparisons": {}}'
    (tmp_path / "suites" / "mine.json").write_text(result)
    with pytest.raises(ValueError, match=r"mine.json cannot be read: 'groups' is missing"):
        section(tmp_path)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [([-0.25, -0.2, -0.3, -0.25], "lower"), ([0.25, 0.2, 0.3, 0.25], "higher"), ([1, -1] * 2, "")],
)
def test_base_and_lora_stand_side_by_side(
    tmp_path: Path, changes: Sequence[float], verdict: str
) -> None:
    result_of_suite = result(changes)
    write_suite_result(tmp_path / "suites", suite(), result_of_suite)
    for policy, shade in (("base", 50), ("lora", 200)):
        images = np.full((4, 32, 32, 3), shade, np.uint8)
        stem = sample_stem(tmp_path / "suites", "mine", policy)
        save_grid(stem.with_suffix(".png"), images, [f"p{i} 0.50" for i in range(4)])
    page = section(tmp_path)
    text = visible_text(page)
    assert "Suite mine: 4 prompts, 2 samples of each" in text
    total = result_of_suite.comparisons["reward"]
    half = (total.base.high - total.base.low) / 2
    assert f"{total.base.mean:.4f} \u00b1 {half:.4f}" in text
    assert f"{total.change.low:+.4f} to {total.change.high:+.4f}" in text
    row = page.split('<td data-name="score">reward</td>')[1].split("</tr>")[0]
    assert row.endswith(f'<td data-name="">{verdict}</td>')
    assert page.count("base model: 0.50") == page.count("with LoRA: 0.50") > 0


def test_texts_stand_side_by_side(tmp_path: Path) -> None:
    write_suite_result(tmp_path / "suites", suite(), result([0.0] * 4))
    for policy, answer in (("base", "first answer"), ("lora", "second answer")):
        path = sample_stem(tmp_path / "suites", "mine", policy).with_suffix(".jsonl")
        save_texts(path, [answer] * 4, PROMPTS, [0.5] * 4)
    page = section(tmp_path)
    assert "first answer" in page
    assert "second answer" in page


def test_changes_over_the_training_are_drawn(tmp_path: Path) -> None:
    ends = {"": 0.0, "_low": -0.1, "_high": 0.1}
    rows: list[dict[str, Any]] = [
        {"step": step} | {f"suite/words/change{end}": -0.01 * step + by for end, by in ends.items()}
        for step in (0, 20, 40)
    ]
    data = chart_data(section(tmp_path, [*rows, {"step": 41}]), "words: change to the base model")
    names = ["change", "interval, low", "interval, high"]
    assert [line["name"] for line in data["series"]] == names
    assert data["thresholds"] == [0.0]
    assert data["tables"][2] == [[0, 20, 40], [0.1, -0.1, -0.3]]
