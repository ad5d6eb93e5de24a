"""What every message keeps to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import flowgrpo_rc
from flowgrpo_rc.commands.doctor import Finding, report
from flowgrpo_rc.config.names import config_folder

PACKAGE = Path(flowgrpo_rc.__file__).parent


def spoken(path: Path) -> list[str]:
    """Returns the texts of a file that are no docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    alone = [node.value for node in nodes if isinstance(node, ast.Expr)]
    return [str(n.value) for n in nodes if isinstance(n, ast.Constant) and n not in alone]


def test_no_message_sends_a_reader_of_a_wheel_to_a_page_that_it_lacks() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = {(path.name, text) for path in files for text in spoken(path) if "docs/" in text}
    assert not found
    texts = [*PACKAGE.rglob("*.yaml"), *config_folder().rglob("*.yaml"), *files]
    page = re.compile(r"docs/\w+\.md")
    assert not [path.name for path in texts if page.search(path.read_text(encoding="utf-8"))]


def test_square_brackets_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes words in brackets for styles and leaves them out."""
    advice = "pip install 'a[b]'"
    report("checks of [red]", [("int8[bold]", lambda: Finding("skipped", advice))])
    told = " ".join(capsys.readouterr().out.split())
    assert told == f"checks of [red] int8[bold] skipped {advice}"
