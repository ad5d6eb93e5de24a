"""Formulas become MathML while the site is built, so that its pages need no script for them."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return _FORMULA.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    tag, bracket, formula = found.groups()
    mathml = convert(unescape(formula), display="block" if bracket == "[" else "inline")
    return f'<{tag} class="formula">{mathml}</{tag}>'
