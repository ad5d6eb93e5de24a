"""The same command is the same run, whatever else the machine does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import train_command

# The first steps of the bundled job with few samples.
FEW = (
    "data.train_batch_size=2",
    "rollout.n=4",
    "rollout.val_kwargs.n=2",
    "actor.train_n=null",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.total_training_steps=2",
    "trainer.device=cpu",
    "trainer.num_processes=1",
)


@pytest.mark.slow
def test_a_busy_core_changes_no_bit(tmp_path: Path) -> None:
    exported = []
    for program in ("pass", "while True: pass"):
        run = tmp_path / str(len(exported))
        with subprocess.Popen([sys.executable, "-c", program]) as beside:
            try:
                train_command(*FEW, f"trainer.output_dir={run}")
            finally:
                beside.kill()
        exported.append((run / "lora" / "pytorch_lora_weights.safetensors").read_bytes())
    assert exported[0] == exported[1]
