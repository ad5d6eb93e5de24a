"""What every part of the correction reads: the log-ratios of a block of rows, prepared once, in float64.

Log-ratios of mean-pooled log-probabilities are of the order of 1e-4, where fp32 makes k3 negative and variances zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select

SAFETY_BOUND = 20.0
LOWEST_WEIGHT, HIGHEST_WEIGHT = math.exp(-SAFETY_BOUND), math.exp(SAFETY_BOUND)
# Above it float64's exp is inf; a diverged policy must show in the metrics without an overflow.
_LARGEST_EXPONENT = 600.0


class Steps(NamedTuple):
    """Rows [b, T] float64 of log-probs; everything is 0 where not `valid`.

    difference: training - rollout as it came, possibly not finite; mask: the steps that exist; valid: those of them
    whose difference is finite; log_ratio: the difference where valid; ratio_minus_one: expm1 of it;
    count_B, total_B, mean_B: number of valid steps, sum and mean of the log-ratio in a row; present_B: rows that have
    a valid step.
    """

    training: Tensor
    rollout: Tensor
    difference: Tensor
    mask: Tensor
    valid: Tensor
    log_ratio: Tensor
    ratio_minus_one: Tensor
    count_B: Tensor
    total_B: Tensor
    mean_B: Tensor
    present_B: Tensor


def prepare(training: Tensor, rollout: Tensor, mask: Tensor) -> Steps:
    """`Steps` of log-probs [b, T] of any floating dtype and a bool mask."""
    training, rollout = training.detach().double(), rollout.detach().double()
    difference = training - rollout
    valid = mask & torch.isfinite(difference)
    log_ratio = select(difference, valid)
    count_B, total_B = valid.sum(1).double(), log_ratio.sum(1)
    return Steps(
        training=select(training, valid),
        rollout=select(rollout, valid),
        difference=difference,
        mask=mask,
        valid=valid,
        log_ratio=log_ratio,
        ratio_minus_one=safe_expm1(log_ratio),
        count_B=count_B,
        total_B=total_B,
        mean_B=total_B / count_B.clamp(min=1),
        present_B=count_B > 0,
    )


def safe_expm1(log_ratio: Tensor) -> Tensor:
    """ratio - 1, exact for ratios near 1; the exponent is bounded so that float64 stays finite."""
    return torch.expm1(log_ratio.clamp(max=_LARGEST_EXPONENT))


def safe_weight(ratio_minus_one: Tensor) -> Tensor:
    """The ratio, bounded to exp(+-20)."""
    return (ratio_minus_one + 1).clamp(LOWEST_WEIGHT, HIGHEST_WEIGHT)
