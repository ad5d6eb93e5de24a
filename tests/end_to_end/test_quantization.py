"""Runs with a quantized rollout and an 8-bit optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Train, read_rows
from support.torchao import needs_torchao


@needs_torchao
@pytest.mark.usefixtures("without_compiler")
def test_two_steps_with_an_int8_rollout_and_an_8_bit_optimizer(
    train: Train, tmp_path: Path
) -> None:
    settings = ("rollout.quantization=int8", "actor.optim.name=adamw_8bit", "model.lora_rank=64")
    assert train(*settings) == 0
    row = read_rows(tmp_path / "run")[1]
    assert 0 < row["rollout_corr/logprob_abs_diff_mean"] < 0.01


@needs_torchao
def test_text_with_an_int8_rollout(train_text: Train, tmp_path: Path) -> None:
    mode = "algorithm.rollout_correction.bypass_mode=false"
    assert train_text("rollout.quantization=int8", mode, "trainer.total_training_steps=1") == 0
    assert read_rows(tmp_path / "run")[1]["rollout_corr/logprob_abs_diff_mean"] > 0
