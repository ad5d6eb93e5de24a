"""Saved trajectories: those of another precision are trained on."""

from __future__ import annotations

import json
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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards = Rewards(total=torch.ones(2), valid=torch.ones(2, dtype=torch.bool), parts={})
    path = tmp_path / "step.safetensors"
    save_rollout(path, SavedRollout(token_batch(torch.zeros(2, 3), mask), rewards, {}))
    return path


def test_precision_may_differ_and_nothing_else(saved: Path) -> None:
    spec = load_rollout(saved, torch.device("cpu")).batch.spec
    kind = type(spec)
    fields = {name: getattr(spec, name) for name in ("prompt_length", "response_length")}
    check_headers([saved], kind(dtype="bf16", tf32=True, temperature=1.0, **fields), {})
    with pytest.raises(ValueError, match=r"other settings \(temperature: 1\.0 there, 0\.5 here\)"):
        check_headers([saved], kind(dtype="bf16", temperature=0.5, **fields), {})


def test_a_setting_that_is_not_known_is_refused(saved: Path) -> None:
    spec = load_rollout(saved, torch.device("cpu")).batch.spec
    with safe_open(saved, framework="pt") as file:
        header = json.loads(file.metadata()["rollout"])
    header["spec"]["top_k"] = 5
    save_file({}, saved, metadata={"rollout": json.dumps(header)})
    with pytest.raises(ValueError, match=r"other settings \(top_k: 5 there, None here\)"):
        check_headers([saved], spec, {})
