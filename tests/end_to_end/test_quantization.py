"""Runs with a quantized rollout, with quantized training weights, and an 8-bit optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Train, Trained, read_rows, stopped_and_whole
from support.torchao import needs_torchao


@needs_torchao
@pytest.mark.usefixtures("without_compiler")
def test_two_steps_with_an_int8_rollout_and_an_8_bit_optimizer(
    train: Train, tmp_path: Path
) -> None:
    settings = ("rollout.quantization=int8", "actor.optim.name=adamw_8bit", "model.lora_rank=64")
    assert train(*settings, "trainer.total_training_steps=1") == 0
    row = read_rows(tmp_path / "run")[1]
    assert 0 < row["rollout_corr/logprob_abs_diff_mean"] < 0.01


@pytest.mark.slow
@needs_torchao
def test_text_with_an_int8_rollout(train_text: Train, tmp_path: Path) -> None:
    mode = "algorithm.rollout_correction.bypass_mode=false"
    assert train_text("rollout.quantization=int8", mode, "trainer.total_training_steps=1") == 0
    assert read_rows(tmp_path / "run")[1]["rollout_corr/logprob_abs_diff_mean"] > 0


INT8 = "model.quantization=int8"
DIFFERENCE = "rollout_corr/logprob_abs_diff_mean"


@pytest.mark.slow
def test_quantized_training_weights_replay_exactly_and_go_on(train: Train, tmp_path: Path) -> None:
    """The reference policy and the recomputed activations have the same weights."""
    again = "model.gradient_checkpointing=true"
    run = stopped_and_whole(train, tmp_path, INT8, "actor.use_kl_loss=true", again)
    rows = [row for row in read_rows(run) if DIFFERENCE in row]
    assert [row[DIFFERENCE] for row in rows] == [0.0, 0.0]
    assert rows[-1]["actor/kl_loss"] > 0
    card = (run / "lora" / "README.md").read_text()
    assert "weights rounded to int8. On the full weights its scores may differ" in card
    assert "training fp32 with int8 weights" in card


@pytest.mark.slow
def test_samples_of_full_weights_are_corrected(
    train: Train, trained: Trained, tmp_path: Path
) -> None:
    replay = f"data.replay_dir={trained('trainer.save_rollouts=true')}"
    assert train(INT8, replay, "algorithm.rollout_correction.rollout_is=token") == 0
    row = read_rows(tmp_path / "run")[1]
    assert 1e-7 < row[DIFFERENCE] < 0.01
    assert 0.999 < row["rollout_corr/rollout_is_eff_sample_size"] < 1
