"""A disk that fills up leaves the last checkpoint, and the run goes on when there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import Trained, command, fault, words_of
from support.runs import final_state

from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.training.trainer import Trainer


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 80 MiB, where this machine lets a test mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Fills a disk with one file, up to some bytes that it leaves."""
    room = os.statvfs(folder)
    path = folder / "filler"
    with path.open("wb") as file:
        for _ in range((room.f_bavail * room.f_frsize - leave) // 4096):
            file.write(b"\0" * 4096)
    return path


@fault("the disk is full as the run starts", "it is refused before anything is loaded")
def test_no_room(small: list[str], disk: Path) -> None:
    fill(disk, leave=2**20)
    command(*words_of(small, f"trainer.output_dir={disk / 'run'}")).expect(
        2, "MiB free, a run needs at least"
    )


@fault(
    "the disk fills up during the run", "the last checkpoint stays, and the same command goes on"
)
def test_full_disk(begun: Path, small: list[str], disk: Path, whole: Trained) -> None:
    run = disk / "run"
    shutil.move(begun, run)
    words = words_of(small, f"trainer.output_dir={run}")

    def harm() -> None:
        original = Trainer.train_step

        def train_step(self: Trainer, step: int) -> None:
            if step == 3:
                fill(disk, leave=200_000)
            original(self, step)

        Trainer.train_step = train_step  # type: ignore[method-assign]

    command(*words, harm=harm).expect(1, "No space left on device")
    assert load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).step in (2, 3)
    (disk / "filler").unlink()
    command(*words).expect(0)
    assert final_state(run) == whole.state
