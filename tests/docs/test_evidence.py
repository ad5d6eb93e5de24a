"""The evidence pages show every number, figure and conclusion that the studies measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tables

TEXT = "\n".join(page.read_text() for page in tables.PAGES)
STUDIES = tables.studies()


def test_the_page_shows_the_data():
    assert tables.fill(TEXT, STUDIES) == TEXT


def test_every_conclusion_holds():
    assert tables.broken_claims(TEXT, STUDIES) == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_page_uses_everything_that_a_study_offers(study: tables.Study) -> None:
    shown = {match[2] for match in tables.MARKED.findall(TEXT)}
    assert set(study.entries) - shown == set()
    assert set(study.claims) - set(tables.CLAIM.findall(TEXT)) == set()


def test_no_marker_begins_a_line_of_a_paragraph():
    """Markdown would end the paragraph there."""
    assert re.findall(r"^<!--(?:value|claim):\w+", TEXT, re.MULTILINE) == []


def test_no_name_stands_for_two_things():
    names = [name for study in STUDIES for name in (*study.entries, *study.claims)]
    assert len(names) == len(set(names))


def test_a_wrong_number_is_found(tmp_path: Path) -> None:
    name, entry, study = next(
        (name, entry, study) for study in STUDIES for name, entry in study.entries.items()
    )
    page = tmp_path / "evidence.md"
    right = f"<!--table:{name}-->\n{entry(study.cells)}\n<!--/table-->\n"
    page.write_text(right)
    tables.main(["--check"], [page])
    page.write_text(re.sub(r"\d", lambda digit: str(9 - int(digit[0])), right, count=1))
    with pytest.raises(SystemExit, match="does not show the data"):
        tables.main(["--check"], [page])
    tables.main([], [page])
    assert page.read_text() == right


def test_a_wrong_conclusion_is_found():
    false = tables.Study(
        "planted", {}, {"wrong": lambda cells: False, "right": lambda cells: True}, {}
    )
    assert tables.broken_claims("So.<!--claim:wrong--> And so.<!--claim:right-->", [false]) == [
        "wrong"
    ]


def test_every_figure_is_there_and_every_file_is_small():
    links = [
        page.parent / link
        for page in tables.PAGES
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    ]
    assert all(link.is_file() for link in links)
    figures = [link for link in links if link.parent.name == "figures"]
    folder = tables.DOCS / "figures"
    # Of other pages.
    others = {folder / "rooms.svg", folder / "solvers.png", *folder.glob("collapse_*.svg")}
    drawn = set(folder.glob("*")) - others
    assert drawn == set(figures)
    files = [*drawn, *tables.RESULTS.glob("*.jsonl")]
    assert sum(file.stat().st_size for file in files) < 2 * 2**20
