"""The report's section on the correction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.report_pages import chart_data

from flowgrpo_rc.report.run import write_report


@pytest.mark.parametrize("prefix", ["rollout_corr/", "actor/rollout_corr/"])
def test_difference_by_timestep_is_the_mean_over_steps(tmp_path: Path, prefix: str) -> None:
    rows = [
        {"step": 1, f"{prefix}logprob_abs_diff/ts_750": 1e-5},
        {
            "step": 2,
            f"{prefix}logprob_abs_diff/ts_750": 3e-5,
            f"{prefix}logprob_abs_diff/ts_500": 5e-5,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = chart_data(write_report(tmp_path).read_text(), "Difference by timestep")
    assert [line["name"] for line in data["series"]] == ["mean over steps", "largest step"]
    assert data["tables"] == [[[500, 750], [5e-5, 2e-5]], [[500, 750], [5e-5, 3e-5]]]


@pytest.mark.parametrize("over", [0.5, None])
def test_the_clip_band_is_drawn_in_the_range_of_the_mismatch(
    tmp_path: Path, over: float | None
) -> None:
    """The band is half the median, 2e-4, which is inside the range of the percentiles."""
    row = {
        f"rollout_corr/logprob_abs_diff_{part}": value
        for part, value in (("p50", 1e-4), ("p99", 4e-4))
    }
    row |= {
        "rollout_corr/logprob_abs_diff/ts_750": 5e-5,
        "rollout_corr/logprob_abs_diff/ts_500": 5e-4,
    }
    row |= {} if over is None else {"rollout_corr/mismatch_over_clip": over}
    rows = [
        row | {"step": step, "rollout_corr/policy_drift_abs_mean": step * 3e-5} for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(tmp_path).read_text()
    assert text.count("dashed: the clip band, 0.0002") == (2 if over else 0)
    for title in ("Noise floor", "Difference by timestep"):
        assert chart_data(text, title)["thresholds"] == ([2e-4] if over else [])
    drift = chart_data(text, "Noise floor")
    assert drift["series"][2]["name"] == "policy_drift_abs_mean"
    assert drift["tables"][2] == [[1, 2], [3e-5, 6e-5]]
