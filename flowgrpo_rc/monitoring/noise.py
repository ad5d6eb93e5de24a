"""The noise that a rollout drew for its steps: is it standard normal, independent, the seeds'?

A step is x' = m + s e with the mean m, the standard deviation s and the noise e. The log-prob of a
step is taken at the x' that was drawn. So noise that is scaled, or the same for several samples,
makes no mismatch, and has to be looked for in e itself.

Where the rollout recorded its means, e = (x' - m) / s. All kinds of steps have a mean a x + b v
that is linear in the state x and the velocity v. Without the means the velocity is not known, and

    y = (x' - a x) / s = e + (b / s) v

stands in for the noise. Early in the schedule the noise is most of it.

Legend:
    B, T  samples, and steps of the window
    D     elements of a latent
    K     elements that are looked at, at most D
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.transition import transition

ELEMENTS = 1024  # K: a correlation of independent noise is 0 +- 0.03
STEPS = 512  # looked at: samples that share noise are near each other in a batch
# Below this many elements the chance that independent noise has a correlation of 0.5 counts.
FEWEST_ELEMENTS = 256
# The standard error of a mean square of that many elements is below a hundredth: with the band of
# `health` that is 8 standard errors or more.
FEWEST_SQUARES = 12_800
# Without means: the noise has to be this share of the variance of y.
MOSTLY_NOISE = 2 / 3


def observe_noise(batch: DiffusionBatch, *, seeded: bool) -> MetricBag:
    """Measures the noise of a recorded batch; full names.

    It looks at K elements of some hundred steps. Only the comparison with the noise of the seeds,
    which is made for two steps, waits for the device.

    Args:
      batch: the rollout, as the engine recorded it.
      seeded: whether the engine says that it draws `seed_noise`.
    """
    metrics = MetricBag()
    num_squares = batch.step_indices.numel() * batch.num_elements
    if num_squares >= FEWEST_SQUARES:
        metrics.mean("rollout/noise_variance", mean_squares(batch))
    if batch.num_elements < FEWEST_ELEMENTS:
        return metrics
    y, excess = rollout_noise(batch, ELEMENTS)
    if batch.step_indices.numel() > 1:
        few = max(1, STEPS // batch.num_steps)
        found = shared_noise(y[:few], excess[:few])
        metrics.max("rollout/noise_shared_max", found, torch.isfinite(found))
    if seeded:
        # The first step of the first sample, and the last step of the last.
        last = batch.rows(len(batch) - 1, len(batch))
        ends = [batch.rows(0, 1).step(0), last.step(last.num_steps - 1)]
        found = torch.cat([follows_seed(end) for end in ends])
        metrics.min("rollout/noise_of_seed_min", found, torch.isfinite(found))
    return metrics


def rollout_noise(batch: DiffusionBatch, num_elements: int | None = None) -> tuple[Tensor, Tensor]:
    """Computes the noise of each step, or what stands in for it.

        e = (x' - m) / s    with the rollout's means,
        y = (x' - a x) / s  without

    Args:
      batch: the recorded steps.
      num_elements: K, elements that are looked at, spread over the latent; None for all.

    Returns:
      The noise, [B, T, K] fp32, and the variance in it that is none of the noise's, [B, T]: 0 with
      means, max(mean_K y^2 - 1, 0) without.
    """
    states = batch.all_latents.flatten(2)
    stride = 1 if num_elements is None else max(1, states.shape[2] // num_elements)
    states = states[..., ::stride][..., :num_elements].float()
    slope, std = coefficients(batch)
    if batch.prev_sample_mean is not None:
        means = batch.prev_sample_mean.flatten(2)[..., ::stride][..., :num_elements].float()
        return (states[:, 1:] - means) / std.unsqueeze(2), torch.zeros_like(std)
    y = (states[:, 1:] - slope.unsqueeze(2) * states[:, :-1]) / std.unsqueeze(2)
    return y, (y.square().mean(2) - 1).clamp(min=0)


def coefficients(batch: DiffusionBatch) -> tuple[Tensor, Tensor]:
    """Returns the factor a of the state in each step's mean, and its standard deviation s.

    Both are [B, T] fp32. They follow from the transition itself: a is the mean at x = 1, v = 0.
    """
    steps = batch.step_indices.flatten()
    one = torch.ones_like(steps, dtype=torch.float32).unsqueeze(1)
    step = transition(
        one,
        torch.zeros_like(one),
        batch.sigmas[steps],
        batch.sigmas[steps + 1],
        kind=batch.spec.sde_type,
        noise_level=batch.spec.noise_level,
        sigma_max=batch.sigmas[1],
    )
    shape = batch.step_indices.shape
    return step.mean.reshape(shape), step.std.expand_as(one).reshape(shape)


def mean_squares(batch: DiffusionBatch) -> Tensor:
    """Computes the mean square of each step's noise from the rollout's log-probs, [B, T] float64.

        gaussian  mean_D[e^2] = -2 log_prob - 2 log s - log(2 pi)
        peers     mean_D[e^2] = -log_prob / s^2

    It is 1 +- sqrt(2 / D) for standard normal noise.

    Args:
      batch: the recorded steps, with rollout log-probs.
    """
    assert batch.rollout_log_probs is not None
    log_probs = batch.rollout_log_probs.double()
    _, std = coefficients(batch)
    std = std.double()
    if batch.spec.log_prob_convention == "peers":
        return -log_probs / std.square()
    return -2 * log_probs - 2 * std.log() - math.log(2 * math.pi)


def shared_noise(y: Tensor, excess: Tensor) -> Tensor:
    """Computes the largest covariance of the noise of two steps that velocities cannot explain.

        max_ij |mean_K[y_i y_j]| - sqrt(excess_i excess_j) - [same sample] sqrt(excess_later)

    By Cauchy-Schwarz the velocities of the two steps add at most sqrt(excess_i excess_j) to the
    covariance of y. The velocity of a later step of the same sample also depends on the noise of
    the earlier one, which adds at most sqrt(excess_later). So it is 0 +- 1 / sqrt(K), or below, for
    independent noise, and 1 for two steps with the same noise whose means are known. Steps where
    the noise is less than 2/3 of the variance are left out.

    Args:
      y: noise of the steps, [B, T, K].
      excess: variance of each that is none of the noise's, [B, T].

    Returns:
      A scalar; -inf if fewer than two steps can be looked at.
    """
    num_samples, num_steps, num_elements = y.shape
    sample = torch.arange(num_samples, device=y.device).repeat_interleave(num_steps)
    y, excess = y.flatten(0, 1), excess.flatten()
    clear = 1 / (1 + excess) > MOSTLY_NOISE
    root = excess.sqrt()
    # Only pairs above the diagonal count, and there the column is the later step.
    by_velocity = root.unsqueeze(1) * root
    by_velocity = by_velocity + torch.where(sample.unsqueeze(1) == sample, root, 0.0)
    unexplained = ((y @ y.T) / num_elements).abs() - by_velocity
    pairs = (clear.unsqueeze(1) & clear).triu(1)
    return torch.where(pairs, unexplained, -math.inf).amax()


def follows_seed(batch: DiffusionBatch) -> Tensor:
    """Computes how much of a step's noise is that of its sample's seed.

        mean_D[y n] / mean_D[n^2],   n = normal(shape, seeds, "step", step)

    It is 1 if the rollout drew n and 0 if it drew other noise, +- sqrt((1 + excess) / D) without
    means.

    Args:
      batch: one step of some samples, [B, 1].

    Returns:
      [B].
    """
    y, _ = rollout_noise(batch)
    drawn = seed_noise(batch)[:, 0].flatten(1).to(y.device)
    return (y[:, 0] * drawn).mean(1) / drawn.square().mean(1)


def seed_noise(batch: DiffusionBatch) -> Tensor:
    """Draws the noise of every step that follows from the samples' seeds, [B, T, ...] on the CPU.

    The engines of this project draw it (`RolloutEngine.draws_seed_noise`).

    Args:
      batch: says which steps and seeds; the seeds are read back from the device.
    """
    shape = batch.all_latents.shape[2:]
    # One transfer for both.
    columns = torch.cat([batch.seed.unsqueeze(1), batch.step_indices], 1).tolist()
    return torch.stack([_noise_of(shape, seed, steps) for seed, *steps in columns])


def _noise_of(shape: Sequence[int], seed: int, steps: Sequence[int]) -> Tensor:
    return torch.cat([normal(shape, [seed], "step", step) for step in steps])
