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

import math

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.transition import transition

ELEMENTS = 1024  # K: a correlation of independent noise is 0 +- 0.03
# Below this many elements the chance that independent noise has a correlation of 0.5 counts.
FEWEST_ELEMENTS = 256
# Without means: the noise has to be this share of the variance of y.
MOSTLY_NOISE = 2 / 3
# A mean square is off by what it differs from 1 beyond so many statistical errors.
SIGMAS = 8.0


def observe_noise(batch: DiffusionBatch, *, seeded: bool) -> MetricBag:
    """Measures the noise of whole groups as the engine recorded them; full names.

    It looks at K elements. The results do not depend on how groups are spread over processes.
    `seeded` tells whether the engine says that it draws `seed_noise`.
    """
    metrics = MetricBag()
    if batch.num_steps == 0 or batch.num_elements < FEWEST_ELEMENTS:
        return metrics
    metrics.mean("rollout/noise_variance", mean_squares(batch))
    num_squares = torch.tensor(batch.step_indices.numel() * batch.num_elements)
    metrics.sum("rollout/_noise_squares", num_squares)
    needs = ("rollout/noise_variance", "rollout/_noise_squares")
    metrics.derive("rollout/noise_variance_off", needs, variance_off)
    # This waits for the device, as does the comparison with the seeds below.
    group_size = int((batch.group == batch.group[0]).sum())
    if group_size * batch.num_steps > 1:
        y, excess = rollout_noise(batch, ELEMENTS)
        shared = shared_noise(y, excess, group_size)
        metrics.max("rollout/noise_shared_max", shared, torch.isfinite(shared))
    if seeded:
        # Noise that a group or the steps share is not that of the last sample and step.
        last = torch.arange(group_size - 1, len(batch), group_size, device=batch.group.device)
        share = follows_seed(batch.select(last).step(batch.num_steps - 1))
        metrics.min("rollout/noise_of_seed_min", share, torch.isfinite(share))
    return metrics


def variance_off(mean_square: float, count: float) -> float:
    """Computes how far a mean square of `count` normal numbers is from 1, beyond 8 errors.

    max(|mean_square - 1| - 8 sqrt(2 / count), 0)
    """
    return max(abs(mean_square - 1) - SIGMAS * math.sqrt(2 / count), 0.0)


def rollout_noise(batch: DiffusionBatch, num_elements: int | None = None) -> tuple[Tensor, Tensor]:
    """Computes the noise of each step, or what stands in for it.

        e = (x' - m) / s    with the rollout's means,
        y = (x' - a x) / s  without

    K elements are looked at, spread over the latent; None for all.

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
    ones = torch.ones_like(steps, dtype=torch.float32).unsqueeze(1)
    step = transition(
        ones,
        torch.zeros_like(ones),
        batch.sigmas[steps],
        batch.sigmas[steps + 1],
        kind=batch.spec.sde_type,
        noise_level=batch.spec.noise_level,
        sigma_max=batch.sigmas[1],
    )
    shape = batch.step_indices.shape
    return step.mean.reshape(shape), step.std.expand_as(ones).reshape(shape)


def mean_squares(batch: DiffusionBatch) -> Tensor:
    """Computes the mean square of each step's noise from the rollout's log-probs, [B, T] float64.

        gaussian  mean_D[e^2] = -2 log_prob - 2 log s - log(2 pi)
        peers     mean_D[e^2] = -log_prob / s^2

    It is 1 +- sqrt(2 / D) for standard normal noise.
    """
    assert batch.rollout_log_probs is not None
    log_probs = batch.rollout_log_probs.double()
    _, std = coefficients(batch)
    std = std.double()
    if batch.spec.log_prob_convention == "peers":
        return -log_probs / std.square()
    return -2 * log_probs - 2 * std.log() - math.log(2 * math.pi)


def shared_noise(y: Tensor, excess: Tensor, group_size: int) -> Tensor:
    """Computes the largest covariance of the noise of two steps that velocities cannot explain.

        max_ij |mean_K[y_i y_j]| - sqrt(excess_i excess_j) - [same sample] sqrt(excess_later)

    y is the noise of the steps, [B, T, K], excess the variance of each that is none of the noise's,
    [B, T]. Pairs are those of the steps of a group, whose samples are next to each other. By
    Cauchy-Schwarz the velocities of two steps add at most sqrt(excess_i excess_j) to the covariance
    of y. The velocity of a later step of the same sample also depends on the noise of the earlier
    one, which adds at most sqrt(excess_later). So it is 0 +- 1 / sqrt(K), or below, for independent
    noise, and 1 for two steps with the same noise whose means are known. Steps where the noise is
    less than 2/3 of the variance are left out; -inf if no two steps of a group can be looked at.
    """
    num_steps = y.shape[1]
    y = y.unflatten(0, (-1, group_size)).flatten(1, 2)
    excess = excess.unflatten(0, (-1, group_size)).flatten(1, 2)
    sample = torch.arange(group_size, device=y.device).repeat_interleave(num_steps)
    clear = 1 / (1 + excess) > MOSTLY_NOISE
    root = excess.sqrt()
    # Only pairs above the diagonal count, and there the column is the later step.
    by_velocity = root.unsqueeze(2) * root.unsqueeze(1)
    same_sample = sample.unsqueeze(1) == sample
    by_velocity = by_velocity + torch.where(same_sample, root.unsqueeze(1), 0.0)
    unexplained = ((y @ y.mT) / y.shape[2]).abs() - by_velocity
    pairs = (clear.unsqueeze(2) & clear.unsqueeze(1)).triu(1)
    return torch.where(pairs, unexplained, -math.inf).amax()


def follows_seed(batch: DiffusionBatch) -> Tensor:
    """Computes how much of the noise of one step [B, 1] is that of its sample's seed, [B].

        mean_D[y n] / mean_D[n^2],   n = normal(shape, seeds, "step", step)

    It is 1 if the rollout drew n and 0 if it drew other noise, +- sqrt((1 + excess) / D) without
    means.
    """
    y, _ = rollout_noise(batch)
    drawn = seed_noise(batch)[:, 0].flatten(1).to(y.device)
    return (y[:, 0] * drawn).mean(1) / drawn.square().mean(1)


def seed_noise(batch: DiffusionBatch) -> Tensor:
    """Draws the noise of every step that follows from the samples' seeds, [B, T, ...] on the CPU.

    The engines of this project draw it (`RolloutEngine.draws_seed_noise`).
    """
    shape = batch.all_latents.shape[2:]
    # One transfer for both.
    columns = torch.cat([batch.seed.unsqueeze(1), batch.step_indices], 1).tolist()
    drawn = [normal(shape, [seed], "step", step) for seed, *steps in columns for step in steps]
    return torch.cat(drawn).reshape(*batch.step_indices.shape, *shape)
