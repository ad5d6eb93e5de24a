"""Runs whose clip follows the mismatch, with rollouts that nobody calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import read_rows

from flowgrpo_rc.cli import main
from flowgrpo_rc.losses import auto_clip

RC = "algorithm.rollout_correction"
WARM = 16


@pytest.mark.parametrize("rollout", ["dtype=bf16", "quantization=int8", "quantization=int4"])
def test_noise_passes_the_clip_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: str
) -> None:
    """The learning rate is so small that all of the ratio is noise."""
    monkeypatch.setattr(auto_clip, "WARM_UP", WARM)
    options = [
        f"rollout.{rollout}",
        f"{RC}=bypass_ppo_clip",
        f"{RC}.centered=true",
        "actor.diffusion_loss.clip_ratio=auto:4",
        "actor.diffusion_loss.auto_floor=1e-6",
        "actor.optim.lr=1e-9",
        "actor.ema.enable=false",
        "data.train_batch_size=2",
        "actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=5",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.logger=[]",
        "rollout.val_kwargs.n=8",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]
    assert main(["train", *options]) == 0
    rows = read_rows(tmp_path / "run")[1:]
    assert rows[0]["actor/auto_bound_warm_fraction"] == 0
    assert rows[0]["actor/rollout_corr/pre_update_clip_fraction"] == 0
    warm = [row for row in rows if row["actor/auto_bound_warm_fraction"] == 1]
    assert len(warm) >= 2
    clipped = [row["actor/rollout_corr/pre_update_clip_fraction"] for row in warm]
    assert sum(clipped) / len(clipped) < 0.02
    # The bound is that of this rollout: a few times the mismatch.
    for row in warm:
        mismatch = row["actor/rollout_corr/logprob_abs_diff_p50"]
        assert 2 * mismatch < row["actor/auto_bound_mean"] < 20 * mismatch
