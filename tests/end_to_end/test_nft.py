"""DiffusionNFT on the trainer: a run, one that goes on, an evaluation, a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import NFT, Train, final_state, stopped_and_whole

from flowgrpo_rc.cli import main

SETTINGS = (
    *NFT,
    "rollout.algo.tail=ab2",
    "actor.use_kl_loss=true",
    "trainer.total_training_steps=3",
)


def test_a_resumed_run_ends_with_the_same_bits(train: Train, tmp_path: Path) -> None:
    run = stopped_and_whole(train, tmp_path, *SETTINGS)
    tensors, _, rows = final_state(run)
    assert tensors.keys() == {"lora", "ema", "optimizer", "old_policy", "old_policy_counts"}
    assert tensors["old_policy"] != tensors["lora"]
    last = rows[-1]
    assert last["actor/old_decay"] == pytest.approx(0.5)  # after 6 updates, at most 0.5
    assert last["actor/old_deviation"] > 0
    assert last["actor/kl_loss"] > 0
    assert not any("logprob" in name or "clip" in name for name in last)
    assert (run / "report.html").stat().st_size > 10_000
    card = (run / "lora" / "README.md").read_text()
    assert "diffusion_nft, " in card
    assert "the ODE, 4 steps" in card
    assert main(["eval", str(run), "rollout.val_kwargs.n=2"]) == 0
