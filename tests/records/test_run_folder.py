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
from flowgrpo_rc.report.folder import decided

ROOT = Path(flowgrpo_rc.__file__).parents[1]


def test_time_commit_and_decisions_are_recorded(tmp_path: Path) -> None:
    facts = {"Model": "tiny", "First prompt": "token=hunter2"}
    RunFolder(tmp_path).create({}, torch.device("cpu"), 1, {}, facts)
    assert decided(tmp_path) == {"Model": "tiny", "First prompt": "token=***"}
    environment = json.loads((tmp_path / "environment.json").read_text())
    started = datetime.fromisoformat(environment["started"])
    assert abs(datetime.now().astimezone() - started) < timedelta(minutes=5)
    if not (ROOT / ".git").exists():
        pytest.skip("the package is not in a checkout")
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert head.startswith(environment["git"].removesuffix("-dirty"))
