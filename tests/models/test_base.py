"""A setting that a model's class does not have is refused before anything is loaded."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler
from support.runs import NAMES, VIDEO
from support.tiny_models import TINY

from flowgrpo_rc.models import base
from flowgrpo_rc.models.sana import Sana

P, V = "rollout.pipeline", "rollout.val_kwargs"
BLUR = "data.negative_prompt=blur"


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("z_image", [f"{P}.max_sequence_length=0"], ["max_sequence_length=0", "1 to 512"]),
        (
            "z_image",
            [f"{P}.guidance_scale=0", f"{V}.guidance_scale=0", BLUR],
            ["data.negative_prompt='blur'", f"{P}.guidance_scale above 0"],
        ),
        ("sana", [f"{V}.guidance_scale=0"], [f"{V}.guidance_scale=0", "1 (none) or more"]),
        (
            "qwen",
            [f"{P}.true_cfg_scale=4", f"{P}.guidance_scale=3"],
            [f"{P}.guidance_scale=3", f"{P}.true_cfg_scale"],
        ),
        (
            "qwen",
            [f"{P}.true_cfg_scale=1", BLUR, f"{P}.guidance_scale=4.5"],
            ["data.negative_prompt='blur'", f"{P}.true_cfg_scale above 1"],
        ),
        ("wan", VIDEO, [f"{P}.num_frames is not set", "WanPipeline"]),
        ("qwen", [f"{P}.true_cfg_scale=1", f"{P}.width=24"], ["width=24", "multiples of 16"]),
        ("wan", [*VIDEO, f"{P}.num_frames=5", f"{P}.height=24"], ["height=24", "multiples of 16"]),
        ("wan", [*VIDEO, f"{P}.num_frames=4"], [f"{P}.num_frames=4", "1, 5, ..."]),
        ("wan", [*VIDEO, f"{P}.num_frames=5", f"{V}.num_frames=4"], [f"{V}.num_frames=4", "1, 5,"]),
        (
            "qwen",
            [f"{P}.true_cfg_scale=1", f"{P}.guidance_scale=4.5", "trainer.suites=[ocr]"],
            ["suite ocr: sampler.guidance_scale=4.5 has no effect"],
        ),
        ("z_image", [f"{V}.height=20"], [f"{V}.height=20", "multiples of 8"]),
        ("sana", [f"{V}.width=0"], [f"{V}.width=0", "multiples of 32"]),
        ("sana", [f"{V}.num_frames=5"], [f"{V}.num_frames=5", "makes images"]),
        (
            "qwen",
            [f"{P}.true_cfg_scale=1", f"{P}.guidance_scale=4.5", f"{V}.guidance_scale=3"],
            [f"{V}.guidance_scale=3", f"{V}.true_cfg_scale"],
        ),
        (
            "schnell",
            [f"{P}.guidance_scale=3.5"],
            [f"{P}.guidance_scale=3.5", "set it to 1", f"{P}.true_cfg_scale"],
        ),
    ],
)
def test_a_setting_without_effect_or_meaning_is_refused_before_loading(
    saved, train, capsys, monkeypatch, name, given, words
):
    folder = saved(NAMES[name])
    capsys.readouterr()  # a checkpoint that is written for the first time shows progress bars
    monkeypatch.setattr(base, "load_weights", Mock(side_effect=AssertionError("loaded")))
    assert train(f"model.path={folder}", *given) == 2
    *again, error = capsys.readouterr().err.splitlines()
    assert all("given" in line for line in again), again
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("name", "scheduler", "given"),
    [
        ("wan", UniPCMultistepScheduler, [*VIDEO, "rollout.pipeline.num_frames=5"]),
        ("sana", DPMSolverMultistepScheduler, []),
    ],
)
def test_a_scheduler_that_is_no_flow_is_refused(train, capsys, tmp_path, name, scheduler, given):
    pipeline = TINY[NAMES[name]].build()
    pipeline.register_modules(scheduler=scheduler())
    pipeline.save_pretrained(tmp_path / name)
    assert train(f"model.path={tmp_path / name}", *given) == 2
    error = capsys.readouterr().err
    assert f"{scheduler.__name__}, does not walk the sigmas of a flow" in error


def test_sana_starts_at_pure_noise_and_keeps_the_other_sigmas_of_its_solver() -> None:
    """There the first of ten `sde` steps would have ten times the noise."""
    stock = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    tiny = TINY["SanaPipeline"]
    pipeline = tiny.build()
    pipeline.register_modules(scheduler=stock)
    spec = tiny.spec("sde", tiny.guided, num_inference_steps=3)
    sigmas, timesteps = Sana(pipeline, torch.device("cpu")).schedule(spec)
    # Evenly from 1 - 1 / 1000 training timesteps to 0, then shifted by 3.
    spaced = np.linspace(0.999, 0, 4)
    wanted = 3 * spaced / (1 + 2 * spaced)
    np.testing.assert_allclose(timesteps, np.floor(1000 * wanted[:-1]))
    wanted[0] = 1
    np.testing.assert_allclose(sigmas, wanted, rtol=1e-6)


def test_a_pipeline_without_adapter_names_those_that_have_one(train, capsys, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    assert train(f"model.path={tmp_path}") == 2
    error = capsys.readouterr().err
    assert "PixArtAlphaPipeline" in error
    assert ", ".join(sorted(TINY)) in error
