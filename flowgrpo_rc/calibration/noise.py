"""Checks that noise of recorded steps is standard normal, independent, and that of the seeds.

It also tells numbers of 16 bits from others.

Legend: B samples, T steps, D elements of a latent, K elements that are looked at, R = B T.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.calibration.causes import Symptom
from flowgrpo_rc.monitoring.noise import follows_seed, rollout_noise

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENTS = 16384  # K
SIGMAS = 6.0  # statistical errors beyond which a moment is wrong
PAIR_SIGMAS = 8.0  # the same for a correlation, of which there are many
# What is more significant than that and smaller than this is rounding.
LEAST = {"mean": 0.01, "variance": 0.02, "kurtosis": 0.1}


class NoiseReport(NamedTuple):
    """Holds what is said about the noise."""

    wrong: Sequence[Symptom] = ()  # shared, or not the seeds', though the engine says so
    moments: Sequence[Symptom] = ()  # not standard normal, if means and deviations are right
    notes: Sequence[str] = ()  # what is no fault


def check_noise(batch: DiffusionBatch, *, says_seeds: bool) -> NoiseReport:
    """Checks the noise of recorded steps, which have their means."""
    noise, _ = rollout_noise(batch, ELEMENTS)
    shared = check_sharing(noise)
    moments = check_moments(noise)
    shares = torch.cat([follows_seed(batch.step(t)) for t in range(batch.num_steps)])
    unseeded = int((shares < 0.5).sum())
    if shared or not unseeded:
        return NoiseReport(shared, moments)
    sentence = f"{unseeded} of {len(shares)} steps do not have the noise of their sample's seed"
    if says_seeds:
        evidence = f"{sentence}, which the engine says that it draws (draws_seed_noise)"
        return NoiseReport([Symptom("noise", evidence)], moments)
    note = f"{sentence}: the engine draws noise of its own, which is no fault"
    return NoiseReport([], moments, [note])


def check_sharing(noise: Tensor) -> list[Symptom]:
    """Looks for correlated noise [B, T, K] among all pairs of steps.

    A correlation r of K independent elements is 0 with atanh(r) = 0 +- 1 / sqrt(K - 3).
    """
    _, num_steps, num_elements = noise.shape
    rows = noise.flatten(0, 1)
    rows = rows / rows.square().mean(1, keepdim=True).sqrt()
    correlation = ((rows @ rows.T) / num_elements).abs().clamp(max=1 - 1e-6)
    high = (torch.atanh(correlation) * math.sqrt(num_elements - 3) > PAIR_SIGMAS).triu(1)
    row = torch.arange(len(rows), device=rows.device)
    sample = row // num_steps
    step = row % num_steps
    same_sample = sample.unsqueeze(1) == sample
    same_step = step.unsqueeze(1) == step
    kinds = {
        "samples share the noise of a step": ~same_sample & same_step,
        "the steps of a sample share their noise": same_sample & ~same_step,
        "samples share noise at different steps": ~same_sample & ~same_step,
    }
    symptoms = []
    for words, kind in kinds.items():
        shared = high & kind
        if shared.any():
            pairs = f"{int(shared.sum())} of {int(kind.triu(1).sum())} pairs are correlated"
            evidence = f"{words}: {pairs}, by up to {correlation[shared].max().item():.2f}"
            symptoms.append(Symptom("noise", evidence))
    return symptoms


def check_moments(noise: Tensor) -> list[Symptom]:
    """Compares mean, variance and kurtosis of noise [B, T, K] with those of a standard normal.

    Of N elements they are 0 +- sqrt(1 / N), 1 +- sqrt(2 / N) and 3 +- sqrt(24 / N).
    """
    values = noise.double().flatten()
    square = values.square().mean()
    moments = {
        "mean": (values.mean().item(), 0.0, 1.0),
        "variance": (square.item(), 1.0, 2.0),
        "kurtosis": ((values**4).mean().item() / square.item() ** 2, 3.0, 24.0),
    }
    symptoms = []
    for name, (value, normal, variance) in moments.items():
        error = SIGMAS * math.sqrt(variance / len(values))
        if abs(value - normal) > max(error, LEAST[name]):
            evidence = f"the {name} of the noise is {value:.3g}, not {normal:g}"
            symptoms.append(Symptom("noise", evidence))
    return symptoms


def half_precision(values: Tensor) -> str | None:
    """Returns the 16-bit precision whose numbers all values are; None for none."""
    names = (
        name for name, dtype in HALF.items() if torch.equal(values, values.to(dtype).to(values))
    )
    return next(names, None)
