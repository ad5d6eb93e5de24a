"""What people look at: the pictures inside the pages, what they show, and the pages in a real
browser.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from support.report_pages import Page, make_run

from flowgrpo_rc.monitoring.histograms import bin_edges
from flowgrpo_rc.report.compare import write_comparison
from flowgrpo_rc.report.heat_map import columns_by_step, extent, heat_map, spread_counts
from flowgrpo_rc.report.run import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIRIDIS = (255 * colormaps["viridis"](np.linspace(0, 1, 256))).round()[:, :3]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A report, and a comparison of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / name) for name in ("one", "two")]
    return {
        "report": write_report(runs[0]),
        "compare": write_comparison(runs, folder / "compare.html"),
    }


def pictures(page: str) -> list[Image.Image]:
    """All images of the page, decoded."""
    references = Page(page).references
    assert all(reference.startswith("data:image/png;base64,") for reference in references)
    found = [
        Image.open(io.BytesIO(base64.b64decode(reference.split(",", 1)[1])))
        for reference in references
    ]
    for picture in found:
        picture.load()
    return found


@pytest.mark.parametrize(("name", "number"), [("report", 2 + 3 * 2 + 6), ("compare", 2)])
def test_pictures_decode_and_are_not_blank(
    pages: Mapping[str, Path], name: str, number: int
) -> None:
    """The grids, three heat maps with a colour bar each, and the rejected samples."""
    found = pictures(pages[name].read_text())
    assert len(found) == number
    for picture in found:
        assert picture.width > 1
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 3
    if name == "report":
        shapes = [picture.size for picture in found[3:8:2]]
        assert shapes == [(60, 6), (60, 41), (60, 41)]  # steps by timesteps, and by bins
        assert [picture.size for picture in found[8:]] == [(64, 32)] * 6


@pytest.mark.parametrize("name", ["report", "compare"])
def test_nothing_outside_is_referenced(pages: Mapping[str, Path], name: str) -> None:
    page = pages[name].read_text()
    without_pictures = re.sub(r"data:image/png;base64,[\w+/=]+", "", page)
    assert not re.search(
        r"\b(?:https?|wss?|file):|//\w|@import|url\(", without_pictures.split("<section", 1)[0]
    )
    assert not re.search(r"<(?:script|link|iframe|object|embed|base)\b", page)
    assert "default-src 'none'; img-src data:" in page


def shades(page: str, title: str) -> np.ndarray:
    """Of a heat map, read back from its colours: 0 to 1, nan where it is transparent."""
    (data,) = re.findall(rf'alt="{title}[^"]*" src="data:image/png;base64,([^"]+)"', page)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(float)
    nearest = np.abs(pixels[..., None, :3] - VIRIDIS).sum(-1).argmin(-1) / 255
    return np.where(pixels[..., 3] > 0, nearest, np.nan)


def test_the_mismatch_of_each_step_and_timestep_has_its_colour(tmp_path: Path) -> None:
    """Two steps, one of them without a timestep: powers of ten, so that the colours are evenly
    spaced.
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
    wanted = np.array(
        [[0.0, np.nan, 0.5], [1.0, np.nan, np.nan]]
    )  # the earliest timestep, 900, is on top
    np.testing.assert_allclose(found, wanted, atol=0.01)
    assert "mean |difference|: <span>1e-06" in page
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


@pytest.mark.parametrize("name", ["report", "compare"])
def test_pages_open_in_a_browser_without_errors_and_fit_a_narrow_window(
    pages: Mapping[str, Path], name: str, tmp_path: Path
) -> None:
    browser = next((found for known in BROWSERS if (found := shutil.which(known))), None)
    if browser is None:
        pytest.skip("no Chromium here: the pages were not opened in a browser")
    # A frame 360 wide reports from inside; the page's own policy forbids scripts, so that a wrapper
    # has to ask.
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(
        f'<iframe id="f" src="{pages[name].as_uri()}" width="360" height="800"></iframe><script>'
        "f.onload = () => { const d = f.contentDocument; document.title = JSON.stringify({"
        "wide: d.documentElement.scrollWidth, fetched: "
        "f.contentWindow.performance.getEntriesByType('resource')"
        ".filter(e => !e.name.startsWith('data:')).length,"
        "broken: [...d.images].filter(i => !i.naturalWidth).length, images: d.images.length}); "
        "}</script>"
    )
    options = (
        *(
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--hide-scrollbars",
        ),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--allow-file-access-from-files", "--enable-logging=stderr", "--log-level=0"),
        *("--virtual-time-budget=5000", "--dump-dom"),
    )
    command = [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    assert found == {
        "wide": 360,
        "fetched": 0,
        "broken": 0,
        "images": len(Page(pages[name].read_text()).references),
    }
    assert "CONSOLE" not in done.stderr
