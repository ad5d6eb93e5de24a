"""The rejected samples of a run: which, where, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.builders import diffusion_batch

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.records.rejected import PER_STEP, RejectedSamples
from flowgrpo_rc.records.samples import Shown


def step(*, processes: int = 1, texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the rows of a step of 6 samples; the odd ones are rejected at their second step."""
    difference = 1e-3 * torch.arange(12, dtype=torch.float64).reshape(6, 2)
    keep_mask = torch.ones(6, 2, dtype=torch.bool)
    keep_mask[1::2, 1] = False
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.0025")
    batch = diffusion_batch(torch.zeros(6, 2)).replace(seed=torch.arange(6) + 100)
    seen = Decisions()
    seen.add(batch, difference, batch.step_indices, keep_mask, None)
    shown = Shown([Prompt(text=f"p{i}", index=i) for i in range(6)], texts)
    total = torch.tensor([0.0, 0.1, 0.2, math.nan, 0.4, 0.5])
    rewards = Rewards(total=total, valid=total.isfinite(), parts={})
    writer = RejectedSamples(config, config.rules(), processes)
    return writer.rows(seen.take(), batch, shown, rewards, lambda: ["ts_1000", "ts_750"])


def test_rejected_samples_are_told_with_reason_and_step() -> None:
    rows = step()
    json.dumps(rows, allow_nan=False)
    texts = [row["text"] for row in step(texts=[f"answer {i}" for i in range(6)])]
    assert texts == ["answer 5", "answer 3", "answer 1"]
    assert [(row["prompt"], row["timestep"]) for row in rows] == [(f"p{i}", 750) for i in (5, 3, 1)]
    assert [row["log_ratio"] for row in rows] == pytest.approx([0.011, 0.007, 0.003])
    assert [row["reward"] for row in rows] == pytest.approx([0.5, None, 0.1])
    assert all("text" not in row for row in rows)
    (reason,) = rows[0]["reasons"]
    value = pytest.approx(math.exp(0.011))
    assert reason == {"criterion": "token_k1", "value": value, "lower": 0.5, "upper": 1.0025}


@pytest.mark.parametrize(("processes", "rows"), [(2, 2), (4, 1), (2 * PER_STEP, 1)])
def test_processes_share_the_rows_of_a_step(processes: int, rows: int) -> None:
    assert len(step(processes=processes)) == rows


def test_a_band_that_moves_tells_the_bounds_that_it_had() -> None:
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="auto:4")
    bands = AutoBands(config.rules().auto, 2, torch.device("cpu"))
    source = torch.Generator().manual_seed(0)
    for _ in range(2):
        usual = 1e-4 * torch.randn(64, 2, generator=source, dtype=torch.float64)
        bands.judge(diffusion_batch(torch.zeros(64, 2)), usual, None)
        bands.finish(lambda rows: rows)
    difference = torch.tensor([[0.0, 0.0], [0.0, 2e-3]], dtype=torch.float64)
    batch = diffusion_batch(torch.zeros(2, 2)).replace(seed=torch.arange(2) + 100)
    judged, _ = bands.judge(batch, difference, None)
    assert judged.rejection_mask.tolist() == [[True, True], [True, False]]
    bands.finish(lambda rows: rows)
    seen = Decisions()
    seen.add(judged, difference, batch.step_indices, judged.rejection_mask, None)
    writer = RejectedSamples(config, config.rules(), 1)
    rewards = Rewards(total=torch.zeros(2), valid=torch.ones(2, dtype=torch.bool), parts={})
    names = ["ts_1000", "ts_750"]
    (row,) = writer.rows(seen.take(), batch, Shown(), rewards, lambda: names, bands)
    (reason,) = row["reasons"]
    assert reason["value"] == pytest.approx(math.exp(2e-3))
    assert 1 - 6e-4 < reason["lower"] < 1 - 3e-4
    assert 1 + 3e-4 < reason["upper"] < 1 + 6e-4
