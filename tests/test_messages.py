"""What every message keeps to."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flowgrpo_rc
from flowgrpo_rc.commands.doctor import report
from flowgrpo_rc.commands.doctor_gpu import Finding

PACKAGE = Path(flowgrpo_rc.__file__).parent


def spoken(path: Path) -> list[str]:
    """Returns the texts of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [str(text.value) for text in texts if text not in statements]


def test_no_message_sends_a_reader_of_a_wheel_to_a_page_that_it_lacks() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = {(path.name, text) for path in files for text in spoken(path) if "docs/" in text}
    assert not found


def test_square_brackets_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes words in brackets for styles and leaves them out."""
    advice = 'pip install "flowgrpo-rc[quantization]"'
    checks = [("int8[bold]", lambda: Finding("skipped", advice))]
    report("checks of [red]", checks)
    told = " ".join(capsys.readouterr().out.split())
    assert "checks of [red]" in told
    assert f"int8[bold] skipped {advice}" in told
