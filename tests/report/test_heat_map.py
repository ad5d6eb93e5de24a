"""The heat map, read back from its shades."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowgrpo_rc.report.run import write_report


def shades(page: str) -> dict[str, list[float | None]]:
    """Reads the shades of a heat map back, by the name of the row; None if a cell is empty."""
    table = page.split('<table class="heat">')[1].split("</table>")[0]
    found = {}
    for row in table.split("<tr>")[1:]:
        cells = re.findall(r'<td(?: style="--v:([^"]+)")?></td>', row)
        found[row.split("<th>")[1].split("<")[0]] = [float(v) if v else None for v in cells]
    return found


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
        {"step": 6, "rollout_corr/logprob_abs_diff/ts_900": 0.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    found = shades(page)
    # The earliest timestep, 900, is on top; zero has the lowest colour.
    assert list(found) == ["900", "500"]
    assert found == {"900": [0.0, None, 0.5, 0.0], "500": [1.0, None, None, None]}
    assert "1e-6<span></span>0.0001" in page
    assert "steps 3 to 6" in page


def test_long_runs_are_averaged_in_columns(tmp_path: Path) -> None:
    values = dict.fromkeys(range(1, 241), 0.0001) | {101: 1e-2, 102: 3e-2}
    rows = [
        {"step": step, "rollout_corr/logprob_abs_diff/ts_900": value}
        for step, value in values.items()
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    (row,) = shades(page).values()
    assert (len(row), row.index(1.0)) == (120, 50)
    assert sum(value or 0 for value in row) == pytest.approx(1.0)
    assert "columns are means of 2 steps" in page
    assert "0.0001<span></span>0.02" in page
