"""Rejection: which steps stay in the loss, the statistics that decide it, and their metrics."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.kl import k1, k2
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.reduce import row_counts, row_max, select_
from flowgrpo_rc.correction.config import Rules
from flowgrpo_rc.correction.diagnostics import put_sequences
from flowgrpo_rc.correction.log_ratios import LogRatios
from flowgrpo_rc.correction.thresholds import Band
from flowgrpo_rc.correction.weights import Weights, outside


def statistic(ratios: LogRatios, band: Band) -> Tensor:
    """Computes the statistic that a criterion compares with its band.

        k1 = -log r,   k2 = (log r)^2 / 2,   k3 = r - 1 - log r,   kl: the exact KL of a step

    with the ratio r = training / rollout of a step, and over a sequence their sum, mean or maximum.

    Args:
      ratios: log-ratios of a block of rows; with `step_kl` where the criterion is that.
      band: the criterion.

    Returns:
      The statistic of each step, [b, T], 0 where not finite; or of each sequence, [b, 1].

    See "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, for k1 to k3.
    """
    if band.estimator == "kl":
        assert ratios.step_kl is not None
        return ratios.step_kl
    if band.estimator == "k3":
        estimate = ratios.k3
    else:
        estimate = k1(ratios.log_ratio) if band.estimator == "k1" else k2(ratios.log_ratio)
    if band.per_step:
        return estimate
    # From here on a number for each sequence; broken steps are 0 and add nothing.
    if band.level == "seq_max":
        return row_max(estimate).unsqueeze(1)  # k2 and k3 are never negative
    total = estimate.sum(1, keepdim=True)
    if band.level == "seq_sum":
        return total
    return total / ratios.num_finite_B.clamp(min=1).unsqueeze(1)


def judge(
    metrics: MetricBag, ratios: LogRatios, weights: Weights, rules: Rules, allowed: Tensor | None
) -> Tensor:
    """Decides which steps of a block of rows stay in the loss: bool, [b, T].

    A step stays if it is finite, if an earlier decision (`allowed`, bool [b, T]) keeps it, and if
    every criterion, the weight under `mask`, and the veto let it pass.
    """
    keep_mask = ratios.finite_mask if allowed is None else ratios.finite_mask & allowed
    for band in rules.bands:
        keep_mask = keep_mask & inside(metrics, ratios, band, statistic(ratios, band))
    if rules.level is not None and rules.bounds.mode == "mask":
        keep_mask = keep_mask & ~outside(weights.raw, rules.bounds)
    num_catastrophic_B = torch.zeros_like(ratios.num_finite_B)
    if rules.log_veto is not None:
        # The difference as it came, before any bound: a ratio of 0 is catastrophic, too.
        num_catastrophic_B = row_counts(ratios.step_mask & (ratios.difference < rules.log_veto))
        # A single catastrophic step rejects its whole row.
        keep_mask = keep_mask & (num_catastrophic_B == 0).unsqueeze(1)
    put_decisions(metrics, ratios, keep_mask, num_catastrophic_B)
    return keep_mask


def inside(metrics: MetricBag, ratios: LogRatios, band: Band, value: Tensor) -> Tensor:
    """Decides which statistics, of steps [b, T] or of sequences [b, 1], lie inside a band.

    A sequence with a step that is not finite fails every band of sequences. `value` is 0 where
    there is no statistic; `metrics` takes in the metrics of the criterion.
    """
    units = ratios.unit_mask(value)
    high = value > band.upper
    low = value < band.lower
    passes = ~(high | low)
    if not band.per_step:
        # The statistic of a broken sequence leaves its broken steps out, and would hide them.
        all_finite_B = ratios.num_finite_B == ratios.num_steps_B
        passes = passes & all_finite_B.unsqueeze(1)

    # From here on only the metrics of the decision, columns of one number for each row.
    num_high_B = row_counts(high & units)
    num_low_B = row_counts(low & units)
    sum_B = ratios.row_sum(value)
    if band.per_step:
        mean_B = sum_B / ratios.num_finite_B.clamp(min=1)
        num_rejected_B = num_high_B + num_low_B
    else:
        mean_B = value.squeeze(1)
        num_rejected_B = ratios.row_sum(~passes & units)
    clamped = value.clamp(band.lower, band.upper)
    if not band.lower <= 0 <= band.upper:
        # Clamping has moved the zeros of steps that do not exist.
        clamped = select_(clamped, units)
    columns = BandColumns(
        num_finite_B=ratios.num_finite_B,
        sum_B=sum_B,
        mean_B=mean_B,
        clamped_sum_B=ratios.row_sum(clamped),
        clamped_square_sum_B=ratios.row_sum(clamped.square_()),
        highest_B=ratios.row_highest(value),
        lowest_B=ratios.row_lowest(value),
        num_high_B=num_high_B,
        num_low_B=num_low_B,
        num_rejected_B=num_rejected_B,
    )
    metrics.rows(band.name, partial(band_metrics, band), columns)
    return passes


class DecisionColumns(NamedTuple):
    """Holds what `decision_metrics` needs of each row, [B]: numbers of its steps."""

    num_steps_B: Tensor  # that exist
    num_finite_B: Tensor  # that are finite
    num_kept_B: Tensor  # that stay
    num_catastrophic_B: Tensor  # below the veto; 0 without one


def put_decisions(
    metrics: MetricBag, ratios: LogRatios, keep_mask: Tensor, num_catastrophic_B: Tensor
) -> None:
    """Puts the columns of a decision, bool [b, T], about a block of rows into `metrics`."""
    num_kept_B = row_counts(keep_mask)
    columns = DecisionColumns(
        ratios.num_steps_B, ratios.num_finite_B, num_kept_B, num_catastrophic_B
    )
    metrics.rows("decisions", decision_metrics, columns)


def decision_metrics(columns: DecisionColumns) -> MetricBag:
    """Computes the fractions of steps, and of sequences with any step, that are rejected.

    They go under the names of all documents, without prefix.
    """
    metrics = MetricBag()
    num_steps = columns.num_steps_B.sum()
    num_sequences = (columns.num_steps_B > 0).sum()
    num_rejected_B = columns.num_steps_B - columns.num_kept_B
    num_rejected = num_rejected_B.sum()
    num_rejected_sequences = (num_rejected_B > 0).sum()
    for prefix in ("rollout_rs", "rollout_is"):
        metrics.ratio(f"{prefix}_masked_fraction", num_rejected, num_steps)
        metrics.ratio(f"{prefix}_seq_masked_fraction", num_rejected_sequences, num_sequences)
    metrics.ratio("rejected_ratio", num_rejected_sequences, num_sequences)
    num_broken = (columns.num_steps_B - columns.num_finite_B).sum()
    metrics.ratio("rollout_rs_nonfinite_fraction", num_broken, num_steps)
    num_catastrophic = columns.num_catastrophic_B.sum()
    metrics.ratio("rollout_is_catastrophic_token_fraction", num_catastrophic, num_steps)
    num_vetoed = (columns.num_catastrophic_B > 0).sum()
    metrics.ratio("rollout_is_veto_fraction", num_vetoed, num_sequences)
    return metrics


class BandColumns(NamedTuple):
    """Holds what `band_metrics` needs of each row, [B]."""

    num_finite_B: Tensor  # number of finite steps
    sum_B: Tensor  # sum of the statistic over these steps
    mean_B: Tensor  # mean of the statistic over these steps
    clamped_sum_B: Tensor  # sum of the statistic clamped to the band
    clamped_square_sum_B: Tensor  # sum of the square of that
    highest_B: Tensor  # largest statistic, -inf without any
    lowest_B: Tensor  # smallest statistic, inf without any
    num_high_B: Tensor  # number of statistics above the band
    num_low_B: Tensor  # number of statistics below the band
    num_rejected_B: Tensor  # number of steps outside the band


def band_metrics(band: Band, columns: BandColumns) -> MetricBag:
    """Computes statistics of a criterion under the suffixes of verl 0.9.1.

    mean and std weigh a sequence by its steps; extrema and fractions count steps or sequences,
    whichever the criterion judges; seq_* are about each sequence's mean.
    """
    metrics = MetricBag()
    name = f"rollout_rs_{band.name}"
    present_B = columns.num_finite_B > 0
    num_finite = columns.num_finite_B.sum()
    num_sequences = present_B.sum()
    num_units = num_finite if band.per_step else num_sequences
    # Sums over all rows and one division: a mean of means would weigh short rows more.
    metrics.ratio(f"{name}_mean", columns.sum_B.sum(), num_finite)
    metrics.ratio(f"_{name}_clamped", columns.clamped_sum_B.sum(), num_finite)
    metrics.ratio(f"_{name}_clamped_square", columns.clamped_square_sum_B.sum(), num_finite)
    moments = (f"_{name}_clamped", f"_{name}_clamped_square")
    metrics.derive(f"{name}_std", moments, std_from_moments)
    metrics.max(f"{name}_max", columns.highest_B)
    metrics.min(f"{name}_min", columns.lowest_B)
    metrics.ratio(f"{name}_fraction_high", columns.num_high_B.sum(), num_units)
    metrics.ratio(f"{name}_fraction_low", columns.num_low_B.sum(), num_units)
    metrics.ratio(f"{name}_masked_fraction", columns.num_rejected_B.sum(), num_finite)
    num_rejected_sequences = (columns.num_rejected_B > 0).sum()
    metrics.ratio(f"{name}_seq_masked_fraction", num_rejected_sequences, num_sequences)
    put_sequences(metrics, name, columns.mean_B, present_B, centre=0.0)
    metrics.mean(f"{name}_seq_fraction_high", (columns.mean_B > band.upper).double(), present_B)
    metrics.mean(f"{name}_seq_fraction_low", (columns.mean_B < band.lower).double(), present_B)
    return metrics
