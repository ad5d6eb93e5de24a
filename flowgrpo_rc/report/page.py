"""Fills the templates of the pages. page.css, page.js and uPlot become part of each page, and
live.js of one that follows its run.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

_FOLDER = Path(__file__).parent
_MAX_TEXT = 1000  # characters of a cell, a prompt or a response


def render(template: str, *, title: str, live: bool = False, **content: object) -> str:
    """Returns a whole HTML document; the texts that a template shows are escaped.

    A `live` page asks its server for a newer one, and gets its pictures from there.
    """
    body = templates().get_template(template).render(title=title, **content)
    uplot = f"/*\n{_read('uplot/LICENSE')}\n*/\n{_read('uplot/uPlot.iife.min.js')}"
    scripts = [uplot, _read("page.js")]
    if live:  # it has to see the page before the others change it
        scripts.insert(0, _read("live.js"))
    page = templates().get_template("page.html")
    return page.render(
        title=title,
        body=Markup(body),
        live=live,
        words={key: word for key, word in words().items() if f'"#word-{key}"' in body},
        style=Markup(_read("uplot/uPlot.min.css") + _read("page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[_hash(script) for script in scripts],
    )


@cache
def words() -> dict[str, dict[str, str]]:
    """Returns the list of words by key: name and meaning."""
    entries: dict[str, dict[str, str]] = yaml.safe_load(_read("words.yaml"))
    return entries


@cache
def templates() -> Environment:
    """Returns what fills the templates, with the filters that they use."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "data_uri": _data_uri, "short": _short}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _breakable(text: str) -> Markup:
    """Escapes a text, and lets long names break behind their dots, slashes and the like alone."""
    return Markup(re.sub(r"(?<=[A-Za-z])([_/.=-])(?=[A-Za-z])", r"\1<wbr>", str(escape(text))))


def _short(text: object) -> str:
    """Cuts a text that would make the page unreadable; the file has all of it."""
    text = "" if text is None else str(text)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
