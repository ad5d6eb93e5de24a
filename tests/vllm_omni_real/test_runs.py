"""Whole runs of the training command on the bundled model, with the real vLLM-Omni on a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.runs import read_rows, without_timings
from torch import Tensor

if find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni is not installed", allow_module_level=True)


def documented_commands() -> list[list[str]]:
    """Returns the overrides of the documented training commands for vLLM-Omni, without their
    output folder.
    """
    text = (Path(__file__).parents[2] / "docs" / "scaling_out.md").read_text().replace("\\\n", " ")
    start = ".venv-vllm-omni/bin/flowgrpo-rc train "
    lines = [
        line.removeprefix(start).split() for line in text.splitlines() if line.startswith(start)
    ]
    return [[part for part in line if not part.startswith("trainer.output_dir=")] for line in lines]


BYPASS, DECOUPLED = documented_commands()
SMALL = """data.train_batch_size=2 rollout.n=4 rollout.micro_batch_size_per_gpu=8
    rollout.val_kwargs.n=16 actor.ppo_mini_batch_size=2 actor.ppo_micro_batch_size_per_gpu=4
    trainer.save_freq=2 trainer.device=cpu"""


def command(folder: Path, *overrides: str, launcher: Sequence[str] = ()) -> list[str]:
    words = ["-m", "flowgrpo_rc.train", *overrides, *SMALL.split(), f"trainer.output_dir={folder}"]
    return [sys.executable, *launcher, *words]


def train(folder: Path, *overrides: str, launcher: Sequence[str] = ()) -> list[dict[str, Any]]:
    subprocess.run(command(folder, *overrides, launcher=launcher), check=True, timeout=1800)
    return read_rows(folder)


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "lora" / "pytorch_lora_weights.safetensors")


@pytest.fixture(scope="module")
def diffusers_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "diffusers"
    train(folder, *DECOUPLED, "rollout.name=diffusers")
    return folder


def engine_of(trainer: int) -> int:
    """Returns the child of a trainer's process that has a session of its own: the engine."""
    tasks = Path(f"/proc/{trainer}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    (engine,) = [child for child in children if os.getsid(child) == child]
    return engine


def test_decoupled_training_survives_the_death_of_its_engine(diffusers_run, tmp_path):
    """The engine is killed after the fifth step; it is started again, and the run goes on."""
    folder = tmp_path / "run"
    words = [*DECOUPLED, "+rollout.engine_kwargs.max_restarts=1"]
    with subprocess.Popen(command(folder, *words), stderr=subprocess.PIPE, text=True) as trainer:
        try:
            while not (folder / "metrics.jsonl").exists() or len(read_rows(folder)) < 6:
                assert trainer.poll() is None, "the run ended before the fifth step"
                time.sleep(0.1)
            os.kill(engine_of(trainer.pid), signal.SIGKILL)
            began = time.monotonic()
            _, errors = trainer.communicate(timeout=600)
        finally:
            trainer.kill()
    print(f"ended {time.monotonic() - began:.1f} s after kill -9")
    assert trainer.returncode == 0, errors
    assert "it is started again (engine_kwargs.max_restarts allows 0 more)" in errors
    rows = read_rows(folder)
    expected = read_rows(diffusers_run)
    assert [row["step"] for row in rows] == list(range(11))
    assert [set(row) for row in without_timings(rows)] == [
        set(row) for row in without_timings(expected)
    ]
    gaps = [row["rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]]
    print(f"fp32 engine: mean |difference| of log-probs {max(gaps):.1e}")
    assert max(gaps) < 1e-6
    for row, other in zip(rows[:3], expected[:3], strict=True):
        for name in ("reward/mean", "val/reward", "advantages/std"):
            assert row.get(name) == pytest.approx(other.get(name), abs=0.02), (row["step"], name)
    assert (folder / "report.html").stat().st_size > 10_000
    mine = exported(folder)
    theirs = exported(diffusers_run)
    assert mine.keys() == theirs.keys()
    distance = max((mine[name] - theirs[name]).abs().max().item() for name in mine)
    print(f"LoRA after ten steps: {distance:.1e} from that of the diffusers engine")
    assert distance < 1e-3


def test_bypass_training_shows_the_mismatch_of_a_bf16_engine(diffusers_run, tmp_path):
    rows = train(tmp_path / "run", *BYPASS, "rollout.dtype=bf16")
    assert [row["step"] for row in rows] == list(range(11))
    gaps = [row["actor/rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]]
    print(f"bf16 engine: mean |difference| of log-probs {min(gaps):.1e} to {max(gaps):.1e}")
    assert all(1e-5 < gap < 1e-2 for gap in gaps)
    assert rows[0]["val/reward"] == pytest.approx(read_rows(diffusers_run)[0]["val/reward"])
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_two_ranks_have_an_engine_each(diffusers_run: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    rows = train(tmp_path / "run", *DECOUPLED, "trainer.total_training_steps=2", launcher=launcher)
    expected = read_rows(diffusers_run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["reward/mean"] == pytest.approx(expected[1]["reward/mean"], abs=0.02)
    assert max(row["rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]) < 1e-6
