"""Records of other processes: wandb, tensorboard, and a checkpoint on a full disk."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from support.launching import launch_environment

from flowgrpo_rc.records.checkpoint import load_checkpoint

RUN_TRACKERS = """
import sys
from pathlib import Path
from accelerate import Accelerator
from PIL import Image
from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers
logger, run_dir = sys.argv[1], Path(sys.argv[2])
loggers = accelerate_loggers(["console", logger])
accelerator = Accelerator(cpu=True, log_with=loggers, project_dir=run_dir)
config = {"model": {"path": "tiny_model"}, "reward": {"api_key": "hunter2"}}
config["reward"]["terms"] = {"mine": {"weight": 2.0, "note": "hunter5"}, "jpeg": None}
trackers = Trackers(
    accelerator, project_name="proj", experiment_name="exp", run_dir=run_dir, config=config
)
trackers.log(0, {"val/reward": 0.25})
trackers.log_image(0, "samples", Image.new("RGB", (16, 8), "red"))
trackers.log(1, {"reward/mean": 0.5, "actor/pg_loss": float("nan")})
trackers.alert(1, "kl is outside its bounds")
trackers.finish()
"""


def run_trackers(logger: str, run_dir: Path) -> list[Path]:
    own = {"WANDB_MODE": "offline", "WANDB_API_KEY": "hunter4" * 6, "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", RUN_TRACKERS, logger, str(run_dir), "reward.api_key=hunter3"]
    subprocess.run(
        command,
        env=launch_environment() | own,
        check=True,
        capture_output=True,
        timeout=600,
        cwd=run_dir,
    )
    return [path for path in run_dir.rglob("*") if path.is_file()]


def test_wandb_offline_records_numbers_and_images_and_no_secret(tmp_path: Path) -> None:
    files = run_trackers("wandb", tmp_path)
    (record,) = [path for path in files if path.suffix == ".wandb"]
    content = record.read_bytes()
    expected = b"val/reward", b"reward/mean", b"tiny_model", b"mine", b"exp", b"kl is outside its"
    assert all(word in content for word in expected)
    assert any(path.suffix == ".png" for path in files)
    assert not any(b"hunter" in path.read_bytes() for path in files)
    identity = (tmp_path / "wandb_id").read_text()
    assert re.fullmatch(r"[0-9a-f]{16}", identity)
    assert record.name == f"run-{identity}.wandb"


def test_tensorboard_records_numbers_and_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = [path for path in run_trackers("tensorboard", tmp_path) if "tfevents" in path.name]
    found = EventAccumulator(str(events.parent)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("val/reward")] == [(0, 0.25)]
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(1, 0.5)]
    (image,) = found.Images("samples")
    assert (image.width, image.height) == (16, 8)


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit of the file size stands for the full disk: the write fails half-way."""
    program = """
        import resource, signal, sys, torch
        from pathlib import Path
        from flowgrpo_rc.records.checkpoint import *

        def save(step, size):
            tensors = {"lora": {"a": torch.zeros(size)}}
            checkpoint = Checkpoint(step=step, tensors=tensors, state={})
            save_checkpoint(Path(sys.argv[1]), checkpoint, keep=2)

        save(1, 4)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            save(2, 9999)
        except CheckpointError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "step_2" in done.stdout
    assert "free some space" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert load_checkpoint(tmp_path / "step_1").step == 1
