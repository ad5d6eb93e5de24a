"""Rollouts of fewer evaluations, from shared noise, with a merged LoRA; runs that go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Train, read_rows, stopped_and_whole

RC = "algorithm.rollout_correction"
FAST = (
    "rollout.dtype=auto",
    "rollout.merge_lora=true",
    "rollout.algo.sde_window_range=[0,2]",
    "rollout.algo.tail=ab2",
    "rollout.algo.tail_steps=1",
    "rollout.algo.shared_prefix=true",
    "trainer.total_training_steps=3",
)
BYPASS = (
    f"{RC}.bypass_mode=true",
    f"{RC}.rollout_rs=token_k1",
    f"{RC}.rollout_rs_threshold=auto:4",
)
CASES = {
    "bypass_some": (*BYPASS, "rollout.algo.sde_type=sde", "rollout.n=6", "actor.train_n=2"),
    "bypass_sliding": (
        *BYPASS,
        "rollout.algo.sde_type=dance_sde",
        "rollout.merge_lora=false",
        "rollout.algo.sde_window_range=[0,4]",
        "rollout.algo.sde_window_interval=1",
        "actor.diffusion_loss.dual_clip=4",
    ),
    "decoupled": (f"{RC}.bypass_mode=false", "rollout.algo.sde_type=cps", f"{RC}.rollout_is=token"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_same_bits(train: Train, tmp_path: Path, name: str) -> None:
    run = stopped_and_whole(train, tmp_path, *FAST, *CASES[name])
    assert read_rows(run)[-1]["reward/failed_fraction"] == 0
