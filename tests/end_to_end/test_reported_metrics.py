"""Runs report only metrics that docs/metrics.md explains."""

from __future__ import annotations

from pathlib import Path

from metric_names import find
from support.runs import Train, read_rows

from flowgrpo_rc.cli import main


def unknown_metrics(run_dir: Path) -> list[str]:
    names = {name for row in read_rows(run_dir) for name in row} - {"step"}
    assert len(names) > 60
    return sorted(name for name in names if find(name) is None)


def test_the_page_explains_every_metric_of_a_run_in_bypass_mode(
    train: Train, tmp_path: Path
) -> None:
    correction = "algorithm.rollout_correction"
    settings = (
        "bypass_mode=true",
        "rollout_is=sequence",
        "metric_names=both",
        "rollout_rs=[token_k1,step_kl]",
    )
    assert (
        train(
            *(f"{correction}.{s}" for s in settings),
            f"{correction}.rollout_rs_threshold=auto:4",
        )
        == 0
    )
    assert unknown_metrics(tmp_path / "run") == []


def test_the_page_explains_every_metric_of_a_run_in_decoupled_mode(tmp_path: Path) -> None:
    sizes = (
        "data.train_batch_size=2",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=2",
        "rollout.val_kwargs.n=8",
    )
    settings = ("trainer.total_training_steps=1", "rollout.staleness=1", "actor.use_kl_loss=true")
    overrides = [
        *sizes,
        *settings,
        "actor.ppo_micro_batch_size_per_gpu=4",
        f"trainer.output_dir={tmp_path}",
    ]
    correction = "algorithm.rollout_correction"
    overrides += [f"{correction}=decoupled_seq_is_rs", f"{correction}.metric_names=both"]
    assert main(["train", "--config-name", "token_grpo", *overrides]) == 0
    assert unknown_metrics(tmp_path) == []
