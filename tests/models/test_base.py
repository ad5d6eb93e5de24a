"""A setting that a model's class does not have is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import UniPCMultistepScheduler
from support.runs import Train
from support.tiny_models import TINY

from flowgrpo_rc.models import base

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


def test_a_wan_with_two_transformers_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipeline = TINY["WanPipeline"].build()
    pipeline.register_modules(transformer_2=pipeline.transformer)
    pipeline.register_to_config(boundary_ratio=0.875)
    pipeline.save_pretrained(tmp_path / "wan22")
    assert train(f"model.path={tmp_path / 'wan22'}", *VIDEO, "rollout.pipeline.num_frames=5") == 2
    error = capsys.readouterr().err
    assert "has a transformer_2" in error
    assert "Wan 2.1" in error


def test_a_wan_whose_scheduler_is_no_flow_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipeline = TINY["WanPipeline"].build()
    pipeline.register_modules(scheduler=UniPCMultistepScheduler())
    pipeline.save_pretrained(tmp_path / "wan")
    assert train(f"model.path={tmp_path / 'wan'}", *VIDEO, "rollout.pipeline.num_frames=5") == 2
    assert "UniPCMultistepScheduler, does not walk the sigmas of a flow" in capsys.readouterr().err


def test_a_pipeline_without_adapter_names_those_that_have_one(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    assert train(f"model.path={tmp_path}") == 2
    error = capsys.readouterr().err
    assert "PixArtAlphaPipeline" in error
    assert ", ".join(sorted(TINY)) in error
