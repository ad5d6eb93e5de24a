"""The report's section on the correction: differences by timestep."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.report_pages import chart_data, write_rows

from flowgrpo_rc.report.run import write_report


@pytest.mark.parametrize("prefix", ["rollout_corr/", "actor/rollout_corr/"])
def test_difference_by_timestep_is_the_mean_over_steps(tmp_path: Path, prefix: str) -> None:
    early, late = (f"{prefix}logprob_abs_diff/ts_{t}" for t in (750, 500))
    write_rows(tmp_path, [{"step": 1, early: 1e-5}, {"step": 2, early: 3e-5, late: 5e-5}])
    data = chart_data(write_report(tmp_path).read_text(), "Difference by timestep")
    assert [line["name"] for line in data["series"]] == ["mean over steps", "largest step"]
    assert data["tables"] == [[[500, 750], [5e-5, 2e-5]], [[500, 750], [5e-5, 3e-5]]]


@pytest.mark.parametrize("over", [0.5, None])
def test_the_clip_band_is_drawn_in_the_range_of_the_mismatch(
    tmp_path: Path, over: float | None
) -> None:
    """The band is half the median, 2e-4, which is inside the range of the percentiles."""
    row = {"logprob_abs_diff_p50": 1e-4, "logprob_abs_diff_p99": 4e-4}
    row |= {"logprob_abs_diff/ts_750": 5e-5, "logprob_abs_diff/ts_500": 5e-4}
    row |= {} if over is None else {"mismatch_over_clip": over}
    row = {f"rollout_corr/{name}": value for name, value in row.items()}
    moved = "rollout_corr/policy_drift_abs_mean"
    write_rows(tmp_path, [row | {"step": step, moved: step * 3e-5} for step in (1, 2)])
    text = write_report(tmp_path).read_text()
    assert text.count("the clip band is 0.0002") == (2 if over else 0)
    for title in ("Noise floor", "Difference by timestep"):
        assert chart_data(text, title)["thresholds"] == ([2e-4] if over else [])
    drift = chart_data(text, "Noise floor")
    assert drift["series"][2]["name"] == "policy_drift_abs_mean"
    assert drift["tables"][2] == [[1, 2], [3e-5, 6e-5]]
