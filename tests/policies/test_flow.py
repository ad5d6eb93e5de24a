"""The log-probs that a rollout recorded are those that the training graph computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from support.image_rollouts import KINDS, WINDOWS, make_spec, sample_images, trained_lora

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy


@pytest.mark.parametrize(
    ("kind", "guidance", "window"), list(itertools.product(KINDS, (1.0, 4.5), WINDOWS))
)
def test_fp32_replay_is_bitwise_exact(
    model: FlowModel, kind: str, guidance: float, window: str
) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec(kind, guidance), WINDOWS[window])
    policy = FlowPolicy(model, transformer)
    replayed = policy.log_probs(batch, 4)
    assert torch.isfinite(replayed).all()
    assert torch.equal(replayed, batch.rollout_log_probs)
    with_gradient = torch.cat(
        [policy.evaluate(batch.step(t)).log_probs for t in range(batch.num_steps)], 1
    )
    assert with_gradient.requires_grad
    assert torch.equal(with_gradient.detach(), batch.rollout_log_probs)


@pytest.mark.kernels
def test_other_micro_batch_shape_differs_by_rounding_only(model: FlowModel) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 4.5), WINDOWS["all"])
    difference = (
        (FlowPolicy(model, transformer).log_probs(batch, 1) - batch.rollout_log_probs).abs().max()
    )
    assert difference < 1e-6


@pytest.mark.kernels
def test_bf16_rollout_has_a_mismatch_of_the_expected_scale(model: FlowModel) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(
        model, transformer, make_spec("sde", 1.0, dtype="bf16"), WINDOWS["all"]
    )
    assert batch.all_latents.dtype == batch.rollout_log_probs.dtype == torch.float32
    difference = (
        FlowPolicy(model, transformer).log_probs(batch, 4) - batch.rollout_log_probs
    ).abs()
    assert 1e-7 < difference.mean() < 1e-3


@pytest.mark.kernels
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_noise_zero_gives_the_stock_pipelines_image(
    checkpoint: Path, model: FlowModel, guidance: float
) -> None:
    stock = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    stock.set_progress_bar_config(disable=True)
    latents = normal((8, 8, 16), [5, 6], "latents")
    prompts = ['"AB7X"', '"HELP"']
    wanted = stock(
        prompts,
        height=32,
        width=64,
        num_inference_steps=5,
        guidance_scale=guidance,
        max_sequence_length=16,
        latents=latents,
        output_type="latent",
    ).images
    conditioning = model.encode(prompts, max_sequence_length=16)
    negative = model.encode(["", ""], max_sequence_length=16) if guidance > 1 else None
    policy = FlowPolicy(model, model.transformer)
    nothing = torch.empty((2, 0), dtype=torch.int64)
    for kind in KINDS:
        spec = make_spec(kind, guidance, noise_level=0.0)
        found = policy.rollout(
            latents, conditioning, negative, spec, nothing, lambda step: latents
        ).final
        if kind == "cps":
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        else:
            assert torch.equal(found, wanted)
            with torch.no_grad():
                decoded = stock.vae.decode(wanted, return_dict=False)[0]
            image = stock.image_processor.postprocess(decoded, output_type="pil")
            assert np.array_equal(model.decode(found, spec)[0], np.asarray(image[0]))
