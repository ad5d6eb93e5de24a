"""The loss of docs/add_a_loss.md is GRPO-Guard: the same values, gradients and run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.documented import blocks
from support.gaussian_losses import BYPASS, DECOUPLED, movement, three_steps, value_and_gradient
from support.runs import Train, read_rows, without_timings

from flowgrpo_rc import DiffusionLossConfig, LossConfig, RolloutCorrectionConfig

LOSS = "actor.diffusion_loss"


@pytest.fixture(autouse=True)
def my_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's first block as the reader's file."""
    code = next(block for block in blocks("python") if block.page.name == "add_a_loss.md")
    (tmp_path / "my_guard.py").write_text(code.text)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_guard", None)


def config(correction: RolloutCorrectionConfig, mode: str, **options: float) -> LossConfig:
    section = DiffusionLossConfig(loss_mode=mode, clip_ratio=0.01, options=options)
    section.validate()
    assert section.needs_means
    return LossConfig(rollout_correction=correction, diffusion_loss=section)


@pytest.mark.parametrize("correction", [DECOUPLED, BYPASS], ids=["decoupled", "bypass"])
def test_values_gradients_and_metrics_are_the_built_in_s(
    correction: RolloutCorrectionConfig,
) -> None:
    given, theta = three_steps(), movement()
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
    given, theta = three_steps(), movement(0.3)
    narrow, wide = (
        value_and_gradient(
            config(DECOUPLED, "my_guard.MyGuard", higher=higher), given, theta, given.batch
        )[2]
        for higher in (1.0, 3.0)
    )
    assert wide["clip_fraction_higher"] < narrow["clip_fraction_higher"]
    assert wide["clip_fraction_lower"] == narrow["clip_fraction_lower"] > 0


@pytest.mark.parametrize("bypass", [False, True])
def test_a_run_is_the_built_in_s(train: Train, tmp_path: Path, bypass: bool) -> None:
    """Two steps whose rollout is bf16: metrics and LoRA are equal, bit for bit."""
    runs = {}
    for name, mode in (("own", "my_guard.MyGuard"), ("built_in", "grpo_guard")):
        folder = tmp_path / name
        options = [f"{LOSS}.loss_mode={mode}", "rollout.dtype=bf16"]
        options += [f"algorithm.rollout_correction.bypass_mode={bypass}"]
        assert train(*options, f"trainer.output_dir={folder}") == 0
        (lora,) = (folder / "lora").glob("*.safetensors")
        runs[name] = (without_timings(read_rows(folder)), load_file(lora))
    assert runs["own"][0] == runs["built_in"][0]
    assert runs["own"][0][-1]["actor/step_kl_max"] > 0
    assert all(torch.equal(runs["own"][1][key], runs["built_in"][1][key]) for key in runs["own"][1])


def test_its_option_is_checked_before_anything_is_loaded(
    train: Train, capsys: pytest.CaptureFixture
) -> None:
    mode = f"{LOSS}.loss_mode=my_guard.MyGuard"
    assert train(mode, f"{LOSS}.highr=2", "--dry-run") == 2
    assert "did you mean 'higher'" in capsys.readouterr().err
    assert train(mode, f"{LOSS}.higher=-1", "--dry-run") == 2
    assert "higher=-1: give a number above 0" in capsys.readouterr().err
    assert train(mode, f"{LOSS}.higher=2", "--dry-run") == 0
