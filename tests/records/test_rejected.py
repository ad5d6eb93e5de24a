"""The rejected samples of a run: pictures, texts, reasons in words, and how many are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.builders import diffusion_batch

from flowgrpo_rc.batch import Prompt, Rewards
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.reasons import Reason
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.records.rejected import PICTURES_KEPT, RejectedSamples, in_words
from flowgrpo_rc.records.samples import Shown


def test_reasons_in_words() -> None:
    words = {
        Reason("seq_mean_k1", 1.00031, 0.9998, 1.0002): ": 1.00031, outside 0.9998 to 1.0002",
        Reason("step_kl", 2e-4, None, 1e-4): ": 0.0002, above 0.0001",
        Reason("veto", 0.5, 0.9): ": 0.5, below 0.9",
        Reason("token_k1", 1.5): ": 1.5",
        Reason("mine:f", None): "",
    }
    for reason, text in words.items():
        assert in_words(reason._asdict()) == reason.criterion + text


def step(
    folder: Path, number: int, *, rank: int = 0, count: int = 1, samples: Any = None
) -> list[dict[str, Any]]:
    """Returns the rows of a step of 6 samples; the odd ones are rejected at their second step."""
    difference = 1e-3 * torch.arange(12, dtype=torch.float64).reshape(6, 2)
    kept = torch.ones(6, 2, dtype=torch.bool)
    kept[1::2, 1] = False
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.0025")
    batch = diffusion_batch(torch.zeros(6, 2)).replace(seed=torch.arange(6) + 100)
    seen = Decisions()
    seen.add(batch, difference, batch.step_indices, kept, None)
    images = np.full((6, 8, 12, 3), np.arange(6).reshape(6, 1, 1, 1) * 40, np.uint8)
    shown = Shown(
        [Prompt(text=f"p{i}", index=i) for i in range(6)],
        list(images) if samples is None else samples,
    )
    total = torch.tensor([0.0, 0.1, 0.2, math.nan, 0.4, 0.5])
    rewards = Rewards(total=total, valid=total.isfinite(), parts={})
    writer = RejectedSamples(folder, config, rank=rank, count=count)
    return writer.rows(number, seen.take(), batch, shown, rewards, lambda: ["ts_1000", "ts_750"])


def test_rejected_samples_are_written_with_picture_reason_and_step(tmp_path: Path) -> None:
    rows = step(tmp_path, 3)
    json.dumps(rows, allow_nan=False)
    assert [(row["prompt"], row["timestep"]) for row in rows] == [(f"p{i}", 750) for i in (5, 3, 1)]
    assert [row["log_ratio"] for row in rows] == pytest.approx([0.011, 0.007, 0.003])
    assert [row["reward"] for row in rows] == pytest.approx([0.5, None, 0.1])
    (reason,) = rows[0]["reasons"]
    value = pytest.approx(math.exp(0.011))
    assert reason == {"criterion": "token_k1", "value": value, "lower": 0.5, "upper": 1.0025}
    pixels = [np.unique(np.asarray(Image.open(tmp_path / row["picture"]))).tolist() for row in rows]
    assert pixels == [[200], [120], [40]]


def test_texts_need_no_picture_and_latents_alone_have_none(tmp_path: Path) -> None:
    texts = step(tmp_path, 1, samples=[f"answer {i}" for i in range(6)])
    assert [row["text"] for row in texts] == ["answer 5", "answer 3", "answer 1"]
    latents = step(tmp_path, 1, samples=[None] * 6)
    assert [row["prompt"] for row in latents] == ["p5", "p3", "p1"]
    assert not list(tmp_path.iterdir())


def test_what_is_kept_is_bounded_for_every_process(tmp_path: Path) -> None:
    steps = PICTURES_KEPT // 2 + 3
    for number in range(1, steps + 1):
        rows = step(tmp_path, number, rank=1, count=2)
        assert len(rows) == 2
    step(tmp_path, 1, rank=0, count=2)
    own = sorted(path.name for path in tmp_path.glob("*_process_1_*.png"))
    assert (len(own), own[0]) == (PICTURES_KEPT, "step_000004_process_1_0.png")
    assert len(list(tmp_path.glob("*_process_0_*.png"))) == 2


def test_a_band_that_moves_tells_the_bounds_that_it_had(tmp_path: Path) -> None:
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
    writer = RejectedSamples(tmp_path, config, rank=0, count=1)
    rewards = Rewards(total=torch.zeros(2), valid=torch.ones(2, dtype=torch.bool), parts={})
    names = ["ts_1000", "ts_750"]
    (row,) = writer.rows(3, seen.take(), batch, Shown(), rewards, lambda: names, bands)
    (reason,) = row["reasons"]
    assert reason["value"] == pytest.approx(math.exp(2e-3))
    assert 1 - 6e-4 < reason["lower"] < 1 - 3e-4
    assert 1 + 3e-4 < reason["upper"] < 1 + 6e-4
