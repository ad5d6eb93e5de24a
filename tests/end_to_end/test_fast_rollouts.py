"""Rollouts of fewer evaluations, from shared noise, with a merged LoRA; runs that go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Train, fingerprint, read_rows, without_timings

from flowgrpo_rc.records.checkpoint import load_checkpoint

RC = "algorithm.rollout_correction"
FAST = (
    "rollout.dtype=auto",
    "rollout.merge_lora=true",
    "rollout.algo.sde_window_range=[0,2]",
    "rollout.algo.tail=ab2",
    "rollout.algo.tail_steps=1",
    "rollout.algo.shared_prefix=true",
    "actor.optim.lr_scheduler=constant",
    "trainer.save_freq=1",
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
    settings = (*FAST, *CASES[name])
    runs = [tmp_path / "whole", tmp_path / "resumed"]
    assert train(*settings, "trainer.total_training_steps=3", f"trainer.output_dir={runs[0]}") == 0
    for steps in (1, 3):
        total = f"trainer.total_training_steps={steps}"
        assert train(*settings, total, f"trainer.output_dir={runs[1]}") == 0
    whole, resumed = (load_checkpoint(run / "checkpoints" / "step_3").tensors for run in runs)
    assert {name: fingerprint(part) for name, part in whole.items()} == {
        name: fingerprint(part) for name, part in resumed.items()
    }
    rows = [without_timings(read_rows(run)) for run in runs]
    assert rows[0][-1] == rows[1][-1]
    assert rows[0][-1]["reward/failed_fraction"] == 0
