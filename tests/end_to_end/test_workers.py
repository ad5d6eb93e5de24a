"""Rollout workers: they give the bits that the trainer's own engine gives, beside the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.documented import ROOT
from support.launching import run_alone, train_command
from support.ray import needs_ray
from support.runs import WORDS, final_state, fingerprint, read_rows
from support.torchao import needs_torchao

from flowgrpo_rc.cli import main
from flowgrpo_rc.records.rollout_files import rollout_path

TESTS = ROOT / "tests"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Overrides of three small steps of the bundled model."""
    words = tmp_path / "words.txt"
    words.write_text("".join(f'"{word}"\n' for word in WORDS))
    return [
        "trainer.num_processes=1",
        "model.lora_rank=4",
        "model.lora_alpha=8",
        f"data.train_files={words}",
        f"data.val_files={words}",
        "data.train_batch_size=4",
        "rollout.n=2",
        "rollout.micro_batch_size_per_gpu=2",
        "rollout.pipeline.num_inference_steps=4",
        "rollout.algo.sde_window_size=2",
        "rollout.algo.sde_window_range=[0,3]",
        "rollout.val_kwargs.num_inference_steps=2",
        "rollout.val_kwargs.n=2",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "actor.optim.lr_scheduler=constant",
        "reward.terms.ocr=null",
        "reward.terms.jpeg.weight=1.0",
        "trainer.total_training_steps=3",
        "trainer.device=cpu",
        "trainer.logger=[]",
    ]


@needs_ray
@needs_torchao
def test_workers_come_and_go_and_change_no_bit(small: list[str], tmp_path: Path) -> None:
    """Two workers take the first step, none the second, one the third.

    The runs have versions of the LoRA, a state that samples share, means, and chunks of unequal
    size.
    """
    settings = [
        *small,
        "rollout.staleness=2",
        "rollout.quantization=int4",
        "algorithm.rollout_correction.centered=true",
        "rollout.algo.sde_window_range=[0,2]",
        "rollout.algo.shared_prefix=true",
        "rollout.micro_batch_size_per_gpu=3",
        "trainer.save_rollouts=true",
    ]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", *settings, f"trainer.output_dir={whole}"]) == 0
    stop = "trainer.max_time=0.001"  # after the first step
    for further, code in (
        (("rollout.workers=2", stop), 75),
        (("rollout.workers=0", stop), 75),
        (("rollout.workers=1",), 0),
    ):
        done = train_command(*settings, *further, f"trainer.output_dir={run}", python_path=TESTS)
        assert done.returncode == code, done.stderr[-3000:]
    assert final_state(run) == final_state(whole)
    # Also in shape: encoded prompts are there once.
    for step in (1, 2, 3):
        saved, other = (
            load_file(rollout_path(folder / "rollouts", step, 0, 1)) for folder in (run, whole)
        )
        assert fingerprint(saved) == fingerprint(other)
    first, second, third = (row for row in read_rows(run) if row["step"])
    assert all(0 < row["workers/busy_fraction"] <= 1 for row in (first, third))
    assert all(row["workers/mib_received"] > 0 for row in (first, third))
    assert not any(name.startswith("workers/") for name in second)


@needs_ray
def test_a_language_model(tmp_path: Path) -> None:
    settings = [
        "--config-name",
        "token_grpo",
        "data.train_batch_size=2",
        "actor.ppo_mini_batch_size=2",
        "rollout.n=4",
        "rollout.val_kwargs.n=4",
        "rollout.micro_batch_size_per_gpu=3",
        "actor.ppo_micro_batch_size_per_gpu=8",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
    ]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", *settings, f"trainer.output_dir={whole}"]) == 0
    done = train_command(*settings, "rollout.workers=2", f"trainer.output_dir={run}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert final_state(run) == final_state(whole)


@needs_ray
def test_a_step_is_trained_while_a_later_one_is_sampled(small: list[str], tmp_path: Path) -> None:
    """The update of step 2 and the sampling of step 3 wait for each other."""
    words = [
        *small,
        "rollout.workers=1",
        "rollout.staleness=1",
        "rollout.name=support.worker_engines.Meeting",
        f"+rollout.engine_kwargs.folder={tmp_path}",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; from support.worker_engines import train_and_meet as run; run(sys.argv[1:])"
    )
    done = run_alone(str(program), str(tmp_path), *words, python_path=TESTS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("met_*")) == ["met_sampling", "met_training"]


def test_a_run_without_workers_needs_no_ray(small: list[str], tmp_path: Path) -> None:
    """A package that cannot be imported stands in its place."""
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray')\n")
    folder = f"trainer.output_dir={tmp_path / 'run'}"
    words = [*small, "trainer.total_training_steps=1", folder]
    done = train_command(*words, python_path=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    words[-2] = "trainer.total_training_steps=2"
    done = train_command(*words, "rollout.workers=1", python_path=tmp_path)
    assert "there is no Ray" in done.stderr
