"""Checks that noise of recorded steps is standard normal, independent, and that of the seeds.

Legend: B samples, T steps, D elements of a latent, K elements that are looked at, R = B T.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.monitoring.noise import follows_seed, rollout_noise

ELEMENTS = 16384  # K
SIGMAS = 6.0  # statistical errors beyond which a moment is wrong
PAIR_SIGMAS = 8.0  # the same for a correlation, of which there are many
# What is more significant than that and smaller than this is rounding.
LEAST = {"mean": 0.01, "variance": 0.02, "kurtosis": 0.1}


class NoiseReport(NamedTuple):
    """Holds what is said about the noise, a list of sentences each."""

    wrong: Sequence[str]  # steps have noise in common, or not the seeds', though the engine says so
    moments: Sequence[str]  # it is not standard normal, if means and standard deviations are right
    notes: Sequence[str]  # what is no fault


def check_noise(batch: DiffusionBatch, *, says_seeds: bool) -> NoiseReport:
    """Checks the noise of recorded steps, which have their means."""
    noise, _ = rollout_noise(batch, ELEMENTS)
    shared, moments = check_sharing(noise), check_moments(noise)
    shares = torch.cat([follows_seed(batch.step(t)) for t in range(batch.num_steps)])
    others = int((shares < 0.5).sum())
    if shared or not others:
        return NoiseReport(shared, moments, [])
    sentence = f"{others} of {len(shares)} steps do not have the noise of their sample's seed"
    if says_seeds:
        wrong = f"{sentence}, which the engine says that it draws (draws_seed_noise)"
        return NoiseReport([wrong], moments, [])
    note = f"{sentence}: the engine draws noise of its own, which is no fault"
    return NoiseReport([], moments, [note])


def check_sharing(noise: Tensor) -> list[str]:
    """Looks for correlated noise [B, T, K] among all pairs of steps.

    A correlation r of K independent elements is 0 with atanh(r) = 0 +- 1 / sqrt(K - 3).
    """
    _, num_steps, num_elements = noise.shape
    rows = noise.flatten(0, 1)
    rows = rows / rows.square().mean(1, keepdim=True).sqrt()
    correlation = ((rows @ rows.T) / num_elements).abs().clamp(max=1 - 1e-6)
    high = (torch.atanh(correlation) * math.sqrt(num_elements - 3) > PAIR_SIGMAS).triu(1)
    row = torch.arange(len(rows), device=rows.device)
    sample, step = row // num_steps, row % num_steps
    same_sample = sample.unsqueeze(1) == sample
    same_step = step.unsqueeze(1) == step
    kinds = {
        "samples share the noise of a step": ~same_sample & same_step,
        "the steps of a sample share their noise": same_sample & ~same_step,
        "samples share noise at different steps": ~same_sample & ~same_step,
    }
    sentences = []
    for words, kind in kinds.items():
        found = high & kind
        if found.any():
            pairs = f"{int(found.sum())} of {int(kind.triu(1).sum())} pairs are correlated"
            sentences.append(f"{words}: {pairs}, by up to {correlation[found].max().item():.2f}")
    return sentences


def check_moments(noise: Tensor) -> list[str]:
    """Compares mean, variance and kurtosis of noise [B, T, K] with those of a standard normal.

    Of N elements they are 0 +- sqrt(1 / N), 1 +- sqrt(2 / N) and 3 +- sqrt(24 / N).
    """
    values = noise.double().flatten()
    square = values.square().mean()
    found = {
        "mean": (values.mean().item(), 0.0, 1.0),
        "variance": (square.item(), 1.0, 2.0),
        "kurtosis": ((values**4).mean().item() / square.item() ** 2, 3.0, 24.0),
    }
    sentences = []
    for name, (value, wanted, variance) in found.items():
        error = SIGMAS * math.sqrt(variance / len(values))
        if abs(value - wanted) > max(error, LEAST[name]):
            sentences.append(f"the {name} of the noise is {value:.3g}, not {wanted:g}")
    return sentences
