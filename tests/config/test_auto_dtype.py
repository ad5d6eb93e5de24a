"""`rollout.dtype=auto` becomes a precision before anything else is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.compositions import config_of

from flowgrpo_rc.config import checks
from flowgrpo_rc.config.checks import settled
from flowgrpo_rc.records.checkpoint import Checkpoint, save_checkpoint
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.rollout import faster_dtype as module


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    module.faster_dtype.cache_clear()
    yield
    module.faster_dtype.cache_clear()


def seconds(monkeypatch, *, fp32: float, bf16: float) -> None:
    """Lets products take given times on a clock that only they move."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    class Product:
        def __init__(self, duration: float) -> None:
            self.duration = duration

        def __matmul__(self, other: Product) -> None:
            clock[0] += self.duration

    durations = {torch.float32: fp32, torch.bfloat16: bf16}
    monkeypatch.setattr(module.torch, "ones", lambda *shape, dtype: Product(durations[dtype]))


@pytest.mark.parametrize(
    ("fp32", "bf16", "dtype"), [(1.0, 0.5, "bf16"), (1.0, 1.2, "fp32"), (1.0, 0.9, "fp32")]
)
def test_the_faster_precision_of_a_cpu_is_taken(monkeypatch, fp32, bf16, dtype):
    seconds(monkeypatch, fp32=fp32, bf16=bf16)
    assert module.faster_dtype(torch.device("cpu")) == dtype


def test_a_gpu_samples_in_bf16():
    assert module.faster_dtype(torch.device("cuda")) == "bf16"


def test_a_real_measurement_gives_one_of_the_two():
    config = settled(config_of("rollout.dtype=auto"))
    assert config.rollout.dtype in ("fp32", "bf16")


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_a_run_that_goes_on_keeps_its_precision(tmp_path: Path, monkeypatch, kept: str):
    monkeypatch.setattr(checks, "faster_dtype", lambda device: pytest.fail("measured again"))
    output = f"trainer.output_dir={tmp_path}"
    first = config_of(output, f"rollout.dtype={kept}")
    folder = RunFolder(tmp_path)
    folder.create(asdict(first), torch.device("cpu"), 1)
    state = {"update": {}, "health": {}}
    save_checkpoint(folder.checkpoints, Checkpoint(step=1, tensors={}, state=state), keep=1)
    assert settled(config_of(output, "rollout.dtype=auto")).rollout.dtype == kept


def test_a_given_precision_is_not_measured(monkeypatch):
    monkeypatch.setattr(checks, "faster_dtype", lambda device: pytest.fail("measured"))
    assert settled(config_of("rollout.dtype=fp16")).rollout.dtype == "fp16"
