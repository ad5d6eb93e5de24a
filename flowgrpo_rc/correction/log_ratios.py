"""What every part of the correction reads: the log-ratios of a block of rows, prepared once, in
float64.

Log-ratios of mean-pooled log-probabilities are of the order of 1e-4, where fp32 makes k3 negative
and variances zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import row_counts, select

SAFETY_BOUND = 20.0
LOWEST_WEIGHT, HIGHEST_WEIGHT = math.exp(-SAFETY_BOUND), math.exp(SAFETY_BOUND)
# Above it float64's exp is inf; a diverged policy must show in the metrics without an overflow.
_LARGEST_EXPONENT = 600.0


class Steps(NamedTuple):
    """Rows [b, T] float64 of log-probs; everything is 0 where not `valid`.

    difference: training - rollout as it came, possibly not finite; mask: the steps that exist;
    valid: those of them whose difference (and exact KL, if any) is finite; log_ratio: the
    difference where valid; ratio_minus_one: expm1 of it; k3: their difference; existing_B, count_B:
    numbers of steps and of valid steps in a row; training_B, rollout_B,
    total_B: sums of the log-probs and of the log-ratio over valid steps; step_kl: the exact KL,
        None without Gaussians.
    """

    difference: Tensor
    mask: Tensor
    valid: Tensor
    log_ratio: Tensor
    ratio_minus_one: Tensor
    k3: Tensor
    existing_B: Tensor
    count_B: Tensor
    training_B: Tensor
    rollout_B: Tensor
    total_B: Tensor
    step_kl: Tensor | None

    @property
    def mean_B(self) -> Tensor:
        """The mean log-ratio of a row."""
        return self.total_B / self.count_B.clamp(min=1)

    def units(self, values: Tensor) -> Tensor:
        """What `values` are of: the valid steps where they are [b, T], the rows that have one where
        they are [b, 1].
        """
        return self.valid if values.shape == self.valid.shape else self.count_B.unsqueeze(1) > 0

    def sum_B(self, values: Tensor) -> Tensor:
        """Sum over the valid steps of each row of `values` [b, T], 0 elsewhere, or [b, 1], the same
        at each step.
        """
        return values.squeeze(1) * self.count_B if values.shape[1] == 1 else values.sum(1)

    def number_B(self, condition: Tensor) -> Tensor:
        """In how many units of each row `condition` holds."""
        return row_counts(condition & self.units(condition))

    def highest_B(self, values: Tensor) -> Tensor:
        """Maximum over the units of each row; -inf where there is none."""
        if values.shape[1] == 0:
            return torch.full_like(self.count_B, -torch.inf)
        return torch.where(self.units(values), values, -torch.inf).amax(1)

    def lowest_B(self, values: Tensor) -> Tensor:
        """Minimum over the units of each row; inf where there is none."""
        if values.shape[1] == 0:
            return torch.full_like(self.count_B, torch.inf)
        return torch.where(self.units(values), values, torch.inf).amin(1)


Rows = TypeVar("Rows", bound=tuple[Tensor, ...])


def join(parts: Sequence[Rows]) -> Rows:
    """Named tuples of [b] tensors, one for each block of rows -> one of [B] tensors."""
    return type(parts[0])(*(torch.cat(column) for column in zip(*parts, strict=True)))


def prepare(
    training: Tensor, rollout: Tensor, mask: Tensor, step_kl: Tensor | None = None
) -> Steps:
    """`Steps` of log-probs and exact KL [b, T] of any floating dtype and a bool mask."""
    training, rollout = training.detach().double(), rollout.detach().double()
    difference = training - rollout
    valid = mask & (difference.abs() < torch.inf)  # four times as fast as isfinite
    if step_kl is not None:
        step_kl = step_kl.detach().double()
        valid = valid & (step_kl.abs() < torch.inf)
        step_kl = select(step_kl, valid)
    log_ratio = select(difference, valid)
    ratio_minus_one = safe_expm1(log_ratio)
    return Steps(
        difference=difference,
        mask=mask,
        valid=valid,
        log_ratio=log_ratio,
        ratio_minus_one=ratio_minus_one,
        k3=(ratio_minus_one - log_ratio).clamp_(min=0),  # `core.kl.k3` has the formula
        existing_B=row_counts(mask),
        count_B=row_counts(valid),
        training_B=select(training, valid).sum(1),
        rollout_B=select(rollout, valid).sum(1),
        total_B=log_ratio.sum(1),
        step_kl=step_kl,
    )


def safe_expm1(log_ratio: Tensor) -> Tensor:
    """ratio - 1, exact for ratios near 1; the exponent is bounded so that float64 stays finite."""
    return log_ratio.clamp(max=_LARGEST_EXPONENT).expm1_()


def safe_weight(ratio_minus_one: Tensor) -> Tensor:
    """The ratio, bounded to exp(+-20)."""
    return (ratio_minus_one + 1).clamp_(LOWEST_WEIGHT, HIGHEST_WEIGHT)
