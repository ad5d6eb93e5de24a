"""Line charts: what they draw, and what they say instead."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from support.report_pages import chart_data

import flowgrpo_rc.report
from flowgrpo_rc.report.charts import Chart, Series, smoothed
from flowgrpo_rc.report.page import templates

UPLOT = Path(flowgrpo_rc.report.__file__).parent / "uplot"


def draw(*charts: Chart) -> str:
    """Returns the charts side by side, as a page has them."""
    return str(templates().get_template("shapes.html").module.gallery(list(charts)))


def chart(values: list[float | None], **settings: object) -> Chart:
    """Makes a chart with one line."""
    return Chart(title="c", series=[Series(name="s", points=list(enumerate(values)))], **settings)


def test_a_chart_holds_its_points_and_gaps() -> None:
    page = draw(chart([0.0, None, 1 / 3], thresholds=(0.1,), x_name="timestep"))
    assert chart_data(page, "c") == {
        "x": "timestep",
        "log": False,
        "thresholds": [0.1],
        "series": [{"name": "s", "color": 0, "faint": False}],
        "tables": [[[0, 1, 2], [0.0, None, 0.3333333]]],
    }


def test_long_runs_keep_their_spikes_in_a_small_chart() -> None:
    values = np.ones(20_000)
    values[12_345] = 9.0
    page = draw(chart(values.tolist()))
    assert len(page) < 20_000
    xs, ys = chart_data(page, "c")["tables"][0]
    assert (xs[0], xs[-1]) == (0, 19_999)
    assert [x for x, y in zip(xs, ys, strict=True) if y == 9.0] == [12_345]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.0, 0.0, 0.0], "0, at all 3 steps"),
        ([0.99999994, 1.0], "1, at all 2 steps"),
        ([0.25], "0.25, at step 0"),
        ([None], "no finite value"),
    ],
)
def test_lines_that_do_not_move_are_told_not_drawn(values: list[float | None], words: str) -> None:
    page = draw(chart(values), chart([1.0, 2.0]))
    assert f"<b>c</b>: {words}." in page
    assert page.count("<figure") == 1


def test_a_logarithmic_chart_leaves_out_what_has_no_logarithm() -> None:
    page = draw(chart([0.0, 1e-5, 1e-4], log_y=True))
    assert chart_data(page, "c")["tables"] == [[[0, 1, 2], [None, 1e-5, 1e-4]]]
    assert "no value above zero" in draw(chart([0.0, -1e-5], log_y=True))


def test_smoothed_values_are_centred_means() -> None:
    values = np.random.default_rng(0).normal(size=60)
    line = Series(name="s", points=list(enumerate(values.tolist())))
    raw, smooth = smoothed(line, color=2)
    assert (raw.faint, smooth.faint, raw.color, smooth.color) == (True, False, 2, 2)
    assert list(raw.points) == list(line.points)
    means = np.array([y for _, y in smooth.points])
    np.testing.assert_allclose(means[2:-2], np.convolve(values, np.ones(5) / 5, "valid"))
    np.testing.assert_allclose(means[[0, -1]], [values[:3].mean(), values[-3:].mean()])


def test_short_and_level_lines_are_not_smoothed() -> None:
    for values in ([1.0, 2.0], [1.0] * 100):
        assert len(smoothed(Series(name="s", points=list(enumerate(values))))) == 1


def test_names_cannot_leave_their_element() -> None:
    name = "</script><script>alert(1)</script>"
    line = Series(name=name, points=[(0, 1.0), (1, 2.0)])
    page = draw(Chart(title=name, series=[line]))
    assert page.count("<script") == page.count("</script>") == 1
    data = re.findall(r"json\">(.*?)</script>", page)[0]
    assert "\\u003c/script\\u003e" in data


def test_the_library_is_what_its_readme_says() -> None:
    """It is shipped as npm has it, with its licence."""
    told = dict(re.findall(r"\| `([^`]+)` \| `(\w{64})` \|", (UPLOT / "README.md").read_text()))
    files = {path.name: path.read_bytes() for path in UPLOT.iterdir()}
    sums = {name: hashlib.sha256(files[name]).hexdigest() for name in told}
    assert told == sums
    assert set(files) == {*told, "README.md", "LICENSE"}
    assert b"MIT License" in files["LICENSE"]
