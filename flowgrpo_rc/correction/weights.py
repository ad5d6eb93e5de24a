"""Importance weights from log-ratios training / rollout."""

from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import row_counts, select, select_
from flowgrpo_rc.correction.log_ratios import SAFETY_BOUND, LogRatios, safe_expm1, safe_weight
from flowgrpo_rc.correction.thresholds import WeightBounds

IS_LEVELS = ("token", "sequence", "geometric")


class Weights(NamedTuple):
    """Importance weights of a block of rows: of steps, [b, T], or of sequences, [b, 1]."""

    raw: Tensor  # the ratio bounded to exp(+-20), 0 where not finite
    used: Tensor  # the weight after the bounds of the mode
    unbounded: Tensor  # of sequences, the ratio with its upper safety bound only; of steps, `raw`
    per_step: bool

    def of_steps(self, finite_mask: Tensor) -> Tensor:
        """Returns the weight used for each step, [b, T], 0 outside `finite_mask` (bool [b, T])."""
        if self.per_step:
            return self.used
        return select(self.used.expand_as(finite_mask), finite_mask)


def weigh(ratios: LogRatios, level: str, bounds: WeightBounds) -> Weights:
    """Computes the importance weights at a level.

        token: w_t = r_t,   sequence: w = prod_t r_t,   geometric: w = (prod_t r_t)^(1 / n)

    with the ratio r_t = training / rollout of step t and n finite steps. Weights are bounded to
    exp(+-20), then by the mode.

    Args:
      ratios: log-ratios of a block of rows.
      level: one of `IS_LEVELS`.
      bounds: what happens to a weight that leaves its bounds.

    Returns:
      Weights of steps (token) or of sequences, without gradient.

    See "Decoupled PPO", https://arxiv.org/abs/2110.00641, for the weight of the old policy against
    the one that sampled.
    """
    if level == "token":
        raw = select_(safe_weight(ratios.ratio_minus_one), ratios.finite_mask)
        # Safety bound first, then the mode: `mask` and `icepop` judge the bounded ratio.
        used = bound(raw, bounds)
        if bounds.mode == "clip":
            # The lower bound has raised the zeros of missing steps.
            used = select_(used, ratios.finite_mask)
        return Weights(raw, used, raw, per_step=True)
    # Sums of logarithms, bounded before exp: a product of T ratios would overflow.
    log_weight = ratios.log_ratio_sum_B.unsqueeze(1)
    if level == "geometric":
        log_weight = log_weight / ratios.num_finite_B.clamp(min=1).unsqueeze(1)
    raw = safe_weight(safe_expm1(log_weight))
    # Only for the metrics: how large the weight would have been.
    unbounded = torch.exp(log_weight.clamp(max=SAFETY_BOUND))
    return Weights(raw, bound(raw, bounds), unbounded, per_step=False)


def bound(weights: Tensor, bounds: WeightBounds) -> Tensor:
    """Applies a mode to the weights outside [lower, upper].

    `truncate` lowers larger weights to `upper`; `clip` moves weights to the nearer bound; `icepop`
    sets them to 0; `mask` leaves them as they are, and `outside` takes their steps out of the mask.
    """
    if bounds.mode == "truncate":
        return weights.clamp(max=bounds.upper)
    if bounds.mode == "clip":
        return weights.clamp(bounds.lower, bounds.upper)
    if bounds.mode == "icepop":
        # A select, as everywhere: inf times 0 would be nan.
        return torch.where(outside(weights, bounds), torch.zeros_like(weights), weights)
    return weights


def outside(weights: Tensor, bounds: WeightBounds) -> Tensor:
    """Returns where raw weights are below the lower or above the upper bound, bool."""
    return (weights < bounds.lower) | (weights > bounds.upper)


def mean_weight_terms(ratios: LogRatios, weights: Weights, keep_mask: Tensor | None) -> Tensor:
    """Computes the terms of the mean weight that batch normalisation divides by.

        mean weight = sum of the totals / sum of the numbers, over all rows

    Args:
      ratios: log-ratios of a block of rows.
      weights: their weights.
      keep_mask: bool, [b, T]: the steps that count; None for all finite ones.

    Returns:
      Total and number of the weights of each row, float64 [2, b]: of its steps, or of the sequence
      if it has a step that counts.
    """
    if keep_mask is None:
        total_B = ratios.row_sum(weights.used)
        number_B = ratios.num_finite_B
    else:
        total_B = select(weights.used.expand_as(keep_mask), keep_mask).sum(1)
        number_B = row_counts(keep_mask)
    if not weights.per_step:
        # A sequence counts once, however many steps it has.
        total_B = total_B / number_B.clamp(min=1)
        number_B = (number_B > 0).double()
    return torch.stack([total_B, number_B])
