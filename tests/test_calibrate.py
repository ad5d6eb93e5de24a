"""`flowgrpo-rc calibrate`: what it measures, the faults that it names, and the settings that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo_rc.cli import main

FAULTS = {
    "Bf16Latents": "latents",
    "Bf16Input": "latents",
    "Bf16Steps": "latents",
    "Bf16Timestep": "timestep",
    "Guidance": "guidance",
    "Shift": "schedule",
    "LateWindow": "window",
    "LateLogProbs": "window",
    "NoLora": "lora",
    "WeakLora": "lora",
    "StaleWeights": "weights",
}


@pytest.fixture
def calibrate(overrides: list[str], tmp_path: Path) -> Any:
    """Run the command on the random checkpoint with guidance and further overrides; returns calibration.json."""

    def run(*further: str) -> dict[str, Any]:
        out = tmp_path / "calibration"
        settings = [*overrides, "rollout.pipeline.guidance_scale=4.5", "rollout.micro_batch_size_per_gpu=8"]
        assert main(["calibrate", *settings, *further, "--out", str(out), "--overwrite"]) == 0
        return json.loads((out / "calibration.json").read_text())

    return run


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(calibrate: Any, fault: str, dtype: str) -> None:
    found = calibrate(f"rollout.dtype={dtype}", f"rollout.name=faulty_engines.{fault}")
    assert found["diagnosis"]["cause"] == FAULTS[fault], found["diagnosis"]
