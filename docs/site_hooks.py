"""What mkdocs does to the pages beyond its extensions, so that they read the same on the site as in
the repository.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_NAME_IN_TABLE = re.compile(r"(?<=<td><code>)[^<]+(?=</code>)")
_LINK_TO_CODE = re.compile(r"\[([^\]]+)\]\(\.\./(?:flowgrpo_rc|examples|configs)[^)]*\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Reads Markdown inside of <details>, and turns links to code into plain names.

    The code is beside the pages in the repository, but not on the site.
    """
    markdown = _LINK_TO_CODE.sub(r"\1", markdown)
    return markdown.replace("<details>", '<details markdown="1">')


def on_page_content(html: str, **_: Any) -> str:
    """Formulas become MathML, so that pages need no script for them; long names in tables may be
    broken.
    """
    html = _NAME_IN_TABLE.sub(lambda name: re.sub(r"([_/.])", r"\1<wbr>", name[0]), html)
    return _FORMULA.sub(_mathml, html)


def on_post_build(config: Any, **_: Any) -> None:
    """Writes the index of the search as a script too, which a page from the disk may load."""
    folder = Path(config["site_dir"], "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def _mathml(found: re.Match[str]) -> str:
    tag, bracket, formula = found.groups()
    mathml = convert(unescape(formula), display="block" if bracket == "[" else "inline")
    return f'<{tag} class="formula">{mathml}</{tag}>'
