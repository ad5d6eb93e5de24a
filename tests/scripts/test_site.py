"""The site as it opens from the disk: its search finds pages, and names in tables stay whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import browser, find_browser
from support.documented import ROOT

PROGRAM = find_browser()
SEARCH = """(() => {
    const query = document.querySelector("[data-md-component=search-query]");
    query.focus();
    query.value = "rejection";
    for (const event of ["focus", "keyup", "input"]) query.dispatchEvent(new Event(event));
})()"""
FOUND = 'document.querySelectorAll(".md-search-result__item").length > 3'
# A name in a table has a line at most for each part that a <wbr>, a space or a sign ends.
BROKEN = """[...document.querySelectorAll("td code")].filter((code) =>
    code.getClientRects().length > code.innerHTML.replace(/<wbr>/g, " ").split(/[ -]/).length
).map((code) => code.innerText).join("; ")"""


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_the_site_from_the_disk(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path / "profile") as tab:
        tab.open(site / "index.html", width=1400)
        tab.eval(SEARCH)
        tab.wait_for(FOUND, True)
        for page in ("configuration", "metrics"):
            tab.open(site / f"{page}.html", width=400)
            assert tab.eval('document.querySelectorAll("td code").length') > 50
            assert tab.eval(BROKEN) == ""
            assert tab.eval("document.documentElement.scrollWidth") == 400
        assert tab.complaints() == []
