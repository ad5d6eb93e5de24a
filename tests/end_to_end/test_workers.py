"""Rollout workers: they give the bits that the trainer's own engine gives, beside the training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.documented import ROOT
from support.faults import final_state
from support.launching import alone, train_command
from support.ray import needs_ray
from support.runs import WORDS, fingerprint, read_rows
from support.torchao import needs_torchao

from flowgrpo_rc.records.rollout_files import rollout_path

RC = "algorithm.rollout_correction"
TESTS = ROOT / "tests"
MODES = {
    "bypass, bf16": (f"{RC}.bypass_mode=true", "rollout.dtype=bf16"),
    "decoupled, int4": (f"{RC}.bypass_mode=false", "rollout.quantization=int4"),
    # Versions of the LoRA, a state that samples share, means, and chunks of unequal size.
    "ahead": (
        "rollout.staleness=2",
        f"{RC}.bypass_mode=true",
        f"{RC}.centered=true",
        "rollout.algo.sde_window_range=[0,2]",
        "rollout.algo.shared_prefix=true",
        "rollout.micro_batch_size_per_gpu=3",
    ),
}


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


Train = Callable[..., Path]


@pytest.fixture
def train(small: list[str], tmp_path: Path) -> Train:
    """Runs a training in a process of its own; returns its folder."""

    def run(name: str, *settings: str, code: int = 0) -> Path:
        folder = tmp_path / name
        done = train_command(*small, *settings, f"trainer.output_dir={folder}", python_path=TESTS)
        assert done.returncode == code, done.stderr[-3000:]
        return folder

    return run


@needs_ray
@needs_torchao
@pytest.mark.parametrize("mode", MODES)
def test_workers_give_the_bits_of_the_trainer_s_engine(train: Train, mode: str) -> None:
    settings = (*MODES[mode], "trainer.save_rollouts=true")
    whole = train("alone", *settings)
    run = train("workers", *settings, "rollout.workers=2")
    assert final_state(run) == final_state(whole)
    # Also in shape: encoded prompts are there once.
    for step in (1, 2, 3):
        saved, other = (
            load_file(rollout_path(folder / "rollouts", step, 0, 1)) for folder in (run, whole)
        )
        assert fingerprint(saved) == fingerprint(other)
    rows = read_rows(run)[1:]
    assert all(0 < row["workers/busy_fraction"] <= 1 for row in rows)
    assert all(row["workers/mib_received"] > 0 for row in rows)
    assert not any(name.startswith("workers/") for row in read_rows(whole) for name in row)


@needs_ray
def test_text(tmp_path: Path) -> None:
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
    states = []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        done = train_command(
            *settings, f"rollout.workers={workers}", f"trainer.output_dir={folder}"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        states.append(final_state(folder))
    assert states[0] == states[1]


@needs_ray
def test_another_number_of_workers_goes_on(train: Train) -> None:
    whole = train("whole", "rollout.staleness=1")
    settings = ("pieces", "rollout.staleness=1")
    train(*settings, "rollout.workers=2", "trainer.max_time=0.001", code=75)
    train(*settings, "rollout.workers=0", "trainer.max_time=0.001", code=75)
    run = train(*settings, "rollout.workers=1")
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
    script = (
        "import sys; from support.worker_engines import train_and_meet as run; run(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *words],
        env=alone(TESTS),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
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
