"""Ticks of heat maps."""

from __future__ import annotations

import pytest

from flowgrpo_rc.report.axes import linear_axis, tick_labels


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
    assert tick_labels(linear_axis(values)) == labels
