"""PPO clip on SDE steps: FlowGRPO, arXiv 2505.05470; PPO, arXiv 1707.06347."""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.correction.importance import SAFETY_BOUND
from flowgrpo_rc.losses.base import PolicyLoss


def flow_grpo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, kept: Tensor, clip_ratio: float
) -> PolicyLoss:
    """max(-A r, -A clamp(r, 1 - clip_ratio, 1 + clip_ratio)) with r = exp(log_probs - old_log_probs); all [B, T].

    Steps that are not `kept` take the value 0 before the exponential, so that an infinite difference there has
    neither value nor gradient. A finite difference is bounded to +-20, as the weights are: exp of a diverged one would
    be inf in fp32 and its gradient nan.
    """
    log_ratio = torch.where(kept, log_probs - old_log_probs, torch.zeros_like(log_probs))
    log_ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    values = torch.maximum(-advantages * ratio, -advantages * clipped)
    bag = MetricBag()
    deviation = torch.expm1(log_ratio.detach().double())
    higher, lower = deviation > clip_ratio, deviation < -clip_ratio
    bag.mean("clip_fraction", (higher | lower).double(), kept)
    bag.mean("clip_fraction_higher", higher.double(), kept)
    bag.mean("clip_fraction_lower", lower.double(), kept)
    bag.mean("_deviation", deviation, kept)
    bag.mean("_deviation_square", deviation**2, kept)
    bag.derive("ratio_mean", ("_deviation",), lambda mean: 1 + mean)
    bag.derive("ratio_std", ("_deviation", "_deviation_square"), std_from_moments)
    return PolicyLoss(torch.where(kept, values, torch.zeros_like(values)), bag)
