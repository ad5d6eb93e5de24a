"""A run of two processes that loses one ends at once, and goes on with two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.faults import Trained, fault, words_of
from support.launching import alone, wait_for
from support.runs import read_rows

TWO = ("trainer.num_processes=2", "trainer.timeout_s=3600")


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo_rc", *words],
        env=alone(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have, and so on."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


@fault("one of two processes is killed", "all end at once with a line; the same command goes on")
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_is_killed(small: list[str], tmp_path: Path, whole: Trained, number: int) -> None:
    run = tmp_path / "run"
    words = words_of(small, *TWO)
    first = start(words)
    rows = run / "metrics.jsonl"
    wait_for(lambda: first.poll() is not None or (rows.exists() and len(read_rows(run)) >= 2))
    os.kill(children(first.pid)[number], signal.SIGKILL)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 1, said
    assert "was ended by SIGKILL" in said
    assert "Traceback" not in said
    second = start(words)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert [row["step"] for row in read_rows(run)] == [0, 1, 2, 3]
    assert difference(run, whole.folder) < 0.05  # Adam makes much of the smallest gradients


def difference(run: Path, other: Path) -> float:
    """Returns how far the LoRA of a run is from another's, as a share of the latter's matrix B."""
    name = Path("lora") / "pytorch_lora_weights.safetensors"
    ours, theirs = load_file(run / name), load_file(other / name)
    learned = [key for key in theirs if "lora_B" in key]
    far = torch.cat([(ours[key] - theirs[key]).flatten() for key in learned])
    return float(far.norm() / torch.cat([theirs[key].flatten() for key in learned]).norm())
