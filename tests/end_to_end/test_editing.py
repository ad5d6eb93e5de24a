"""Editing on the trainer: a run that goes on, and one that trains on saved samples, bit for bit."""

from __future__ import annotations

from pathlib import Path

from support.runs import fingerprint

from flowgrpo_rc.cli import main
from flowgrpo_rc.records.checkpoint import load_checkpoint

SMALL = (
    "--config-name",
    "tiny_edit",
    "trainer.num_processes=1",
    "data.train_batch_size=2",
    "rollout.n=2",
    "rollout.micro_batch_size_per_gpu=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.optim.lr_scheduler=constant",
    "actor.diffusion_loss.clip_ratio=1e-3",  # an auto clip follows new samples alone
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.logger=[]",
)


def test_resumed_and_replayed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    whole, resumed, replayed = (tmp_path / name for name in ("whole", "resumed", "replayed"))

    def train(folder: Path, steps: int, *overrides: str) -> None:
        own = (f"trainer.total_training_steps={steps}", f"trainer.output_dir={folder}")
        assert main(["train", *SMALL, *own, *overrides]) == 0

    train(whole, 2, "trainer.save_rollouts=true")
    train(resumed, 1)
    train(resumed, 2)
    train(replayed, 2, f"data.replay_dir={whole}")
    ends = [load_checkpoint(run / "checkpoints" / "step_2") for run in (whole, resumed, replayed)]
    wanted, *others = ({name: fingerprint(t) for name, t in end.tensors.items()} for end in ends)
    assert others == [wanted, wanted]
    assert (
        fingerprint(load_checkpoint(resumed / "checkpoints" / "step_1").tensors["lora"])
        != (wanted["lora"])
    )
