"""What pages may fetch and run, and the pages in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.browser import Browser, browser, find_browser
from support.report_pages import Page, make_run, write_rows

from flowgrpo_rc.report.compare import write_comparison
from flowgrpo_rc.report.run import write_report

# Remembers what is written onto a canvas, before a page's own scripts run.
REMEMBER_LABELS = """
window.labels = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  window.labels.push(text);
  return write.call(this, text, ...rest);
};
"""
LEGENDS = "[...document.querySelectorAll('.legend')].map(e => e.innerText.split('\\n'))"
# The middle of the wide chart's plot, and its width.
PLOT = """(() => {
  const plot = document.querySelector('#reward .wide .u-over');
  plot.scrollIntoView({block: 'center'});
  const box = plot.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2, box.width];
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A report, and a comparison of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / name) for name in ("one", "two")]
    return {
        "report": write_report(runs[0]),
        "compare": write_comparison(runs, folder / "compare.html"),
    }


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A tab of a browser, for all tests of this file."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: the pages were not opened in a browser")
    with browser(program, tmp_path_factory.mktemp("profile")) as found:
        found.call("Page.addScriptToEvaluateOnNewDocument", source=REMEMBER_LABELS)
        yield found


@pytest.mark.parametrize("name", ["report", "compare"])
def test_nothing_outside_is_referenced_and_only_scripts_of_the_package_run(
    pages: Mapping[str, Path], name: str
) -> None:
    page = pages[name].read_text()
    without_pictures = re.sub(r"data:image/png;base64,[\w+/=]+", "", page)
    assert not re.search(
        r"\b(?:https?|wss?|file):|//\w|@import|url\(", without_pictures.split("<section", 1)[0]
    )
    assert not re.search(r"<(?:link|iframe|object|embed|base)\b", page)
    assert "default-src 'none'; img-src data:" in page
    # The policy names each script by its hash, and a run's files cannot add one.
    (policy,) = re.findall(r"script-src ([^;\"]+)", page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    sums = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert policy.split() == [f"'sha256-{digest}'" for digest in sums]
    assert len(scripts) == 2


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("report", 400, True), ("report", 1400, False), ("compare", 400, False)],
)
def test_pages_open_without_errors_and_fit_the_window(
    tab: Browser, pages: Mapping[str, Path], name: str, width: int, dark: bool
) -> None:
    tab.open(pages[name], width=width, dark=dark)
    found = tab.eval(
        "({wide: document.documentElement.scrollWidth, broken: [...document.images].filter(i => "
        "!i.naturalWidth).length, images: document.images.length, empty: "
        "document.querySelectorAll('.plot:not(:has(canvas))').length, charts: "
        "document.querySelectorAll('.plot canvas').length})"
    )
    page = pages[name].read_text()
    assert found == {
        "wide": width,
        "broken": 0,
        "images": len(Page(page).references),
        "empty": 0,
        "charts": page.count('<div class="plot"'),
    }
    assert found["charts"] > 3
    assert tab.complaints() == []
    paper = tab.eval("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", paper))) < 64) == dark


def test_the_pointer_shows_values_in_all_charts(tab: Browser, pages: Mapping[str, Path]) -> None:
    lines = (pages["report"].parent / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    tab.open(pages["report"], width=1400)
    assert tab.eval(LEGENDS)[0][0] == "step 60"
    x, y, _ = tab.eval(PLOT)
    tab.mouse("mouseMoved", x, y)
    legends = tab.eval(LEGENDS)
    assert legends[0][0] == "step 30"
    assert f"({rows[30]['reward/mean']:.4f}".rstrip("0") in legends[0][1]
    assert legends[0][2].startswith("held-out 0.")
    assert legends[0][2].endswith((" at 20", " at 40"))
    steps = {legend[0] for legend in legends if legend[0].startswith("step")}
    assert steps == {"step 30"}
    (norm,) = [legend[1] for legend in legends if "actor/grad_norm" in legend[1]]
    assert float(norm.split()[1]) == pytest.approx(rows[30]["actor/grad_norm"], rel=1e-3)
    tab.mouse("mouseMoved", 2, 2)
    assert tab.eval(LEGENDS)[0][0] == "step 60"
    assert tab.complaints() == []


def test_lines_are_called_dashed_where_there_are_any(tab: Browser, tmp_path: Path) -> None:
    """The band of the other run is far above its data."""
    name = "rollout_corr/logprob_abs_diff_p50"
    for folder, over, said in (("inside", 0.5, True), ("outside", 1e-3, False)):
        clip = "rollout_corr/mismatch_over_clip"
        rows = [{"step": step, name: step * 1e-4, clip: step * over} for step in (1, 2)]
        page = write_report(write_rows(tmp_path / folder, rows))
        tab.open(page, width=1000)
        note = tab.eval("document.querySelector('#correction .chart small').innerText")
        assert note.endswith(f"the clip band is {1e-4 / over:.2g}{' (dashed)' if said else ''}")


def test_dragging_zooms_all_charts_until_it_is_reset(
    tab: Browser, pages: Mapping[str, Path]
) -> None:
    tab.open(pages["report"], width=1400)
    x, y, width = tab.eval(PLOT)
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mousePressed", x, y)
    tab.mouse("mouseMoved", x + width / 8, y)
    end = x + width / 6 + 3  # a little behind step 40
    tab.mouse("mouseMoved", end, y)
    tab.mouse("mouseReleased", end, y)
    tab.mouse("mouseMoved", 2, 2)
    seen = [legend[0] for legend in tab.eval(LEGENDS) if legend[0].startswith("step")]
    assert set(seen) == {"step 40"}
    assert tab.eval("document.querySelector('.reset').hidden") is False
    tab.eval("document.querySelector('.reset').click()")
    assert tab.eval("document.querySelector('.reset').hidden") is True
    assert tab.eval(LEGENDS)[0][0] == "step 60"
    assert tab.complaints() == []


def test_a_click_on_a_name_hides_its_line(tab: Browser, pages: Mapping[str, Path]) -> None:
    tab.open(pages["report"], width=1400)
    count = (
        "(() => { const c = document.querySelector('#reward canvas'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 0; i < d.length; "
        "i += 4) if (d[i] > 190 && d[i + 1] < 130 && d[i + 2] < 80 && d[i + 3] > 200) n++; "
        "return n; })()"
    )
    assert tab.eval(count) > 100
    tab.eval("document.querySelectorAll('#reward .legend button')[1].click()")
    assert tab.eval(count) == 0


def test_labels_of_axes_are_short_and_charts_follow_the_system(
    tab: Browser, pages: Mapping[str, Path]
) -> None:
    """Weights here are within 3e-4 of 1, losses near 1e-5."""
    tab.open(pages["report"], width=1400)
    labels = set(tab.eval("window.labels"))
    assert {"0.50", "1.0000", "1e-5", "60"} <= labels
    assert [label for label in labels if len(label) > 7] == []
    corner = "document.querySelector('.legend button') && getComputedStyle(document.querySelector("
    color = f"{corner}'.legend button'), '::before').backgroundColor"
    light = tab.eval(color)
    tab.eval("window.labels.length = 0")
    tab.dark(True)
    deadline = time.monotonic() + 30
    while not tab.eval("window.labels.length") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(tab.eval("window.labels")) == labels
    assert tab.eval(color) != light


def test_a_page_prints_all_its_charts_in_light_colours(
    tab: Browser, pages: Mapping[str, Path]
) -> None:
    tab.open(pages["report"], width=400, dark=True)
    tab.eval("window.dispatchEvent(new Event('beforeprint'))")
    widths = tab.eval("[...document.querySelectorAll('.plot .uplot')].map(e => e.clientWidth)")
    assert min(widths) > 300
    paper = "getComputedStyle(document.body).getPropertyValue('--page')"
    assert tab.eval(paper).strip() == "#f6f6f4"
    tab.eval("window.dispatchEvent(new Event('afterprint'))")
    assert tab.eval(paper).strip() == "#141413"
    assert tab.eval("document.documentElement.scrollWidth") == 400
