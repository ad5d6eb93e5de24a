"""A run and a calibration with the loss of docs/extending.md, named on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from support.documented import python_of
from support.runs import Train, final_state

from flowgrpo_rc.cli import main

LOSS = "actor.diffusion_loss"


@pytest.fixture(autouse=True)
def my_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's first block as the reader's file."""
    (tmp_path / "my_guard.py").write_text(python_of("extending.md", "class MyGuard"))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_guard", None)


@pytest.mark.parametrize("bypass", [False, True])
def test_a_run_is_the_built_in_s(train: Train, tmp_path: Path, bypass: bool) -> None:
    """Two steps whose rollout is bf16: metrics and LoRA are equal, bit for bit."""
    states = []
    for mode in ("my_guard.MyGuard", "grpo_guard"):
        options = [f"{LOSS}.loss_mode={mode}", f"algorithm.rollout_correction.bypass_mode={bypass}"]
        folder = tmp_path / mode
        assert train(*options, "rollout.dtype=bf16", f"trainer.output_dir={folder}") == 0
        states.append(final_state(folder))
    assert states[0] == states[1]
    assert states[0][2][-1]["actor/step_kl_max"] > 0


def test_its_option_is_checked_before_anything_is_loaded(
    train: Train, capsys: pytest.CaptureFixture
) -> None:
    mode = f"{LOSS}.loss_mode=my_guard.MyGuard"
    assert train(mode, f"{LOSS}.highr=2", "--dry-run") == 2
    assert "did you mean 'higher'" in capsys.readouterr().err
    assert train(mode, f"{LOSS}.higher=-1", "--dry-run") == 2
    assert "higher=-1: give a number above 0" in capsys.readouterr().err
    assert train(mode, f"{LOSS}.higher=2", "--dry-run") == 0


def test_a_calibration_sets_its_bound(overrides: list[str], tmp_path: Path) -> None:
    """On its own log-ratio and in bypass mode, as the class says."""
    out = tmp_path / "calibrated"
    given = [f"{LOSS}.loss_mode=my_guard.MyGuard", "rollout.dtype=bf16"]
    options = ["--prompts", "1", "--out", str(out), "--name", "own"]
    assert main(["calibrate", *options, *overrides, *given]) == 0
    text = (out / "calibration" / "own.yaml").read_text()
    assert "my log-ratio" in text
    tree = yaml.safe_load(text)
    assert tree["actor"]["diffusion_loss"]["clip_ratio"] >= 2e-6
    assert tree["algorithm"]["rollout_correction"]["bypass_mode"] is True
