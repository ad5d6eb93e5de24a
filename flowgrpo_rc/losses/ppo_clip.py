"""The PPO clip, arXiv 1707.06347, on steps or tokens; as FlowGRPO has it, arXiv 2505.05470; dual
clip, 1912.09729.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.log_ratios import SAFETY_BOUND
from flowgrpo_rc.losses.base import PolicyLoss


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    kept: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> PolicyLoss:
    """max(-A r, -A clamp(r, 1 - low, 1 + high)) with r = exp(log_ratio); all [B, T].

    With `dual`, a negative advantage's loss is at most -A dual. Steps that are not `kept` take the
    value 0 before the exponential, so that an infinite difference there has neither value nor
    gradient. A finite difference is bounded to +-20, as the weights are: exp of a diverged one
    would be inf in fp32 and its gradient nan.
    """
    log_ratio = select(log_ratio, kept).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = torch.exp(log_ratio)
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    deviation = torch.expm1(log_ratio.detach().double())
    higher, lower = deviation > high, deviation < -low
    bag = ratio_metrics(log_ratio, kept)
    if dual is not None:
        bounded = torch.minimum(values, -advantages * dual)
        bag.mean("dual_clip_fraction", ((advantages < 0) & (bounded < values)).double(), kept)
        values = torch.where(advantages < 0, bounded, values)
    bag.mean("clip_fraction", (higher | lower).double(), kept)
    bag.mean("clip_fraction_higher", higher.double(), kept)
    bag.mean("clip_fraction_lower", lower.double(), kept)
    return PolicyLoss(select(values, kept), bag)


def ratio_metrics(log_ratio: Tensor, kept: Tensor) -> MetricBag:
    """Mean and standard deviation of the ratio where `kept`, from moments about 1."""
    bag, deviation = MetricBag(), torch.expm1(log_ratio.detach().double())
    bag.mean("_deviation", deviation, kept)
    bag.mean("_deviation_square", deviation**2, kept)
    bag.derive("ratio_mean", ("_deviation",), lambda mean: 1 + mean)
    bag.derive("ratio_std", ("_deviation", "_deviation_square"), std_from_moments)
    return bag


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, kept: Tensor) -> Tensor:
    """GSPO's ratio (arXiv 2507.18071): the mean log-ratio of the sequence's kept steps, at each of
    its steps [B, T].

    Each step's gradient is that of its own log-prob (the paper's token form); their mean is the
    sequence's.
    """
    difference = select(log_probs - old_log_probs, kept).detach()
    mean = difference.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    own = select(log_probs, kept)
    return mean + own - own.detach()
