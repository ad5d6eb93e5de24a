"""The ratio can be trusted: what the rollout recorded is what the training graph computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from support.image_rollouts import KINDS, WINDOWS, make_spec, sample_images, trained_lora

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.scheduler import FlowMatchSDEScheduler
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest


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
    with_gradient = torch.stack(
        [policy.evaluate(batch.step(t)).log_prob for t in range(batch.num_steps)], 1
    )
    assert with_gradient.requires_grad
    assert torch.equal(with_gradient.detach(), batch.rollout_log_probs)


def test_other_micro_batch_shape_differs_by_rounding_only(model: FlowModel) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 4.5), WINDOWS["all"])
    difference = (
        (FlowPolicy(model, transformer).log_probs(batch, 1) - batch.rollout_log_probs).abs().max()
    )
    assert difference < 1e-6


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


def test_samples_do_not_depend_on_the_chunk(model: FlowModel) -> None:
    transformer = trained_lora(model)
    spec = make_spec("sde", 1.0)
    together, images = sample_images(model, transformer, spec, WINDOWS["per_sample"])
    alone, images_alone = sample_images(model, transformer, spec, WINDOWS["per_sample"], chunk=1)
    torch.testing.assert_close(together.all_latents, alone.all_latents, atol=1e-5, rtol=0)
    assert np.abs(images.astype(int) - images_alone.astype(int)).max() <= 1
    assert torch.equal(together.step_indices, alone.step_indices)


def test_batch_holds_what_was_sampled(model: FlowModel) -> None:
    transformer = trained_lora(model)
    spec = make_spec("sde", 1.0)
    batch, images = sample_images(model, transformer, spec, WINDOWS["per_sample"])
    assert images.shape == (4, 32, 64, 3)
    assert images.dtype == np.uint8
    assert batch.all_latents.shape == (4, 3, 8, 8, 16)
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.policy_version.tolist() == [3] * 4
    assert batch.spec == spec
    schedule = model.schedule(spec)
    assert torch.equal(batch.all_timesteps, schedule.timesteps[batch.step_indices])
    # Sample 0 starts at step 0: its first state is the initial noise, bit for bit.
    assert torch.equal(batch.all_latents[0, 0], normal((8, 8, 16), [11], "latents")[0])


def test_a_recorded_step_is_fed_to_the_next_one(model: FlowModel) -> None:
    """The state that the model gets at step t + 1 is the very state that step t recorded."""
    transformer = trained_lora(model)
    fed: list[torch.Tensor] = []
    engine = DiffusersEngine(model, transformer, dtype="fp32", chunk_size=4)
    engine._policy.network.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["hidden_states"].clone()), with_kwargs=True
    )
    prompts = PromptBatch(step=1, prompts=[Prompt(text='"AB"', index=0)], slots=[0])
    request = ImageRequest(
        prompts=prompts,
        samples_per_prompt=4,
        spec=make_spec("sde", 1.0),
        window=torch.arange(4).expand(4, 4),
        seeds=[1, 2, 3, 4],
    )
    batch = next(engine.generate(request)).batch
    for step in range(5):
        assert torch.equal(fed[step], batch.all_latents[:, step])


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


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_in_a_stock_pipeline(checkpoint: Path, kind: str) -> None:
    """With noise 0 the images are the stock ones; with noise they are others, and the seed decides
    which.
    """
    stock = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    stock.set_progress_bar_config(disable=True)

    def image(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return stock(
            '"AB7X"',
            height=32,
            width=64,
            num_inference_steps=4,
            guidance_scale=1.0,
            max_sequence_length=16,
            latents=normal((8, 8, 16), [5], "latents"),
            output_type="latent",
        ).images

    wanted = image(0)
    stock.scheduler = FlowMatchSDEScheduler.replacing(
        stock.scheduler, sde_type=kind, noise_level=0.0
    )
    torch.testing.assert_close(image(0), wanted, atol=1e-5, rtol=0)
    stock.scheduler = FlowMatchSDEScheduler.replacing(
        stock.scheduler, sde_type=kind, noise_level=0.5
    )
    assert torch.equal(image(1), image(1))
    assert not torch.allclose(image(1), image(2))
    assert not torch.allclose(image(1), wanted)


@pytest.mark.parametrize("fault", ["bf16_latents", "guidance", "bf16_timestep", "shifted_schedule"])
def test_the_difference_shows_a_fault(model: FlowModel, fault: str) -> None:
    """Known faults of a rollout move the log-probs far beyond the exact zero of a correct one."""
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 4.5), WINDOWS["all"])
    if fault == "bf16_latents":
        broken = batch.replace(all_latents=batch.all_latents.bfloat16().float())
    elif fault == "guidance":
        broken = batch.replace(spec=make_spec("sde", 4.5 * 1.01))
    elif fault == "bf16_timestep":
        broken = batch.replace(all_timesteps=batch.all_timesteps.bfloat16().float())
    else:
        shifted = 3 * batch.sigmas / (1 + 2 * batch.sigmas)
        broken = batch.replace(sigmas=shifted)
    difference = (
        FlowPolicy(model, transformer).log_probs(broken, 4) - batch.rollout_log_probs
    ).abs()
    assert difference.max() > 1e-7
