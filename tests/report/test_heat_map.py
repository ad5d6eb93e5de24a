"""Heat maps, read back from their colours."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from flowgrpo_rc.monitoring.histograms import bin_edges
from flowgrpo_rc.report.heat_map import columns_by_step, extent, heat_map, spread_counts
from flowgrpo_rc.report.run import write_report

VIRIDIS = (255 * colormaps["viridis"](np.linspace(0, 1, 256))).round()[:, :3]


def shades(page: str, title: str) -> np.ndarray:
    """Reads a heat map back from its colours: 0 to 1, nan if transparent."""
    (data,) = re.findall(rf'alt="{title}[^"]*" src="data:image/png;base64,([^"]+)"', page)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(float)
    nearest = np.abs(pixels[..., None, :3] - VIRIDIS).sum(-1).argmin(-1) / 255
    return np.where(pixels[..., 3] > 0, nearest, np.nan)


def test_the_mismatch_of_each_step_and_timestep_has_its_colour(tmp_path: Path) -> None:
    """One of two steps lacks a timestep.

    Values are powers of ten, so their colours are evenly spaced.
    """
    rows = [
        {
            "step": 3,
            "rollout_corr/logprob_abs_diff/ts_900": 1e-6,
            "rollout_corr/logprob_abs_diff/ts_500": 1e-4,
        },
        {"step": 5, "rollout_corr/logprob_abs_diff/ts_900": 1e-5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    found = shades(page, "Difference by step and timestep")
    # The earliest timestep, 900, is on top.
    wanted = np.array([[0.0, np.nan, 0.5], [1.0, np.nan, np.nan]])
    np.testing.assert_allclose(found, wanted, atol=0.01)
    assert "mean |difference|: <span>1e-6" in page
    assert re.findall(r'class="y"[^>]*>(\d+)<', page) == ["500", "900"]


def test_long_runs_are_averaged_in_columns() -> None:
    values = np.zeros((2, 480))
    values[0, 100:102] = (2.0, 4.0)  # one column of two steps
    chart = heat_map("map", values, 1, [(0.5, "x")], note="", unit="u")
    found = shades(chart, "map")
    assert found.shape == (2, 240)
    assert found[0, 50] == 1.0
    assert found.sum() == 1.0
    assert "columns are means of 2 steps" in chart
    assert "u: <span>0" in chart


def test_steps_without_values_stay_empty() -> None:
    found = columns_by_step({4: np.array([1.0, 2.0]), 6: np.array([3.0, 4.0])})
    np.testing.assert_array_equal(found, [[1, np.nan, 3], [2, np.nan, 4]])


def test_counts_keep_their_sum_and_place_in_other_bins() -> None:
    counts = {-40: 3, 0: 1, 40: 4, 41: 2}
    size = extent([counts], bin_edges)
    assert size == pytest.approx(1e-9 * 10**4.1)
    found = spread_counts(counts, bin_edges, np.linspace(-size, size, 42))
    assert found.sum() == pytest.approx(1)
    # bin 40 ends and bin 41 begins at 1e-5; bin 40 begins at 7.9e-6, inside the bin that ends at
    # 8.29e-6.
    lower = np.linspace(-size, size, 42)[:-1]
    assert found[lower > 1e-5].sum() == pytest.approx(
        0.2 * (size - lower[lower > 1e-5].min()) / (size - 1e-5)
    )
    assert found[(lower > -7.5e-6) & (lower < 7.2e-6)].sum() == pytest.approx(0.1)
