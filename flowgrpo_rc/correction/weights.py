"""Importance weights from log-ratios training - rollout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select_
from flowgrpo_rc.correction.log_ratios import SAFETY_BOUND, Steps, safe_expm1, safe_weight
from flowgrpo_rc.correction.thresholds import WeightBounds

IS_LEVELS = ("token", "sequence", "geometric")


class Weights(NamedTuple):
    """Weights of steps [b, T], 0 where not valid, or of whole sequences [b, 1] where not
    `per_step`.

    raw: the ratio bounded to exp(+-20); used: after the bounds of the mode; unbounded: the ratio
    with only its upper safety bound, for sequences.
    """

    raw: Tensor
    used: Tensor
    unbounded: Tensor
    per_step: bool


def weigh(steps: Steps, level: str, bounds: WeightBounds) -> Weights:
    """Weights at a level: token (each step), sequence (product over valid steps), geometric (its
    length-th root).
    """
    if level == "token":
        raw = select_(safe_weight(steps.ratio_minus_one), steps.valid)
        used = bound(raw, bounds)
        return Weights(
            raw, select_(used, steps.valid) if bounds.mode == "clip" else used, raw, per_step=True
        )
    log_weight = (steps.total_B if level == "sequence" else steps.mean_B).unsqueeze(1)
    raw = safe_weight(safe_expm1(log_weight))
    unbounded = torch.exp(log_weight.clamp(max=SAFETY_BOUND))
    return Weights(raw, bound(raw, bounds), unbounded, per_step=False)


def bound(weights: Tensor, bounds: WeightBounds) -> Tensor:
    """What a mode makes of weights outside [lower, upper].

    truncate: above `upper` they become `upper` (truncated importance sampling); clip: they move to
        the nearer bound;
    icepop: they become 0; mask: they stay, and `outside` takes their steps out of the mask.
    """
    if bounds.mode == "truncate":
        return weights.clamp(max=bounds.upper)
    if bounds.mode == "clip":
        return weights.clamp(bounds.lower, bounds.upper)
    if bounds.mode == "icepop":
        return torch.where(outside(weights, bounds), torch.zeros_like(weights), weights)
    return weights


def outside(weights: Tensor, bounds: WeightBounds) -> Tensor:
    """Where unbounded weights leave [lower, upper]."""
    return (weights < bounds.lower) | (weights > bounds.upper)
