"""Rejection sampling: which steps stay in the loss, and the statistics that decide it.

Blocks of rows [b, T] become sums and extrema of each row; the metrics follow once, from those of
all rows [B].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flowgrpo_rc.core.kl import k1, k2
from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments
from flowgrpo_rc.core.reduce import row_counts, row_max, select_
from flowgrpo_rc.correction.log_ratios import Steps
from flowgrpo_rc.correction.thresholds import Band


class BandRows(NamedTuple):
    """A criterion in each row: sum of its statistic over valid steps and mean, sums of the
    statistic clamped to the band and of its square, extrema, how many statistics lie above and
    below the band, how many steps it rejects."""

    total: Tensor
    mean: Tensor
    clamped: Tensor
    clamped_square: Tensor
    highest: Tensor
    lowest: Tensor
    high: Tensor
    low: Tensor
    rejected: Tensor


class DecisionRows(NamedTuple):
    """Numbers of steps in each row: those that exist, are valid, are kept, and have a ratio below
    the veto.
    """

    existing: Tensor
    valid: Tensor
    kept: Tensor
    catastrophic: Tensor


def judge(steps: Steps, band: Band, value: Tensor) -> tuple[Tensor, BandRows]:
    """What a band keeps of statistics [b, T] or [b, 1]. A sequence with a step that is not finite
    fails every sequence band."""
    units, high, low = steps.units(value), value > band.upper, value < band.lower
    inside = ~(high | low)
    if not band.per_step:
        inside = inside & (steps.count_B == steps.existing_B).unsqueeze(1)
    high_B, low_B = steps.number_B(high), steps.number_B(low)
    total_B, clamped = steps.sum_B(value), select_(value.clamp(band.lower, band.upper), units)
    rows = BandRows(
        total=total_B,
        mean=total_B / steps.count_B.clamp(min=1) if band.per_step else value.squeeze(1),
        clamped=steps.sum_B(clamped),
        clamped_square=steps.sum_B(clamped**2),
        highest=steps.highest_B(value),
        lowest=steps.lowest_B(value),
        high=high_B,
        low=low_B,
        rejected=high_B + low_B if band.per_step else steps.sum_B(~inside & units),
    )
    return inside, rows


def statistic(steps: Steps, band: Band) -> Tensor:
    """The criterion's statistic: of each step [b, T], or of each sequence [b, 1]."""
    if band.estimator == "kl":
        assert steps.step_kl is not None
        return steps.step_kl
    if band.estimator == "k3":
        estimate = steps.k3
    else:
        estimate = k1(steps.log_ratio) if band.estimator == "k1" else k2(steps.log_ratio)
    if band.per_step:
        return estimate
    if band.level == "seq_max":
        return row_max(estimate).unsqueeze(1)  # k2 and k3 are never negative
    total = estimate.sum(1, keepdim=True)
    return total if band.level == "seq_sum" else total / steps.count_B.clamp(min=1).unsqueeze(1)


def count_catastrophic(steps: Steps, log_threshold: float) -> Tensor:
    """How many steps of each row have a ratio below exp(log_threshold); no bound is applied to the
    ratio.
    """
    return row_counts(steps.mask & (steps.difference < log_threshold))


def rejection_metrics(rows: DecisionRows) -> MetricBag:
    """Fractions of steps and of sequences (any step) that are rejected, under all documents' names,
    and of those below the veto (0 without one)."""
    bag, sequences = MetricBag(), (rows.existing > 0).sum()
    count, rejected_B = rows.existing.sum(), rows.existing - rows.kept
    for prefix in ("rollout_rs", "rollout_is"):
        bag.ratio(f"{prefix}_masked_fraction", rejected_B.sum(), count)
        bag.ratio(f"{prefix}_seq_masked_fraction", (rejected_B > 0).sum(), sequences)
    bag.ratio("rejected_ratio", (rejected_B > 0).sum(), sequences)
    bag.ratio("rollout_rs_nonfinite_fraction", (rows.existing - rows.valid).sum(), count)
    bag.ratio("rollout_is_catastrophic_token_fraction", rows.catastrophic.sum(), count)
    bag.ratio("rollout_is_veto_fraction", (rows.catastrophic > 0).sum(), sequences)
    return bag


def band_metrics(rows: BandRows, count_B: Tensor, band: Band) -> MetricBag:
    """Statistics of one criterion under the suffixes that verl 0.9.1 has; count_B: valid steps of
    each row.

    mean and std (of the statistic clamped to the band) weigh a sequence by its steps. Extrema and
    fractions count sequences where the criterion judges sequences. seq_* are those of each
    sequence's mean.
    """
    bag, counted, present_B, name = (
        MetricBag(),
        count_B.sum(),
        count_B > 0,
        f"rollout_rs_{band.name}",
    )
    bag.ratio(f"{name}_mean", rows.total.sum(), counted)
    bag.ratio(f"_{name}_clamped", rows.clamped.sum(), counted)
    bag.ratio(f"_{name}_clamped_square", rows.clamped_square.sum(), counted)
    bag.derive(f"{name}_std", (f"_{name}_clamped", f"_{name}_clamped_square"), std_from_moments)
    bag.max(f"{name}_max", rows.highest)
    bag.min(f"{name}_min", rows.lowest)
    units = counted if band.per_step else present_B.sum()
    bag.ratio(f"{name}_fraction_high", rows.high.sum(), units)
    bag.ratio(f"{name}_fraction_low", rows.low.sum(), units)
    bag.ratio(f"{name}_masked_fraction", rows.rejected.sum(), counted)
    bag.ratio(f"{name}_seq_masked_fraction", (rows.rejected > 0).sum(), present_B.sum())
    bag.merge(_sequence_metrics(rows.mean, present_B, band, name))
    return bag


def _sequence_metrics(mean_B: Tensor, present_B: Tensor, band: Band, name: str) -> MetricBag:
    bag = MetricBag()
    bag.mean(f"{name}_seq_mean", mean_B, present_B)
    bag.mean(f"_{name}_seq_square", mean_B**2, present_B)
    bag.sum(f"_{name}_seq_count", present_B)
    moments = (f"{name}_seq_mean", f"_{name}_seq_square", f"_{name}_seq_count")
    bag.derive(f"{name}_seq_std", moments, sample_std_from_moments)
    bag.max(f"{name}_seq_max", mean_B, present_B)
    bag.min(f"{name}_seq_min", mean_B, present_B)
    bag.max(f"{name}_seq_max_deviation", mean_B.abs(), present_B)
    bag.mean(f"{name}_seq_fraction_high", (mean_B > band.upper).double(), present_B)
    bag.mean(f"{name}_seq_fraction_low", (mean_B < band.lower).double(), present_B)
    return bag
