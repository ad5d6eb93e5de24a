"""Divergences of two policies: Schulman's estimators from samples, and the exact one of Gaussians.

The estimators take log_ratio = log(training / rollout) at samples of the rollout policy, and
estimate KL(rollout | training). Their mean over samples is the estimate.

See "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
"""

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """Computes Schulman's first estimator: unbiased, of either sign.

        k1 = -log_ratio

    Args:
      log_ratio: log(training / rollout) at samples of the rollout policy, of any shape.

    Returns:
      The estimate of KL(rollout | training) at each sample, in nats.
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Computes Schulman's second estimator: biased, never negative.

        k2 = log_ratio^2 / 2

    Args:
      log_ratio: log(training / rollout) at samples of the rollout policy, of any shape.

    Returns:
      The estimate of KL(rollout | training) at each sample, in nats.
    """
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """Computes Schulman's third estimator: unbiased, never negative.

        k3 = exp(log_ratio) - 1 - log_ratio

    Args:
      log_ratio: log(training / rollout) at samples of the rollout policy, of any shape. At the
        scale of diffusion steps (1e-4) it has to be float64: the result is about log_ratio^2 / 2.

    Returns:
      The estimate of KL(rollout | training) at each sample, in nats and in the given precision.
    """
    # expm1 keeps the digits that exp(x) - 1 loses near 0; the clamp removes the last rounding
    # error below zero.
    return (torch.expm1(log_ratio) - log_ratio).clamp(min=0)


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """Computes the KL divergence of two Gaussians with one standard deviation, as a mean over D.

        KL = mean_D[(mean - other_mean)^2] / (2 std^2)

    It is exact, has no sampling noise, and is the same in both directions.

    Args:
      mean: mean of one Gaussian, [B, ...] with D elements for each of B.
      other_mean: mean of the other Gaussian, [B, ...].
      std: standard deviation of both, broadcasts to the means.

    Returns:
      The divergence per element, [B], in nats.
    """
    return ((mean - other_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)
