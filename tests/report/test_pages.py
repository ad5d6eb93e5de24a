"""The pictures in the pages, and the pages in a real browser."""

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
from PIL import Image
from support.report_pages import Page, make_run

from flowgrpo_rc.report.compare import write_comparison
from flowgrpo_rc.report.run import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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
    """Returns all images of the page, decoded."""
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
    """They are the grids, three heat maps with a colour bar each, and the rejected samples."""
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
        "f.onload = () => { const d = f.contentDocument; document.title = JSON.stringify({wide: "
        "d.documentElement.scrollWidth, fetched: "
        "f.contentWindow.performance.getEntriesByType('resource').filter(e => "
        "!e.name.startsWith('data:')).length,broken: [...d.images].filter(i => "
        "!i.naturalWidth).length, images: d.images.length}); }</script>"
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
