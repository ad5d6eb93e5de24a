"""The reference pages are those that the code writes, and the table of metrics is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference_pages
import suite_table
from metric_names import SECTIONS, SLIME

import flowgrpo_rc
from flowgrpo_rc.config.names import KEYS
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.monitoring.mismatch import _CLIPPED

PACKAGE = Path(flowgrpo_rc.__file__).parent
DOCS = Path(reference_pages.__file__).parent
RENEW = "run `make reference`"
REPORTING = ("mean", "max", "min", "ratio", "sum", "derive", "_ratio", "_timed")


@pytest.mark.parametrize("page", ["configuration", "metrics"])
def test_a_committed_page_is_what_the_code_says(page: str) -> None:
    committed = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert committed == getattr(reference_pages, page)(), f"docs/{page}.md is old: {RENEW}"


def test_the_tables_of_a_page_are_those_of_the_results() -> None:
    committed = suite_table.PAGE.read_text(encoding="utf-8")
    assert committed == suite_table.page(), f"{suite_table.PAGE.name} is old: {RENEW}"


def test_every_key_is_explained() -> None:
    keys = dict(reference_pages.keys(Config(), ""))
    assert len(keys) > 100
    assert [key for key, text in keys.items() if not text.strip()] == []
    assert KEYS.read_text().split() == list(keys), f"{KEYS.name} is old: {RENEW}"


# --- Names that the code reports


def reported() -> Iterator[str]:
    """Returns regular expressions of the names that calls of a MetricBag have in the source."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            names = [pattern for argument in node.args[:2] if (pattern := _pattern(argument))]
            if called in REPORTING and names:
                yield names[0].removeprefix("rollout_corr/")


def _pattern(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _pattern(part) if isinstance(part, ast.Constant) else ".+" for part in node.values
        )
    return ""


def test_the_table_and_the_names_in_the_code_agree() -> None:
    patterns = {
        pattern for pattern in reported() if not re.match(r"(\w+/|\.\+/)?(\\?_|\.\+/_)", pattern)
    }
    assert len(patterns) > 80
    names = [metric.name for section in SECTIONS for metric in section.metrics]
    assert len(set(names)) == len(names)
    documented = [*names, *(theirs for theirs, _ in SLIME)]
    unknown = [
        p for p in patterns if not any(re.fullmatch(f"(.+/)?{p}", name) for name in documented)
    ]
    assert unknown == [], "add them to docs/metric_names.py"
    by_rename = {"actor/ois", *_CLIPPED.values()}
    gone = [
        name
        for name in names
        if name not in by_rename
        and not any(re.fullmatch(f"(.+/)?{pattern}", name) for pattern in patterns)
    ]
    assert gone == [], "nothing in the code reports them"
