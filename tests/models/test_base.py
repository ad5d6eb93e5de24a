"""A setting that a model's class does not have is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, SchedulerMixin, UniPCMultistepScheduler
from support.runs import Train
from support.tiny_models import TINY

from flowgrpo_rc.models import base
from flowgrpo_rc.models.sana import Sana

VIDEO = (
    "reward.terms.jpeg=null",
    "+reward.terms.f={_target_: function, path: 'support.prompts:brightness'}",
)


NAMES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "qwen": "QwenImagePipeline",
    "wan": "WanPipeline",
    "schnell": "flux_schnell",
    "sana": "SanaPipeline",
    "z_image": "ZImagePipeline",
}


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        (
            "sd3",
            ["rollout.pipeline.true_cfg_scale=4"],
            ["rollout.pipeline.true_cfg_scale=4", "rollout.pipeline.guidance_scale"],
        ),
        (
            "sd3",
            ["rollout.val_kwargs.true_cfg_scale=4"],
            ["rollout.val_kwargs.true_cfg_scale=4", "rollout.val_kwargs.guidance_scale"],
        ),
        (
            "sd3",
            ["rollout.pipeline.num_frames=5"],
            ["rollout.pipeline.num_frames=5", "makes images"],
        ),
        (
            "sd3",
            ["rollout.pipeline.max_sequence_length=513"],
            ["max_sequence_length=513", "0 to 512"],
        ),
        (
            "z_image",
            ["rollout.pipeline.max_sequence_length=0"],
            ["max_sequence_length=0", "1 to 512"],
        ),
        (
            "z_image",
            [f"rollout.{key}.guidance_scale=0" for key in ("pipeline", "val_kwargs")]
            + ["data.negative_prompt=blur"],
            ["data.negative_prompt='blur'", "rollout.pipeline.guidance_scale above 0"],
        ),
        (
            "sana",
            ["rollout.val_kwargs.guidance_scale=0"],
            ["rollout.val_kwargs.guidance_scale=0", "1 (none) or more"],
        ),
        (
            "sd3",
            ["rollout.pipeline.true_cfg_scale=0.5"],
            ["rollout.pipeline.true_cfg_scale=0.5", "1 (none) or more"],
        ),
        ("qwen", [], ["rollout.pipeline.true_cfg_scale is not set", "QwenImagePipeline"]),
        (
            "qwen",
            ["rollout.pipeline.true_cfg_scale=4", "rollout.pipeline.guidance_scale=3"],
            ["rollout.pipeline.guidance_scale=3", "rollout.pipeline.true_cfg_scale"],
        ),
        (
            "qwen",
            [
                "rollout.pipeline.true_cfg_scale=1",
                "data.negative_prompt=blur",
                "rollout.pipeline.guidance_scale=4.5",
            ],
            ["data.negative_prompt='blur'", "rollout.pipeline.true_cfg_scale above 1"],
        ),
        (
            "flux",
            ["rollout.pipeline.guidance_scale=3.5", "data.negative_prompt=blur"],
            ["data.negative_prompt='blur'", "rollout.pipeline.true_cfg_scale above 1"],
        ),
        ("wan", VIDEO, ["rollout.pipeline.num_frames is not set", "WanPipeline"]),
        (
            "wan",
            [*VIDEO, "rollout.pipeline.num_frames=0"],
            ["rollout.pipeline.num_frames=0", "at least 1"],
        ),
        (
            "wan",
            ["rollout.pipeline.num_frames=5"],
            [
                "reward.terms.jpeg scores images",
                "makes videos",
                "reward.terms.jpeg=null",
                "function",
            ],
        ),
    ],
)
def test_a_setting_without_effect_is_refused_before_loading(
    saved: Callable[[str], Path],
    train: Train,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    given: list[str],
    words: list[str],
) -> None:
    folder = saved(NAMES[name])
    capsys.readouterr()  # a checkpoint that is written for the first time shows progress bars

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(base.DiffusionPipeline, "from_pretrained", fail)
    assert train(f"model.path={folder}", *given) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("flux", ["rollout.pipeline.height=20"], ["rollout.pipeline.height=20", "multiples of 8"]),
        (
            "qwen",
            ["rollout.pipeline.true_cfg_scale=1", "rollout.pipeline.width=24"],
            ["width=24", "multiples of 16"],
        ),
        (
            "wan",
            [*VIDEO, "rollout.pipeline.num_frames=5", "rollout.pipeline.height=24"],
            ["height=24", "multiples of 16"],
        ),
        (
            "wan",
            [*VIDEO, "rollout.pipeline.num_frames=4"],
            ["rollout.pipeline.num_frames=4", "1, 5, ..."],
        ),
        (
            "schnell",
            ["rollout.pipeline.guidance_scale=3.5"],
            [
                "rollout.pipeline.guidance_scale=3.5",
                "set it to 1",
                "rollout.pipeline.true_cfg_scale",
            ],
        ),
        (
            "schnell",
            ["rollout.val_kwargs.guidance_scale=2"],
            ["rollout.val_kwargs.guidance_scale=2.0"],
        ),
    ],
)
def test_a_setting_that_the_checkpoint_cannot_serve_is_refused(
    saved: Callable[[str], Path],
    train: Train,
    capsys: pytest.CaptureFixture[str],
    name: str,
    given: list[str],
    words: list[str],
) -> None:
    assert train(f"model.path={saved(NAMES[name])}", *given) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("name", "scheduler", "given"),
    [
        ("wan", UniPCMultistepScheduler, [*VIDEO, "rollout.pipeline.num_frames=5"]),
        ("sana", DPMSolverMultistepScheduler, []),
    ],
)
def test_a_scheduler_that_is_no_flow_is_refused(
    train: Train,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    scheduler: type[SchedulerMixin],
    given: list[str],
) -> None:
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


def test_a_pipeline_without_adapter_names_those_that_have_one(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    assert train(f"model.path={tmp_path}") == 2
    error = capsys.readouterr().err
    assert "PixArtAlphaPipeline" in error
    assert ", ".join(sorted(TINY)) in error
