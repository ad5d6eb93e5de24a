"""The report's section on the correction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.report_pages import Page

from flowgrpo_rc.report.run import write_report


@pytest.mark.parametrize("prefix", ["rollout_corr/", "actor/rollout_corr/"])
def test_difference_by_timestep_is_the_mean_over_steps(tmp_path: Path, prefix: str) -> None:
    rows = [
        {"step": 1, f"{prefix}logprob_abs_diff/ts_750": 1e-5},
        {"step": 2, f"{prefix}logprob_abs_diff/ts_750": 3e-5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "".join(Page(write_report(tmp_path).read_text()).text)
    assert "mean over steps: 2e-05 at 750" in text
    assert "largest step: 3e-05 at 750" in text


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
    row |= {"rollout_corr/policy_drift_abs_mean": 3e-5}
    row |= {} if over is None else {"rollout_corr/mismatch_over_clip": over}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **row}) + "\n")
    text = write_report(tmp_path).read_text()
    assert (
        text.count("dashed: the clip band, 0.0002")
        == text.count("threshold 0.0002")
        == (2 if over else 0)
    )
    assert "policy_drift_abs_mean: 3e-05 at 1" in text
