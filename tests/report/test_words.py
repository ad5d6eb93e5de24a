"""The words that pages explain, and where they lead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowgrpo_rc.report.page import words

DOCS = Path(__file__).parents[2] / "docs"


def anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as the documentation site makes them."""
    headings = re.findall(r"^#+ (.*)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("key", words())
def test_every_word_leads_to_a_heading_of_the_documentation(key: str) -> None:
    page, _, heading = words()[key]["page"].partition("#")
    assert not heading or heading in anchors(page)
    assert (DOCS / f"{page}.md").is_file()
