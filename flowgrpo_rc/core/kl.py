"""Divergences: estimators from log-ratios (Schulman, http://joschu.net/blog/kl-approx.html), and
that of Gaussians.

`log_ratio` is log(training / rollout) for samples of the rollout policy; all three estimate
KL(rollout | training).
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """-log_ratio: unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log_ratio^2 / 2: biased, never negative."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) - 1 - log_ratio: unbiased, never negative.

    expm1 in the caller's precision; at the scale of diffusion log-ratios (1e-4) use float64, and
    the clamp removes the last rounding below zero.
    """
    return (torch.expm1(log_ratio) - log_ratio).clamp(min=0)


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """Mean over D of the KL between Gaussians of one standard deviation: (mean - other_mean)^2 / (2
    std^2) -> [B].

    mean, other_mean [B, ...]; std broadcasts to them. The same in both directions, and without
    sampling noise.
    """
    return ((mean - other_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)
