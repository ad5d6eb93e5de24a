"""Editing on the trainer: a run that goes on, and one that trains on saved samples, bit for bit."""

from __future__ import annotations

from pathlib import Path

from support.runs import final_state, read_rows, stopped_and_whole

from flowgrpo_rc.cli import main

SMALL = (
    "--config-name",
    "tiny_edit",
    "trainer.num_processes=1",
    "data.train_batch_size=2",
    "rollout.n=2",
    "rollout.micro_batch_size_per_gpu=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.diffusion_loss.clip_ratio=1e-3",  # an auto clip follows new samples alone
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=2",
    "trainer.logger=[]",
)


def test_resumed_and_replayed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    def train(*further: str) -> int:
        return main(["train", *SMALL, *further])

    saved = stopped_and_whole(train, tmp_path, "trainer.save_rollouts=true")
    replayed = tmp_path / "replayed"
    assert train(f"data.replay_dir={saved}", f"trainer.output_dir={replayed}") == 0
    assert final_state(replayed)[0] == final_state(saved)[0]
    assert all(row["actor/grad_norm"] > 0 for row in read_rows(saved))
