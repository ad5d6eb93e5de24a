"""The words that pages explain, and where they lead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowgrpo_rc.report.words import WORDS, explained, link

DOCS = Path(__file__).parents[2] / "docs"


def anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as the documentation site makes them."""
    headings = re.findall(r"^#+ (.*)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("key", WORDS)
def test_every_word_leads_to_a_heading_of_the_documentation(key: str) -> None:
    word = WORDS[key]
    assert not word.heading or word.heading in anchors(word.page)
    assert (DOCS / f"{word.page}.md").is_file()


def test_only_words_that_the_page_uses_are_explained() -> None:
    page = explained([link("kl", "K<L"), link("ess", "ESS")], None)
    assert re.findall(r'id="word-(\w+)"', page) == ["ess", "kl"]
    assert link("kl", "K<L") == '<a class="word" href="#word-kl">K&lt;L</a>'
    assert "href" not in page
    assert "docs/rollout_correction.md" in page


def test_words_lead_to_the_site_if_there_is_one() -> None:
    page = explained([link("kl", "KL")], "https://docs.example/")
    address = "https://docs.example/rollout_correction.html#metrics"
    assert f'<a href="{address}">docs/rollout_correction.md</a>' in page
