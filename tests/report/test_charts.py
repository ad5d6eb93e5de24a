"""Line charts: ticks, axes, and long runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flowgrpo_rc.report.charts import Series, line_chart


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.41, 0.79], ["0.4", "0.5", "0.6", "0.7", "0.8"]),
        ([1.00001, 1.00004], ["1.00001", "1.00002", "1.00003", "1.00004"]),
        ([-2e-5, 1e-5], ["-2e-5", "-1e-5", "0", "1e-5"]),
        ([3.0, 3.0], ["2.6", "2.8", "3.0", "3.2", "3.4"]),
    ],
)
def test_ticks_are_round_and_cover_the_data(values: list[float], labels: list[str]) -> None:
    chart = line_chart("c", [Series(name="s", points=list(enumerate(values)))])
    assert re.findall(r'class="y"[^>]*>([^<]+)<', chart) == labels


def test_chart_line_runs_from_bottom_left_to_top_right() -> None:
    chart = line_chart("c", [Series(name="s", points=[(0, 0.0), (4, None), (8, 1.0), (10, 1.0)])])
    assert 'class="line" d="M0.0 300.0M800.0 0.0L1000.0 0.0"' in chart


def test_long_runs_keep_their_spikes_in_a_small_chart() -> None:
    values = np.ones(20_000)
    values[12_345] = 9.0
    chart = line_chart("c", [Series(name="s", points=list(enumerate(values.tolist())))])
    assert len(chart) < 20_000
    # 1000 * 12345 / 19999, and 9 on an axis from 0 to 10 that is 300 high.
    assert "L617.3 30.0L" in chart


@pytest.mark.parametrize("values", [[1e-6, 1e-2], [2e-5, 9e-5], [1e-4, 1e-4], [1e-12, 1.0]])
def test_log_axis_covers_the_data(values: list[float]) -> None:
    chart = line_chart("c", [Series(name="s", points=list(enumerate(values)))], log_y=True)
    ticks = [float(label) for label in re.findall(r'class="y"[^>]*>([^<]+)<', chart)]
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= values[0] * 1.000001
    assert ticks[-1] >= values[1] * 0.999999 or len(ticks) > 5
