"""The gradient study: gradients against autograd, statistics against known expectations."""

from __future__ import annotations

import estimators
import flow
import gradient_study
import moments
import pytest
import torch


@pytest.fixture(scope="module")
def problem() -> flow.Problem:
    problem = flow.Problem(8, seed=3)
    problem.fit(5, 32)
    source = torch.Generator().manual_seed(0)
    lora = problem.lora()
    for name in (name for name in lora if "lora_B" in name):
        lora[name] = 0.1 * torch.randn(lora[name].shape, generator=source, dtype=torch.float64)
    problem.load(lora)
    return problem


def test_gradients_of_steps_are_those_of_autograd(problem: flow.Problem) -> None:
    network = problem.network
    names = list(problem.lora())
    rounding = flow.Sampler(network=network, rounds=True)
    batch = problem.rollout(rounding, 0, "test")[0].rows(0, 24)
    coefficients = torch.randn(
        3, 24, batch.num_steps, generator=torch.Generator().manual_seed(1)
    ).double()
    found = problem.evaluate(batch)
    parameters = [network.get_parameter(name).requires_grad_() for name in names]
    x = batch.all_latents[:, :-1].flatten(0, 1)
    v = flow.Sampler(network=network).velocity(
        x, batch.all_timesteps.flatten(), flow.step_classes(batch)
    )
    sigma = batch.sigmas[batch.step_indices.flatten()]
    following = batch.sigmas[batch.step_indices.flatten() + 1]
    std = (0.7 * (sigma / (1 - torch.where(sigma == 1, batch.sigmas[1], sigma))).sqrt()).unsqueeze(
        1
    )
    dt = (following - sigma).unsqueeze(1)
    drift = std**2 / (2 * sigma.unsqueeze(1))
    mean = x * (1 + drift * dt) + v * (1 + drift * (1 - sigma.unsqueeze(1))) * dt
    scale = std * (-dt).sqrt()
    log_probs = (
        torch.distributions.Normal(mean, scale)
        .log_prob(batch.all_latents[:, 1:].flatten(0, 1))
        .mean(1)
    )
    kl = ((mean - batch.prev_sample_mean.flatten(0, 1)) ** 2 / (2 * scale**2)).mean(1)
    torch.testing.assert_close(found.log_probs.flatten(), log_probs.detach())
    torch.testing.assert_close(found.gaussian.kl.flatten(), kl.detach())
    for values, slope in ((log_probs, found.log_prob_slope), (kl, found.kl_slope)):
        got = problem.pull_back(batch, slope, coefficients)
        for row, own in zip(got, coefficients.flatten(1), strict=True):
            expected = torch.autograd.grad((values * own).sum(), parameters, retain_graph=True)
            torch.testing.assert_close(
                row, torch.cat([gradient.flatten() for gradient in expected])
            )


def test_without_mismatch_every_estimator_is_the_truth(problem: flow.Problem) -> None:
    pairs = gradient_study.calibration_pairs(
        problem, flow.Sampler(network=problem.network, rounds=True), 1
    )
    given = estimators.estimators(estimators.calibrate(pairs), pairs)
    batch, rewards = problem.rollout(flow.Sampler(network=problem.network), 0, "test")
    found = problem.evaluate(batch)
    slopes = gradient_study.all_slopes(given, batch, found, rewards, 0).at_log_prob.unflatten(
        0, (-1, 2)
    )
    truth = gradient_study.all_slopes(
        estimators.estimands(), batch, found, rewards, 0
    ).at_log_prob.unflatten(0, (-1, 2))
    expected = dict(zip(estimators.estimands(), truth, strict=True))
    for estimator, slope in zip(given.values(), slopes, strict=True):
        torch.testing.assert_close(slope, expected[estimator.estimand], rtol=1e-9, atol=1e-15)


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
