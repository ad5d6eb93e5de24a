"""The loss of docs/extending.md is GRPO-Guard: the same values and gradients, and a calibration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.documented import python_of
from support.gaussian_losses import BYPASS, DECOUPLED, movement, three_steps, value_and_gradient

from flowgrpo_rc import DiffusionLossConfig, LossConfig, RolloutCorrectionConfig
from flowgrpo_rc.cli import main


@pytest.fixture(autouse=True)
def my_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's first block as the reader's file."""
    (tmp_path / "my_guard.py").write_text(python_of("extending.md", "class MyGuard"))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_guard", None)


def config(correction: RolloutCorrectionConfig, mode: str, **options: float) -> LossConfig:
    section = DiffusionLossConfig(loss_mode=mode, clip_ratio=0.01, options=options)
    section.validate()
    assert section.loss().needs_means
    return LossConfig(rollout_correction=correction, diffusion_loss=section)


@pytest.mark.parametrize("correction", [DECOUPLED, BYPASS], ids=["decoupled", "bypass"])
def test_values_gradients_and_metrics_are_the_built_in_s(
    correction: RolloutCorrectionConfig,
) -> None:
    given = three_steps()
    theta = movement()
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[2, 1] = False
    batch = given.batch.replace(rejection_mask=mask)
    own = value_and_gradient(config(correction, "my_guard.MyGuard"), given, theta, batch)
    built_in = value_and_gradient(config(correction, "grpo_guard"), given, theta, batch)
    assert own[0] == built_in[0]
    assert torch.equal(own[1], built_in[1])
    assert own[2] == built_in[2]
    assert 0 < own[2]["clip_fraction"] < 1


def test_its_option_widens_the_upper_edge() -> None:
    given = three_steps()
    theta = movement(0.3)
    narrow, wide = (
        value_and_gradient(
            config(DECOUPLED, "my_guard.MyGuard", higher=higher), given, theta, given.batch
        )[2]
        for higher in (1.0, 3.0)
    )
    assert wide["clip_fraction_higher"] < narrow["clip_fraction_higher"]
    assert wide["clip_fraction_lower"] == narrow["clip_fraction_lower"] > 0


@pytest.mark.slow
def test_a_calibration_sets_its_bound(overrides: list[str], tmp_path: Path) -> None:
    """On its own log-ratio and in bypass mode, as the class says."""
    out = tmp_path / "calibrated"
    given = ["actor.diffusion_loss.loss_mode=my_guard.MyGuard", "rollout.dtype=bf16"]
    options = ["--prompts", "1", "--out", str(out), "--name", "own"]
    assert main(["calibrate", *options, *overrides, *given]) == 0
    text = (out / "calibration" / "own.yaml").read_text()
    assert "my log-ratio" in text
    tree = yaml.safe_load(text)
    assert tree["actor"]["diffusion_loss"]["clip_ratio"] >= 2e-6
    assert tree["algorithm"]["rollout_correction"]["bypass_mode"] is True
