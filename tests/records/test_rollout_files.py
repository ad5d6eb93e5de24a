"""Saved trajectories: those of another precision are trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.builders import token_batch

from flowgrpo_rc.batch import Rewards
from flowgrpo_rc.records.rollout_files import (
    SavedRollout,
    check_headers,
    load_rollout,
    save_rollout,
)


def test_precision_may_differ_and_nothing_else(tmp_path: Path) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards = Rewards(total=torch.ones(2), valid=torch.ones(2, dtype=torch.bool), parts={})
    path = tmp_path / "step.safetensors"
    save_rollout(path, SavedRollout(token_batch(torch.zeros(2, 3), mask), rewards, {}))
    spec = load_rollout(path, torch.device("cpu")).batch.spec
    check_headers([path], replace(spec, dtype="bf16", tf32=True), {})
    with pytest.raises(ValueError, match=r"other settings \(temperature: 1\.0 there, 0\.5 here\)"):
        check_headers([path], replace(spec, dtype="bf16", temperature=0.5), {})
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["rollout"])
    header["spec"]["top_k"] = 5
    save_file({}, path, metadata={"rollout": json.dumps(header)})
    with pytest.raises(ValueError, match=r"other settings \(top_k: 5 there, None here\)"):
        check_headers([path], spec, {})
