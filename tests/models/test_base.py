"""Settings that a model's class or its checkpoint does not have are refused before weights load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from support.runs import NAMES
from support.tiny_models import TINY, VARIANTS

from flowgrpo_rc.models.architecture import build_architecture
from flowgrpo_rc.models.base import adapters_by_pipeline
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.sana import Sana
from flowgrpo_rc.rollout.check_model import check_model
from flowgrpo_rc.rollout.config import EvaluationConfig, PipelineConfig, RolloutConfig

P, V = "rollout.pipeline", "rollout.val_kwargs"
TWO = "WanPipeline+transformer_2"
QWEN = {"true_cfg_scale": 1.0}


@pytest.mark.parametrize(
    ("name", "pipeline", "held_out", "words"),
    [
        ("z_image", {"max_sequence_length": 0}, {}, "max_sequence_length=0.*1 to 512"),
        ("sana", {}, {"guidance_scale": 0}, rf"{V}.guidance_scale=0.*1 \(none\) or more"),
        ("sana", {}, {"num_frames": 5}, rf"{V}.num_frames=5 .*makes images"),
        ("qwen", QWEN | {"guidance_scale": 3}, {}, rf"{P}.guidance_scale=3.*{P}.true_cfg_scale"),
        ("qwen", QWEN, {"guidance_scale": 3}, rf"{V}.guidance_scale=3.*{V}.true_cfg_scale"),
        ("qwen", {}, {}, rf"{P}.true_cfg_scale is not set"),
        ("wan", {}, {}, rf"{P}.num_frames is not set.*WanPipeline"),
        ("wan", {"guidance_scale_2": 3}, {}, rf"{P}.guidance_scale_2=3 .*one transformer; drop it"),
        (TWO, {}, {"guidance_scale_2": 0.5}, rf"{V}.guidance_scale_2=0.5.*1 \(none\) or more"),
        (
            TWO,
            {"guidance_scale": 1, "guidance_scale_2": 3},
            {},
            rf"{P}.guidance_scale_2=3 has no effect .*guidance_scale=1",
        ),
    ],
)
def test_a_setting_of_no_effect_on_a_class(
    name: str, pipeline: Mapping[str, float], held_out: Mapping[str, float], words: str
) -> None:
    rollout = RolloutConfig(
        pipeline=PipelineConfig(**pipeline),  # type: ignore[arg-type]
        val_kwargs=EvaluationConfig(**held_out),  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match=words):
        check_model(adapters_by_pipeline()[NAMES.get(name, name)], rollout)


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("qwen", {"width": 24}, f"{V}.width=24: .*multiples of 16"),
        ("z_image", {"height": 20}, f"{V}.height=20: .*multiples of 8"),
        ("sana", {"width": 0}, f"{V}.width=0: .*multiples of 32"),
        ("sd3", {"width": 2**14}, f"{V}.width=16384: .*multiples of .* up to "),
        ("wan", {"height": 24}, f"{V}.height=24: .*multiples of 16"),
        ("wan", {"num_frames": 4}, f"{V}.num_frames=4: .*1, 5, ..."),
        ("schnell", {"guidance_scale": 3.5}, f"{V}.guidance_scale=3.5.*set it to 1.*true_cfg"),
    ],
)
def test_a_setting_that_a_checkpoint_does_not_take(
    saved: Callable[[str], Path], name: str, setting: Mapping[str, float], words: str
) -> None:
    name = {**NAMES, "sd3": "StableDiffusion3Pipeline"}[name]
    tiny = (TINY | VARIANTS)[name]
    model = build_architecture(ModelConfig(path=str(saved(name))))
    with pytest.raises(ValueError, match=words):
        model.check(tiny.spec("sde", dict(tiny.unguided) | dict(setting)), V)


@pytest.mark.parametrize(
    ("settings", "adapter", "words"),
    [
        ({"boundary_ratio": None}, None, "has a transformer_2 and no boundary_ratio"),
        ({"transformer_2": [None, None]}, None, "=0.8 and no transformer_2.*both transformers"),
        ({}, "wan", "has a transformer_2.*trains one transformer; drop it"),
    ],
)
def test_two_transformers_and_their_boundary(
    saved: Callable[[str], Path],
    tmp_path: Path,
    settings: Mapping[str, object],
    adapter: str | None,
    words: str,
) -> None:
    folder = Path(shutil.copytree(saved(TWO), tmp_path / "changed"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | dict(settings)))

    def build_and_check() -> None:
        model = build_architecture(ModelConfig(path=str(folder), adapter=adapter))
        model.check(TINY[TWO].spec("sde", TINY[TWO].unguided), V)

    with pytest.raises(ValueError, match=rf"^model\.path.*{words}"):
        build_and_check()


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


def test_a_pipeline_without_adapter_names_those_that_have_one(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    names = ", ".join(sorted(TINY)).replace("+", r"\+")
    with pytest.raises(ValueError, match=rf"is a PixArtAlphaPipeline; adapters exist for {names}"):
        build_architecture(ModelConfig(path=str(tmp_path)))
