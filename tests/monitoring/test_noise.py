"""What is said of the noise of recorded steps, beside noise that is known."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import diffusion_batch
from support.image_rollouts import make_spec
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.transition import log_prob, sample
from flowgrpo_rc.monitoring.noise import (
    coefficients,
    follows_seed,
    mean_squares,
    observe_noise,
    rollout_noise,
    seed_noise,
    shared_noise,
    variance_off,
)
from flowgrpo_rc.policies.scheduler import step_transition

SAMPLES = 6
SHAPE = (4, 32, 32)
SEEDS = list(range(100, 100 + SAMPLES))
WINDOW = [1, 2, 3]
KINDS = [("sde", "gaussian"), ("cps", "peers"), ("dance_sde", "gaussian")]


def drawn(seeds: list[int], step: int) -> Tensor:
    return normal(SHAPE, seeds, "step", step)


def record(
    kind: str = "sde",
    convention: str = "gaussian",
    *,
    noise=drawn,
    means: bool = True,
    image: float = 0.0,
    echo: float = 0.0,
) -> DiffusionBatch:
    """Walks some steps with velocities of size 1.

    They have `image` in common, and `echo` with the noise of the step before.
    """
    spec = make_spec(kind, 1.0, num_inference_steps=8, log_prob_convention=convention)
    sigmas = torch.linspace(1, 0, 9)
    x = normal(SHAPE, SEEDS, "latents")
    common = image * normal(SHAPE, [0], "image")
    states = [x]
    log_probs = []
    found = []
    for index in WINDOW:
        steps = torch.full((SAMPLES,), index)
        v = common + normal(SHAPE, SEEDS, "velocity", index)
        v = v + echo * (noise(SEEDS, index - 1) if index > WINDOW[0] else 0)
        gaussian = step_transition(x, v, sigmas, steps, sde_type=kind, noise_level=0.7)
        x = sample(gaussian, noise(SEEDS, index))
        states.append(x)
        log_probs.append(log_prob(gaussian, x, convention=convention))
        found.append(gaussian.mean)
    return diffusion_batch(torch.stack(log_probs, 1)).replace(
        spec=spec,
        group=torch.arange(SAMPLES) // 3,
        seed=torch.tensor(SEEDS),
        all_latents=torch.stack(states, 1),
        step_indices=torch.tensor([WINDOW] * SAMPLES),
        sigmas=sigmas,
        prev_sample_mean=torch.stack(found, 1) if means else None,
    )


@pytest.mark.parametrize(("kind", "convention"), KINDS)
def test_with_means_the_noise_is_what_was_drawn(kind: str, convention: str) -> None:
    batch = record(kind, convention)
    wanted = torch.stack([drawn(SEEDS, step) for step in WINDOW], 1).flatten(2)
    noise, excess = rollout_noise(batch)
    torch.testing.assert_close(noise, wanted, rtol=0, atol=2e-5)
    assert torch.equal(excess, torch.zeros(SAMPLES, 3))
    few, _ = rollout_noise(batch, 512)
    torch.testing.assert_close(few, wanted[..., ::8], rtol=0, atol=2e-5)
    assert torch.equal(seed_noise(batch).flatten(2), wanted)
    squares = wanted.double().square().mean(2)
    torch.testing.assert_close(mean_squares(batch), squares, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "convention"), KINDS)
def test_without_means_the_velocity_is_the_excess(kind: str, convention: str) -> None:
    """The factor of the velocity is that of the transition at x = 0, v = 1."""
    batch = record(kind, convention, means=False)
    _, excess = rollout_noise(batch)
    one = torch.ones(1, 1)
    for t, index in enumerate(WINDOW):
        place, settings = torch.tensor([index]), {"sde_type": kind, "noise_level": 0.7}
        step = step_transition(0 * one, one, batch.sigmas, place, **settings)
        wanted = (step.mean / step.std).square().item()
        # Statistical error of a mean square over 4096 elements.
        error = 5 * (1 + wanted) * math.sqrt(2 / 4096)
        assert excess[:, t].tolist() == pytest.approx([wanted] * SAMPLES, abs=error)
    slope, std = coefficients(batch)
    assert slope.shape == std.shape == (SAMPLES, 3)


def shared(batch: DiffusionBatch) -> float:
    noise, excess = rollout_noise(batch)
    return shared_noise(noise, excess, 3).item()


@pytest.mark.parametrize("means", [True, False])
@pytest.mark.parametrize(("image", "echo"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.7), (0.0, -0.7)])
def test_independent_noise_is_not_shared(means: bool, image: float, echo: float) -> None:
    """However much velocities have in common with one another, or with earlier noise."""
    assert shared(record(means=means, image=image, echo=echo)) < 6 / math.sqrt(4096)


SHARING = {
    "samples": lambda seeds, step: drawn(seeds[:1] * SAMPLES, step),
    "chunks": lambda seeds, step: drawn(seeds[:2] * 3, step),
    "samples at another step": lambda seeds, step: drawn([seed + step for seed in seeds], 0),
    "steps": lambda seeds, step: drawn(seeds, 0),
    "opposite steps": lambda seeds, step: (-1) ** step * drawn(seeds, 0),
}


@pytest.mark.parametrize("name", SHARING)
def test_shared_noise_is_seen(name: str) -> None:
    """Without means the steps of one sample may hide it: velocities depend on earlier noise."""
    assert shared(record(noise=SHARING[name])) == pytest.approx(1, abs=0.1)
    without = shared(record(noise=SHARING[name], means=False))
    assert without > 0.5 or name.endswith("steps")


def test_steps_of_little_noise_are_left_out() -> None:
    assert shared_noise(torch.ones(2, 2, 4096), torch.full((2, 2), 0.6), 2).item() == -math.inf


@pytest.mark.parametrize("means", [True, False])
def test_how_much_of_the_noise_is_the_seeds(means: bool) -> None:
    same = follows_seed(record(means=means).step(1))
    next_step = record(noise=lambda seeds, step: drawn(seeds, step + 1), means=means)
    other = follows_seed(next_step.step(1))
    assert same.tolist() == pytest.approx([1] * SAMPLES, abs=1e-5 if means else 0.1)
    assert other.tolist() == pytest.approx([0] * SAMPLES, abs=0.1)


def test_what_is_reported() -> None:
    batch = record(means=False)
    found = observe_noise(batch, seeded=True).compute()
    names = ("variance", "shared_max", "of_seed_min", "variance_off")
    assert list(found) == [f"rollout/noise_{name}" for name in names]
    assert found["rollout/noise_variance_off"] == 0
    assert found["rollout/noise_variance"] == pytest.approx(mean_squares(batch).mean().item())
    assert found["rollout/noise_of_seed_min"] == pytest.approx(1, abs=0.1)
    assert "rollout/noise_of_seed_min" not in observe_noise(batch, seeded=False).compute()
    # Where the first sample alone has its own noise, the worst one is reported.
    mixed = record(noise=lambda seeds, step: drawn(seeds[:1] * SAMPLES, step))
    found = observe_noise(mixed, seeded=True).compute()
    assert found["rollout/noise_of_seed_min"] == pytest.approx(0, abs=0.1)


def test_too_few_elements_tell_nothing() -> None:
    batch = record()
    small = batch.replace(all_latents=batch.all_latents[..., :4, :4], prev_sample_mean=None)
    assert observe_noise(small, seeded=True).compute() == {}
    single = observe_noise(batch.rows(0, 1).step(0), seeded=False).compute()
    assert "rollout/noise_shared_max" not in single


def test_processes_with_some_of_the_groups_say_the_same() -> None:
    batch = record(means=False)
    apart = MetricBag()
    for start in (0, 3):
        apart.merge(observe_noise(batch.rows(start, start + 3), seeded=True))
    assert apart.compute() == pytest.approx(observe_noise(batch, seeded=True).compute(), rel=1e-12)


def test_a_mean_square_is_off_beyond_its_statistical_error() -> None:
    found = [variance_off(mean_square, 12_800) for mean_square in (1.07, 1.21, 0.79)]
    assert found == pytest.approx([0, 0.11, 0.11])
