"""One reverse step of each kind against scalar float64 formulas."""

import pytest
import torch
from support.oracles import kl_scale, reverse_step
from torch import Tensor

from flowgrpo_rc.core.transition import (
    KINDS,
    Transition,
    centered_log_ratio,
    log_prob,
    reference_kl,
    sample,
    transition,
)

SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.3, 0.02)
NOISES = (0.1, 0.7, 1.2)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def step(
    kind: str,
    noise: float,
    x: Tensor,
    v: Tensor,
    rows: list[int],
    *,
    sigmas: tuple[float, ...] = SIGMAS,
) -> Transition:
    schedule = torch.tensor(sigmas, dtype=torch.promote_types(x.dtype, torch.float32))
    sigma = schedule[rows]
    following = schedule[[row + 1 for row in rows]]
    return transition(x, v, sigma, following, kind=kind, noise_level=noise, sigma_max=schedule[1])


def expected(
    kind: str,
    noise: float,
    x: Tensor,
    v: Tensor,
    rows: list[int],
    *,
    sigmas: tuple[float, ...] = SIGMAS,
) -> tuple[Tensor, Tensor]:
    means = []
    stds = []
    for position, row in enumerate(rows):
        pairs = zip(x[position].flatten().tolist(), v[position].flatten().tolist(), strict=True)
        out = [
            reverse_step(kind, a, b, sigmas[row], sigmas[row + 1], noise, sigmas[1])
            for a, b in pairs
        ]
        means.append(
            torch.tensor([m for m, _ in out], dtype=torch.float64).reshape(x[position].shape)
        )
        stds.append(out[0][1])
    return torch.stack(means), torch.tensor(stds, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_mean_and_std_follow_the_formula_for_a_sigma_per_row(kind, noise, dtype, tolerance):
    rows = [0, 1, 2, 3, 4]
    x = drawn(5, 2, 3, 4, seed=1, dtype=dtype)
    v = drawn(5, 2, 3, 4, seed=2, dtype=dtype)
    actual = step(kind, noise, x, v, rows)
    mean, std = expected(kind, noise, x, v, rows)
    assert actual.mean.dtype == actual.std.dtype == dtype
    assert actual.mean.shape == x.shape
    assert actual.std.shape == (5, 1, 1, 1)
    torch.testing.assert_close(actual.mean.double(), mean, rtol=tolerance, atol=5 * tolerance)
    torch.testing.assert_close(actual.std.double().flatten(), std, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_log_prob_is_the_mean_of_the_normal_log_density(kind, dtype, tolerance):
    x, v, noise = (drawn(5, 3, 4, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    actual = step(kind, 0.7, x, v, [0, 1, 2, 3, 4])
    after = sample(actual, noise)
    normal = torch.distributions.Normal(actual.mean.double(), actual.std.double())
    density = normal.log_prob(after.double()).flatten(1).mean(1)
    assert log_prob(actual, after).shape == (5,)
    torch.testing.assert_close(
        log_prob(actual, after).double(), density, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_step_is_eulers_bit_for_bit_and_that_of_cps_up_to_rounding(kind):
    x = drawn(5, 4, 8, 8, seed=1)
    v = drawn(5, 4, 8, 8, seed=2)
    euler = x + v * torch.tensor(SIGMAS).diff().reshape(-1, 1, 1, 1)
    actual = step(kind, 0.0, x, v, [0, 1, 2, 3, 4])
    assert (actual.mean - euler).abs().max() <= (1e-5 if kind == "cps" else 0)
    assert torch.count_nonzero(actual.std) == 0


def test_a_sigma_just_below_one_is_its_own():
    x = drawn(1, 4, seed=1, dtype=torch.float64)
    v = drawn(1, 4, seed=2, dtype=torch.float64)
    shifted = (1 - 2**-24, 0.6, *SIGMAS[2:])
    mean, std = expected("sde", 0.7, x, v, [0], sigmas=shifted)
    actual = step("sde", 0.7, x, v, [0], sigmas=shifted)
    torch.testing.assert_close(actual.mean, mean, rtol=1e-12, atol=1e-12)
    assert actual.std.item() == pytest.approx(std.item(), rel=1e-12)
    assert std.item() > 1000


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_the_last_step_to_sigma_zero_still_has_a_density(kind):
    x = drawn(1, 16, seed=1)
    v = drawn(1, 16, seed=2)
    noise = drawn(1, 16, seed=3)
    actual = step(kind, 0.7, x, v, [4], sigmas=(1.0, 0.9, 0.75, 0.5, 0.3, 0.0))
    assert torch.isfinite(log_prob(actual, sample(actual, noise))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_peers_log_ratio_is_two_variances_times_the_gaussian_one(kind):
    x = drawn(3, 32, seed=1, dtype=torch.float64)
    noise = drawn(3, 32, seed=3, dtype=torch.float64)
    v = drawn(3, 32, seed=2, dtype=torch.float64)
    w = drawn(3, 32, seed=4, dtype=torch.float64)
    here, there = (step(kind, 0.7, x, velocity, [1, 2, 3]) for velocity in (v, v + 1e-2 * w))
    after = sample(here, noise)
    gaussian = log_prob(there, after) - log_prob(here, after)
    peers = log_prob(there, after, convention="peers") - log_prob(here, after, convention="peers")
    torch.testing.assert_close(peers, 2 * here.std.flatten() ** 2 * gaussian, rtol=1e-9, atol=1e-15)
    squares = -((after - here.mean) ** 2).mean(1)
    torch.testing.assert_close(
        log_prob(here, after, convention="peers"), squares, rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [0, 1, 4])
def test_reference_kl_follows_the_formula_and_is_differentiable(kind, row):
    x = drawn(2, 3, 4, seed=1, dtype=torch.float64)
    v = drawn(2, 3, 4, seed=2, dtype=torch.float64).requires_grad_()
    sigma = torch.full((2,), SIGMAS[row], dtype=torch.float64)
    following = torch.full((2,), SIGMAS[row + 1], dtype=torch.float64)
    actual = step(kind, 0.7, x, v, [row, row])
    reference = step(kind, 0.7, x, v.detach() + 0.1 * drawn(2, 3, 4, seed=5), [row, row]).mean
    penalty = reference_kl(actual, reference, sigma, following, kind=kind)
    scale = kl_scale(kind, SIGMAS[row], SIGMAS[row + 1], 0.7, SIGMAS[1])
    expect = ((actual.mean.detach() - reference) ** 2).flatten(1).mean(1) / (2 * scale**2)
    torch.testing.assert_close(penalty.detach(), expect, rtol=1e-10, atol=0)
    slope = torch.autograd.grad(penalty.sum(), actual.mean, retain_graph=True)[0]
    torch.testing.assert_close(
        slope, (actual.mean.detach() - reference) / (12 * scale**2), rtol=1e-10, atol=1e-14
    )
    assert torch.autograd.grad(penalty.sum(), v)[0].abs().max() > 0


@pytest.mark.parametrize("kind", ["SDE", "ode", "", "dance"])
def test_an_unknown_kind_names_the_key_and_what_is_allowed(kind):
    with pytest.raises(ValueError, match=r"rollout\.algo\.sde_type") as error:
        step(kind, 0.7, drawn(1, 2), drawn(1, 2), [0])
    assert all(known in str(error.value) for known in KINDS)


# --- The centered log-ratio


def random_step(dtype: torch.dtype, gap: float) -> tuple[Transition, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    rollout, shift, noise = torch.randn(3, 8, 4096, generator=source, dtype=torch.float64)
    mean = rollout + gap * shift
    std = torch.full((8, 1), 0.3, dtype=torch.float64)
    following = rollout + std * noise
    step = Transition(mean.to(dtype), std.to(dtype))
    return step, rollout.to(dtype), following.to(dtype)


@pytest.mark.parametrize(("convention", "scale"), [("gaussian", 1 / (2 * 0.3**2)), ("peers", 1.0)])
def test_the_centered_log_ratio_is_the_plain_one_plus_what_that_loses(
    convention: str, scale: float
) -> None:
    step, rollout, following = random_step(torch.float64, 0.1)
    plain = log_prob(step, following, convention=convention)
    plain = plain - log_prob(Transition(rollout, step.std), following, convention=convention)
    lost = scale * ((step.mean - rollout) ** 2).mean(1)
    centered = centered_log_ratio(step, rollout, following, convention=convention)
    assert torch.allclose(centered, plain + lost, rtol=1e-10, atol=1e-15)
    assert (lost > 100 * (centered - plain - lost).abs()).all()
