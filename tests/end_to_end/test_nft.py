"""DiffusionNFT on the trainer: a run, one that goes on, an evaluation, a report; commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Train, fingerprint, read_rows, without_timings

from flowgrpo_rc.cli import main
from flowgrpo_rc.records.checkpoint import load_checkpoint

SETTINGS = (
    "rollout.algo.sde_window_size=0",
    "rollout.algo.sde_window_range=null",
    "rollout.algo.noise_level=0.7",
    "rollout.algo.tail_steps=null",
    "rollout.algo.tail=ab2",
    "actor.diffusion_loss.loss_mode=diffusion_nft",
    "actor.diffusion_loss.times=2",
    "actor.diffusion_loss.old_decay_rate=0.1",
    "actor.use_kl_loss=true",
    "algorithm.rollout_correction=disabled",
    "actor.optim.lr_scheduler=constant",
    "trainer.save_freq=1",
)


def test_a_resumed_run_ends_with_the_same_bits(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs = [tmp_path / "whole", tmp_path / "resumed"]
    assert train(*SETTINGS, "trainer.total_training_steps=3", f"trainer.output_dir={runs[0]}") == 0
    for steps in (1, 3):
        total = f"trainer.total_training_steps={steps}"
        assert train(*SETTINGS, total, f"trainer.output_dir={runs[1]}") == 0
    whole, resumed = (load_checkpoint(run / "checkpoints" / "step_3").tensors for run in runs)
    assert {"lora", "ema", "optimizer", "old_policy", "old_policy_counts"} == set(whole)
    assert {name: fingerprint(part) for name, part in whole.items()} == {
        name: fingerprint(part) for name, part in resumed.items()
    }
    rows = [without_timings(read_rows(run)) for run in runs]
    assert rows[0][-1] == rows[1][-1]
    last = rows[0][-1]
    assert last["actor/old_decay"] == pytest.approx(0.5)  # after 6 updates, at most 0.5
    assert last["actor/old_deviation"] > 0
    assert last["actor/kl_loss"] > 0
    assert not any("logprob" in name or "clip" in name for name in last)
    assert whole["old_policy"].keys() == whole["lora"].keys()
    assert (runs[0] / "report.html").stat().st_size > 10_000
    card = (runs[0] / "lora" / "README.md").read_text()
    assert "diffusion_nft, " in card
    assert "the ODE, 4 steps" in card
    capsys.readouterr()
    assert main(["eval", str(runs[0]), "rollout.val_kwargs.n=2"]) == 0


def test_there_is_nothing_to_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["calibrate", "--config-name", "tiny_ocr_nft", "--out", str(tmp_path)]) == 2
    assert "there is no mismatch to calibrate for" in capsys.readouterr().err
