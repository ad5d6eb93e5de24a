"""Runs whose clip follows the mismatch, with rollouts that nobody calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.marks import slow
from support.runs import Train, read_rows

from flowgrpo_rc.losses import auto_clip
from flowgrpo_rc.losses.base import REFERENCE_CLIP

RC = "algorithm.rollout_correction"
WARM = 16


@pytest.mark.kernels
@pytest.mark.parametrize(
    "rollout", ["dtype=bf16", slow("quantization=int8"), slow("quantization=int4")]
)
def test_noise_passes_the_clip_of_a_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: str
) -> None:
    """The learning rate is so small that all of the ratio is noise."""
    monkeypatch.setattr(auto_clip, "WARM_UP", WARM)
    # The mismatch of this tiny model is far below the band of the recipe.
    monkeypatch.setitem(REFERENCE_CLIP, "gaussian", 1e-6)
    options = [
        f"rollout.{rollout}",
        "rollout.n=6",
        f"{RC}.bypass_mode=true",
        f"{RC}.centered=true",
        "actor.diffusion_loss.clip_ratio=auto:4",
        "actor.optim.lr=1e-9",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_micro_batch_size_per_gpu=12",
        "trainer.total_training_steps=6",
    ]
    assert train(*options) == 0
    rows = read_rows(tmp_path / "run")[1:]
    assert rows[0]["actor/auto_bound_warm_fraction"] == 0
    assert rows[0]["actor/rollout_corr/pre_update_clip_fraction"] == 0
    warm = [row for row in rows if row["actor/auto_bound_warm_fraction"] == 1]
    assert len(warm) >= 3
    clipped = [row["actor/rollout_corr/pre_update_clip_fraction"] for row in warm]
    assert sum(clipped) / len(clipped) < 0.02
    # The bound is that of this rollout: a few times the mismatch.
    for row in warm:
        mismatch = row["actor/rollout_corr/logprob_abs_diff_p50"]
        assert 2 * mismatch < row["actor/auto_bound_mean"] < 20 * mismatch
