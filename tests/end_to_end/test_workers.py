"""Rollout workers: they give the bits that the trainer's own engine gives, beside the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.documented import ROOT
from support.launching import run_alone, train_command
from support.ray import needs_ray
from support.runs import SMALL_TEXT, STOP, final_state, fingerprint, read_rows
from support.torchao import needs_torchao

from flowgrpo_rc import assets
from flowgrpo_rc.cli import main
from flowgrpo_rc.records.rollout_files import rollout_path
from flowgrpo_rc.records.samples import read_grid

TESTS = ROOT / "tests"


@pytest.fixture
def small(overrides: list[str]) -> list[str]:
    """Overrides of three small steps of the bundled model."""
    return [
        *overrides,
        f"model.path={assets.path('tiny_glyph_sd3')}",
        "rollout.dtype=auto",
        "rollout.micro_batch_size_per_gpu=2",
        "rollout.val_kwargs.n=2",
        "actor.optim.lr_scheduler=constant",
        "trainer.num_processes=1",
        "trainer.total_training_steps=3",
        "trainer.logger=[]",
    ]


@pytest.mark.slow
@needs_ray
@needs_torchao
def test_workers_come_and_go_and_change_no_bit(small: list[str], tmp_path: Path) -> None:
    """Two workers take the first step, none the others.

    The runs have versions of the LoRA, blocks that are used again, a state that samples share,
    means, and chunks of unequal size.
    """
    settings = [
        *small,
        "rollout.staleness=2",
        "rollout.quantization=int4",
        "rollout.cache.every=2",
        "rollout.cache.window=true",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.centered=true",
        "rollout.algo.sde_window_range=[0,2]",
        "rollout.algo.shared_prefix=true",
        "rollout.val_kwargs.height=48",
        "rollout.micro_batch_size_per_gpu=3",
        "trainer.save_rollouts=true",
    ]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", *settings, f"trainer.output_dir={whole}"]) == 0
    command = (*settings, f"trainer.output_dir={run}")
    for workers, stop, code in ((2, [STOP], 75), (0, [], 0)):
        words = (*command, f"rollout.workers={workers}", *stop)
        train_command(*words, python_path=TESTS, code=code)
    assert final_state(run) == final_state(whole)
    # Evaluation is the trainer's, at a size of its own.
    pictures = [folder / "samples" / "step_000003.png" for folder in (run, whole)]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert {tile.image.size for tile in read_grid(pictures[0])} == {(2 * 64, 2 * 48)}  # enlarged
    # Also in shape: encoded prompts are there once.
    for step in (1, 2, 3):
        saved, other = (
            load_file(rollout_path(folder / "rollouts", step, 0, 1)) for folder in (run, whole)
        )
        assert fingerprint(saved) == fingerprint(other)
    first, second, third = (row for row in read_rows(run) if row["step"])
    assert 0 < first["workers/busy_fraction"] <= 1
    assert first["workers/mib_received"] > 0
    assert not any(name.startswith("workers/") for row in (second, third) for name in row)


@pytest.mark.slow
@needs_ray
def test_a_language_model(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = (*SMALL_TEXT, "rollout.micro_batch_size_per_gpu=3")
    assert main(["train", *settings, f"trainer.output_dir={whole}"]) == 0
    train_command(*settings, "rollout.workers=1", f"trainer.output_dir={run}")
    assert final_state(run) == final_state(whole)


@pytest.mark.slow
@needs_ray
def test_a_step_is_trained_while_a_later_one_is_sampled(small: list[str], tmp_path: Path) -> None:
    """The update of step 2 and the sampling of step 3 wait for each other."""
    words = [
        *small,
        "rollout.workers=1",
        "rollout.staleness=1",
        "rollout.name=support.worker_engines.Meeting",
        f"+rollout.engine_kwargs.folder={tmp_path}",
    ]
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; from support.worker_engines import train_and_meet as run; run(sys.argv[1:])"
    )
    run_alone(str(program), str(tmp_path), *words, python_path=TESTS)
    assert sorted(path.name for path in tmp_path.glob("met_*")) == ["met_sampling", "met_training"]


@pytest.mark.slow
def test_a_run_without_workers_needs_no_ray(small: list[str], tmp_path: Path) -> None:
    """A package that cannot be imported stands in its place."""
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray')\n")
    train_command(*small, "trainer.total_training_steps=1", python_path=tmp_path)
    done = train_command(*small, "rollout.workers=1", python_path=tmp_path, code=None)
    assert "there is no Ray" in done.stderr
