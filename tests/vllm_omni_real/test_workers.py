"""The real vLLM-Omni in a rollout worker, on a CPU: `make test-vllm-omni`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.engine_children import gone
from support.launching import all_gone, marked
from support.runs import final_state

if find_spec("vllm_omni") is None or find_spec("ray") is None:
    pytest.skip("vLLM-Omni or Ray is not installed", allow_module_level=True)


def train(words: Sequence[str], mark: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo_rc.train", *words],
        env=os.environ | {"FLOWGRPO_RC_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def engines(mark: str) -> list[int]:
    """Returns the processes of a run that run vLLM-Omni."""
    title = b"vLLM-Omni"  # it names its process
    return [pid for pid in marked(mark) if title in Path(f"/proc/{pid}/cmdline").read_bytes()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_is_killed(overrides: list[str], tmp_path: Path) -> None:
    """Its engine ends with it, another worker takes its chunk, and the bits are equal."""
    words = [
        *overrides,
        "rollout.name=vllm_omni",
        "rollout.micro_batch_size_per_gpu=3",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    ]
    mark = f"alone_{tmp_path.name}"
    with train([*words, f"trainer.output_dir={tmp_path / 'alone'}"], mark) as alone:
        output, _ = alone.communicate(timeout=600)
    assert alone.returncode == 0, output

    mark = f"workers_{tmp_path.name}"
    checkpoints = tmp_path / "run" / "checkpoints"
    with train([*words, "rollout.workers=1"], mark) as trainer:
        try:
            while not (checkpoints / "step_1").exists():
                assert trainer.poll() is None, "the run ended before its second step"
                time.sleep(0.005)
            (engine,) = engines(mark)
            os.kill(parent_of(engine), signal.SIGKILL)
            assert not (checkpoints / "step_2").exists()
            assert gone(engine)
            output, _ = trainer.communicate(timeout=600)
        finally:
            trainer.kill()
    assert trainer.returncode == 0, output
    assert "a rollout worker was lost (1 of 3 restarts)" in output
    assert all_gone(mark)
    assert final_state(tmp_path / "run") == final_state(tmp_path / "alone")
