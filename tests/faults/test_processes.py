"""A run of two processes that loses one ends at once, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.faults import Trained, command, fault, some, words_of
from support.launching import alone, wait_for
from support.runs import num_rows, read_rows

TWO = ("trainer.num_processes=2", "trainer.timeout_s=3600")


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have, and so on."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


@fault("one of two processes is killed", "all end at once with a line, and the run goes on")
@pytest.mark.parametrize("number", some([1, 0]))
def test_a_process_is_killed(small: list[str], tmp_path: Path, whole: Trained, number: int) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "flowgrpo_rc", *words_of(small, *TWO)],
        env=alone(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: process.poll() is not None or num_rows(run) >= 2)
    os.kill(children(process.pid)[number], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "was ended by SIGKILL" in said
    assert "Traceback" not in said
    command(*words_of(small)).expect(0)  # a single process
    assert [row["step"] for row in read_rows(run)] == [0, 1, 2, 3]
    assert difference(run, whole.folder) < 0.05  # Adam makes much of the smallest gradients


def difference(run: Path, other: Path) -> float:
    """Returns how far the LoRA of a run is from another's, as a share of the latter's matrix B."""
    name = Path("lora") / "pytorch_lora_weights.safetensors"
    ours, theirs = load_file(run / name), load_file(other / name)
    learned = [key for key in theirs if "lora_B" in key]
    far = torch.cat([(ours[key] - theirs[key]).flatten() for key in learned])
    return float(far.norm() / torch.cat([theirs[key].flatten() for key in learned]).norm())
