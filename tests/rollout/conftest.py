"""Fixtures of the engines."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, ...]]:
    """Writes the program of a child; returns its command."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of failed children stay

    def write(code: str) -> tuple[str, ...]:
        path = tmp_path / "child.py"
        path.write_text(code)
        return sys.executable, str(path)

    return write
