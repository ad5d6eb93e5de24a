"""Log-ratios of a block of rows, prepared once for weights, criteria and metrics.

Log-ratios of mean-pooled log-probabilities are of the order of 1e-4, where float32 makes k3
negative and variances zero. Everything here is therefore float64.

Legend: b rows of a block, T steps. A name that ends in `_B` holds one number for each row, [b].
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import row_counts, select

SAFETY_BOUND = 20.0
LOWEST_WEIGHT = math.exp(-SAFETY_BOUND)
HIGHEST_WEIGHT = math.exp(SAFETY_BOUND)
# Above it float64's exp is inf; a diverged policy must show in the metrics without an overflow.
_LARGEST_EXPONENT = 600.0


class LogRatios(NamedTuple):
    """Log-ratios training / rollout of a block of rows, and what follows from them.

    All values but `difference` are 0 outside `finite_mask`. They are [b, T], or [b] if they end in
    `_B`, and those are sums or numbers of steps.
    """

    difference: Tensor  # training minus rollout log-prob as it came, possibly not finite
    step_mask: Tensor  # bool, the steps that exist
    finite_mask: Tensor  # bool, those of them whose difference, and exact KL, are finite
    log_ratio: Tensor  # `difference` inside `finite_mask`
    ratio_minus_one: Tensor  # exp(log_ratio) - 1
    k3: Tensor  # exp(log_ratio) - 1 - log_ratio
    num_steps_B: Tensor
    num_finite_B: Tensor
    training_sum_B: Tensor  # of the training log-probs over finite steps
    rollout_sum_B: Tensor  # of the rollout log-probs, likewise
    log_ratio_sum_B: Tensor
    step_kl: Tensor | None  # exact KL between the Gaussians of each step; None without Gaussians

    def unit_mask(self, values: Tensor) -> Tensor:
        """Returns where `values` stand for something.

        Args:
          values: values of steps, [b, T], or of whole rows, [b, 1].

        Returns:
          The finite steps, bool [b, T], or the rows that have a finite step, bool [b, 1].
        """
        if values.shape == self.finite_mask.shape:
            return self.finite_mask
        return self.num_finite_B.unsqueeze(1) > 0

    def row_sum(self, values: Tensor) -> Tensor:
        """Computes the sum over the finite steps of each row, [b].

        Args:
          values: values of steps, [b, T], 0 where not finite; or of whole rows, [b, 1], which count
            once for each finite step.
        """
        if values.shape[1] == 1:
            return values.squeeze(1) * self.num_finite_B
        return values.sum(1)

    def row_count(self, condition: Tensor) -> Tensor:
        """Counts the units of each row where `condition`, bool [b, T] or [b, 1], holds: [b]."""
        return row_counts(condition & self.unit_mask(condition))

    def row_highest(self, values: Tensor) -> Tensor:
        """Returns the maximum over the units of each row of `values`; -inf without any: [b]."""
        # `amax` fails without a column, which an empty batch may have.
        if values.shape[1] == 0:
            return torch.full_like(self.num_finite_B, -torch.inf)
        return torch.where(self.unit_mask(values), values, -torch.inf).amax(1)

    def row_lowest(self, values: Tensor) -> Tensor:
        """Returns the minimum over the units of each row of `values`; inf without any: [b]."""
        if values.shape[1] == 0:
            return torch.full_like(self.num_finite_B, torch.inf)
        return torch.where(self.unit_mask(values), values, torch.inf).amin(1)


def compute_log_ratios(
    training_log_probs: Tensor,
    rollout_log_probs: Tensor,
    step_mask: Tensor,
    step_kl: Tensor | None = None,
) -> LogRatios:
    """Computes the log-ratios of a block of rows, without gradient.

    Args:
      training_log_probs: log-probs of the training graph, of any floating dtype, [b, T].
      rollout_log_probs: log-probs of the policy that sampled, [b, T].
      step_mask: bool, the steps that exist, [b, T].
      step_kl: exact KL between rollout's and training graph's steps, [b, T]; None without
        Gaussians.

    Returns:
      The log-ratios and what follows from them, float64.
    """
    training_log_probs = training_log_probs.detach().double()
    rollout_log_probs = rollout_log_probs.detach().double()
    # In float64 first, then the difference: fp32 would round what is to be measured.
    difference = training_log_probs - rollout_log_probs
    # Four times as fast as isfinite; false for nan, too.
    finite_mask = step_mask & (difference.abs() < torch.inf)
    if step_kl is not None:
        step_kl = step_kl.detach().double()
        finite_mask = finite_mask & (step_kl.abs() < torch.inf)
        step_kl = select(step_kl, finite_mask)
    log_ratio = select(difference, finite_mask)
    # exp(x) - 1 by expm1: for x of 1e-4, exp in fp32 keeps three digits of it.
    ratio_minus_one = safe_expm1(log_ratio)
    return LogRatios(
        difference=difference,
        step_mask=step_mask,
        finite_mask=finite_mask,
        log_ratio=log_ratio,
        ratio_minus_one=ratio_minus_one,
        k3=(ratio_minus_one - log_ratio).clamp_(min=0),  # `core.kl.k3` has the formula
        num_steps_B=row_counts(step_mask),
        num_finite_B=row_counts(finite_mask),
        # Selects, so that a step that is not finite leaves no nan in a sum.
        training_sum_B=select(training_log_probs, finite_mask).sum(1),
        rollout_sum_B=select(rollout_log_probs, finite_mask).sum(1),
        log_ratio_sum_B=log_ratio.sum(1),
        step_kl=step_kl,
    )


def safe_expm1(log_ratio: Tensor) -> Tensor:
    """Computes exp(log_ratio) - 1, exact for ratios near 1.

    Args:
      log_ratio: log-ratios, float64. Exponents above 600 count as 600, which keeps it finite.

    Returns:
      A new tensor of the same shape.
    """
    # A copy by clamp, then in place: new memory costs more than the arithmetic.
    return log_ratio.clamp(max=_LARGEST_EXPONENT).expm1_()


def safe_weight(ratio_minus_one: Tensor) -> Tensor:
    """Computes the ratio, bounded to exp(+-20), from `safe_expm1` of its logarithm."""
    return (ratio_minus_one + 1).clamp_(LOWEST_WEIGHT, HIGHEST_WEIGHT)
