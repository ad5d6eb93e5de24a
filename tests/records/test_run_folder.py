"""Reads back what a run's folder records about its machine and its code."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

import flowgrpo_rc
from flowgrpo_rc.records.run_folder import RunFolder

ROOT = Path(flowgrpo_rc.__file__).parents[1]


def environment(folder: Path) -> dict[str, object]:
    """Returns what a new run records."""
    RunFolder(folder).create({}, torch.device("cpu"), 1, {})
    return dict(json.loads((folder / "environment.json").read_text()))


def test_the_start_is_recorded(tmp_path: Path) -> None:
    started = datetime.fromisoformat(str(environment(tmp_path)["started"]))
    assert abs(datetime.now().astimezone() - started) < timedelta(minutes=5)


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the package is not in a checkout")
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert head.startswith(str(environment(tmp_path)["git"]).removesuffix("-dirty"))
