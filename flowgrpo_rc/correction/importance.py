"""Importance weights from log-ratios [B, T] (training - rollout)."""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import AllReduce, identity, masked_mean, masked_sum

SAFETY_BOUND = 20.0


def aggregate(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """The log-ratio of a `token`, or of the `sequence` it stands in (sum over valid steps) -> [B, T]."""
    if level == "token":
        return log_ratio
    return masked_sum(log_ratio, mask, 1).unsqueeze(1).expand_as(log_ratio)


def raw_weights(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp of the aggregated log-ratio, bounded to exp(+-20), 0 where `mask` does not hold."""
    weights = torch.exp(aggregate(log_ratio, mask, level).clamp(-SAFETY_BOUND, SAFETY_BOUND))
    return torch.where(mask, weights, torch.zeros_like(weights))


def truncate(weights: Tensor, upper: float) -> Tensor:
    """Truncated importance sampling: weights above `upper` become `upper`."""
    return weights.clamp(max=upper)


def batch_mean(weights: Tensor, mask: Tensor, level: str, *, all_reduce: AllReduce = identity) -> Tensor:
    """The mean that batch normalisation divides by: over valid tokens, or over sequences that have a valid step."""
    if level == "token":
        return masked_mean(weights, mask, all_reduce=all_reduce)
    return masked_mean(masked_mean(weights, mask, 1), mask.any(1), all_reduce=all_reduce)
