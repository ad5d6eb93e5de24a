"""The gradient study: gradients against autograd, statistics against known expectations."""

from __future__ import annotations

from dataclasses import replace

import estimators
import flow
import gradient_batches
import gradient_corrections
import gradient_problem
import gradient_regions
import moments
import pytest
import torch
from gradient_problem import evaluate
from torch import Tensor


@pytest.fixture(scope="module")
def study() -> gradient_batches.Study:
    """A problem of eight elements whose LoRA takes part."""
    return gradient_batches.Study(8, 3, fit=5, moves=2)


def calibrated(
    study: gradient_batches.Study, sampler: flow.Sampler
) -> dict[str, estimators.Estimator]:
    """Returns every estimator of both parts of the study, calibrated on a sampler."""
    pairs = study.calibration_pairs(sampler)
    seen = estimators.calibrate(pairs)
    return {
        **gradient_corrections.corrections(seen, pairs),
        **gradient_regions.regions(seen, pairs),
    }


def pushes(
    given: dict[str, estimators.Estimator], study: gradient_batches.Study, sampler: flow.Sampler
) -> Tensor:
    """Returns what each estimator sends back into the velocities of a batch, [2E, B, T, D]."""
    batch, rewards = study.problem.rollout(sampler, 0, "test")
    found = evaluate(study.policy, batch)
    coefficients, _ = gradient_batches.all_coefficients(given, batch, rewards, 0, found, found)
    return torch.einsum("kebt,kbtd->ebtd", coefficients, found.slopes)


def test_gradients_of_steps_are_those_of_autograd(study: gradient_batches.Study) -> None:
    network = study.moved.network
    names = list(study.moved.lora())
    rounding = flow.Sampler(network=study.policy.network, rounds=True)
    batch = study.problem.rollout(rounding, 0, "test")[0].rows(0, 24)
    old_means = evaluate(study.policy, batch).means
    found = evaluate(study.moved, batch, old_means)
    coefficients = torch.randn(
        3, 2, 24, batch.num_steps, generator=torch.Generator().manual_seed(1)
    ).double()
    parameters = [network.get_parameter(name).requires_grad_() for name in names]
    x = batch.all_latents[:, :-1].flatten(0, 1)
    following = batch.all_latents[:, 1:].flatten(0, 1)
    v = study.moved.velocity(x, batch.all_timesteps.flatten(), flow.step_classes(batch))
    steps = batch.step_indices.flatten()
    sigma = batch.sigmas[steps].unsqueeze(1)
    dt = batch.sigmas[steps + 1].unsqueeze(1) - sigma
    std = 0.7 * (sigma / (1 - torch.where(sigma == 1, batch.sigmas[1], sigma))).sqrt()
    drift = std**2 / (2 * sigma)
    mean = x * (1 + drift * dt) + v * (1 + drift * (1 - sigma)) * dt
    scale = std * (-dt).sqrt()
    rollout = batch.prev_sample_mean.flatten(0, 1)
    log_probs = torch.distributions.Normal(mean, scale).log_prob(following).mean(1)
    kl = ((mean - rollout) ** 2 / (2 * scale**2)).mean(1)
    old_kl = ((mean - old_means.flatten(0, 1)) ** 2 / (2 * scale**2)).mean(1)
    centered = ((following - rollout) / scale * (mean - rollout) / scale).mean(1)
    for got, wanted in (
        (found.log_probs, log_probs),
        (found.gaussian.kl, kl),
        (found.old_kl, old_kl),
        (found.gaussian.centered, centered),
    ):
        torch.testing.assert_close(got.flatten(), wanted.detach())
    got = flow.weighted_gradients(study.moved, batch, found.slopes, coefficients)
    values = torch.stack([log_probs, kl, old_kl])
    for row, own in zip(got, coefficients.flatten(2).transpose(0, 1), strict=True):
        parts = torch.autograd.grad((values * own).sum(), parameters, retain_graph=True)
        expected = torch.cat([part.flatten() for part in parts])
        assert (row - expected).norm() < 1e-5 * expected.norm()
    # The slope of the centered log-ratio is the sum of the first two.
    both = torch.autograd.grad(centered.sum(), v, retain_graph=True)[0]
    torch.testing.assert_close(found.slopes[:2].sum(0).flatten(0, 1), both)


def test_without_mismatch_every_estimator_is_the_truth(study: gradient_batches.Study) -> None:
    given = calibrated(study, replace(study.policy, rounds=True))
    found = pushes(given, study, study.policy).unflatten(0, (-1, 2))
    truth = pushes(estimators.estimands(), study, study.policy).unflatten(0, (-1, 2))
    expected = dict(zip(estimators.estimands(), truth, strict=True))
    assert len(given) > 60
    for estimator, push in zip(given.values(), found, strict=True):
        torch.testing.assert_close(push, expected[estimator.estimand], rtol=1e-9, atol=1e-15)


def test_a_centered_estimator_credits_the_noise_of_the_rollout(
    study: gradient_batches.Study,
) -> None:
    """Before an update and without a clip: A e / std, whatever the policy's mean is."""
    sampler = study.sampler("stale_1")
    given = {"centered": estimators.ppo(0.9, centered=True), "plain": estimators.ppo(0.9)}
    centered, plain = pushes(given, study, sampler)[::2]
    batch, rewards = study.problem.rollout(sampler, 0, "test")
    groups = rewards.view(-1, gradient_problem.SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten() / (
        rewards.std(correction=0) + 1e-4
    )
    found = evaluate(study.policy, batch)
    by_velocity = found.slopes[0] / (batch.all_latents[:, 1:] - found.means)
    noise = batch.all_latents[:, 1:] - batch.prev_sample_mean
    expected = -advantages.view(-1, 1, 1) * by_velocity * noise / found.log_probs.numel()
    assert (centered - expected).norm() < 1e-9 * expected.norm()
    assert (plain - expected).norm() > 5e-3 * expected.norm()


def test_the_weight_error_of_int4_is_stretched(study: gradient_batches.Study) -> None:
    networks = [study.sampler(f"int4x{factor}").network for factor in (1, 3)]
    own = study.policy.network.blocks[0].up.base_layer.weight
    once, thrice = (network.blocks[0].up.base_layer.weight - own for network in networks)
    assert once.abs().max() > 1e-3
    torch.testing.assert_close(thrice, 3 * once)


def test_the_statistics_find_known_lengths_and_angles() -> None:
    source = torch.Generator().manual_seed(0)
    truth, bias, pull = torch.zeros(3, 200, dtype=torch.float64)
    truth[0] = 1.0
    bias[:2] = torch.tensor([-0.5, 1.0])
    pull[1:3] = 1.0
    noise, own = (
        torch.randn(size, 200, generator=source, dtype=torch.float64) for size in (3000, 1000)
    )
    rows = moments.Rows(
        reward=truth + bias + noise[:1000] + 0.5 * own,
        chance=bias + noise[:1000],
        truth=truth + noise,
        truth_chance=noise[:1000],
        to_rollout=pull + own,
    )
    found = moments.estimate(rows)
    expected = {
        "bias": 1.25**0.5,
        "along": 0.5,
        "cosine": 0.5 / 1.25**0.5,
        "variance": 1.25,
        "chance": 1.25**0.5,
        "to_rollout": 1 / (1.25 * 2) ** 0.5,
    }
    for name, value in expected.items():
        assert abs(found[name][0] - value) < 4 * found[name][1] + 1e-9, name
        assert found[name][1] < 0.15, name
    assert (
        moments.estimate(rows._replace(chance=noise[:1000] + own - own.mean(0)))["to_rollout"]
        is None
    )
