"""Velocities at finished samples with noise added; what the noise depends on."""

import torch
from support.image_rollouts import make_spec, sample_images, trained_lora

from flowgrpo_rc.algorithms.diffusion_nft.graph import VelocityGraph
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.random import derive_seed, generator
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy


def sampled(model: FlowModel) -> tuple[VelocityGraph, DiffusionBatch]:
    """Four finished samples of two prompts."""
    network = trained_lora(model)
    batch, _ = sample_images(model, network, make_spec("sde", 1.0), [[]])
    assert batch.all_latents.shape[:2] == (4, 1)
    assert batch.rollout_log_probs.shape == (4, 0)
    return VelocityGraph(FlowPolicy(model, network, steps_per_forward=2)), batch


def test_velocities_and_targets(model: FlowModel) -> None:
    policy, batch = sampled(model)
    noised = policy.noised(batch, 3)
    assert noised.num_steps == 3
    assert noised.rollout_log_probs is None
    (first, second) = policy.pieces(noised)
    assert (first.num_steps, second.num_steps) == (2, 1)
    actual = policy.evaluate(first)
    row, level = 2, 1
    step = int(first.step_indices[row, level])
    source = generator(derive_seed(int(batch.seed[row]), step), "forward")
    clean = batch.all_latents[row, 0]
    noise = torch.randn(clean.shape, generator=source)
    sigma = batch.sigmas[step]
    x = ((1 - sigma) * clean + sigma * noise)[None]
    conditioning = batch.conditioning[batch.prompt_index[row : row + 1]]
    timestep = model.schedule(batch.spec).timesteps[step : step + 1]
    with torch.no_grad():
        v = model.velocity(model.transformer, x, timestep, conditioning, None, batch.spec)[0]
    torch.testing.assert_close(actual.velocity[row, level], v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.target[row, level], noise - clean)
    moved = actual._replace(velocity=actual.velocity + 0.5)
    torch.testing.assert_close(
        policy.divergence(moved, actual, first), torch.full((4, 2), 0.25), rtol=1e-4, atol=0
    )


def test_a_samples_noise_depends_neither_on_its_place_nor_on_what_is_evaluated_with_it(
    model: FlowModel,
) -> None:
    policy, batch = sampled(model)
    whole = policy.noised(batch, None)
    part = policy.noised(batch.rows(2, 4), None)
    assert torch.equal(whole.step_indices[2:], part.step_indices)
    assert torch.equal(policy.evaluate(whole).target[2:], policy.evaluate(part).target)
    one = whole.rows(2, 3).steps(1, 2)
    assert torch.equal(policy.evaluate(one).target[0, 0], policy.evaluate(whole).target[2, 1])
