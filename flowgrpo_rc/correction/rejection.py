"""Rejection sampling: which steps stay in the loss, and the statistics that decide it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from flowgrpo_rc.core.kl import k1, k2
from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.bands import Band
from flowgrpo_rc.correction.steps import Steps


class Rejection(NamedTuple):
    """kept [b, T] bool; metrics: names without prefix."""

    kept: Tensor
    metrics: MetricBag


def reject(steps: Steps, bands: Sequence[Band]) -> Rejection:
    """Leave out what any band rejects and what is not finite; a sequence with such a step fails every sequence band."""
    kept, bag = steps.valid, MetricBag()
    whole_B = (steps.valid == steps.mask).all(1)
    for band in bands:
        value = statistic(steps, band)
        inside = (value >= band.lower) & (value <= band.upper)
        if band.level != "token":
            inside = inside & whole_B.unsqueeze(1)
        kept = kept & inside
        bag.merge(_band_metrics(steps, band, value, inside))
    return Rejection(kept, bag)


def statistic(steps: Steps, band: Band) -> Tensor:
    """The criterion's statistic: of each step [b, T], or of each sequence [b, 1]."""
    estimate = _estimate(steps, band.estimator)
    if band.level == "token":
        return estimate
    if band.level == "seq_max":
        # k2 and k3 are 0 where not valid and never below; the padding gives a row without any step its 0 too.
        return pad(estimate, (0, 1)).amax(1, keepdim=True)
    total = estimate.sum(1, keepdim=True)
    return total if band.level == "seq_sum" else total / steps.count_B.clamp(min=1).unsqueeze(1)


def veto(steps: Steps, log_threshold: float) -> Rejection:
    """Reject every sequence with a step whose ratio is below exp(log_threshold); no bound is applied to the ratio."""
    catastrophic = steps.mask & (steps.difference < log_threshold)
    vetoed_B = catastrophic.any(1)
    bag = MetricBag()
    bag.mean("rollout_is_veto_fraction", vetoed_B.double(), steps.mask.any(1))
    bag.mean("rollout_is_catastrophic_token_fraction", catastrophic.double(), steps.mask)
    return Rejection(~vetoed_B.unsqueeze(1).expand_as(catastrophic), bag)


def rejection_metrics(steps: Steps, kept: Tensor) -> MetricBag:
    """Fractions of steps and of sequences (any step) that are rejected, under all documents' names."""
    bag = MetricBag()
    rejected, exists_B = steps.mask & ~kept, steps.mask.any(1)
    count, sequences = steps.mask.sum(), exists_B.sum()
    for prefix in ("rollout_rs", "rollout_is"):
        bag.ratio(f"{prefix}_masked_fraction", rejected.sum(), count)
        bag.ratio(f"{prefix}_seq_masked_fraction", rejected.any(1).sum(), sequences)
    bag.ratio("rejected_ratio", rejected.any(1).sum(), sequences)
    bag.ratio("rollout_rs_nonfinite_fraction", (steps.mask & ~steps.valid).sum(), count)
    return bag


def _estimate(steps: Steps, estimator: str) -> Tensor:
    """k1, k2 or k3 [b, T]; k3 from the ratio that is there already (`core.kl.k3` has the formula)."""
    if estimator == "k1":
        return k1(steps.log_ratio)
    return k2(steps.log_ratio) if estimator == "k2" else (steps.ratio_minus_one - steps.log_ratio).clamp(min=0)


def _band_metrics(steps: Steps, band: Band, value: Tensor, inside: Tensor) -> MetricBag:
    """Statistics of one criterion under the suffixes that verl 0.9.1 has.

    mean and std (of the statistic clamped to the band) weigh a sequence by its steps. Extrema and fractions count
    sequences where the criterion judges sequences. seq_* are those of each sequence's mean.
    """
    bag, counted, name = MetricBag(), steps.count_B.sum(), f"rollout_rs_{band.name}"
    per_step = value.expand_as(steps.valid)
    units = steps.valid if band.level == "token" else steps.present_B.unsqueeze(1)
    bag.ratio(f"{name}_mean", *_weighted(steps, value, counted))
    clamped = value.clamp(band.lower, band.upper)
    bag.ratio(f"_{name}_clamped", *_weighted(steps, clamped, counted))
    bag.ratio(f"_{name}_clamped_square", *_weighted(steps, clamped**2, counted))
    bag.derive(f"{name}_std", (f"_{name}_clamped", f"_{name}_clamped_square"), std_from_moments)
    bag.max(f"{name}_max", value, units)
    bag.min(f"{name}_min", value, units)
    bag.ratio(f"{name}_fraction_high", ((value > band.upper) & units).sum(), units.sum())
    bag.ratio(f"{name}_fraction_low", ((value < band.lower) & units).sum(), units.sum())
    outside = steps.valid & ~inside
    bag.ratio(f"{name}_masked_fraction", outside.sum(), counted)
    bag.ratio(f"{name}_seq_masked_fraction", outside.any(1).sum(), steps.present_B.sum())
    mean_B = value.squeeze(1) if band.level != "token" else per_step.sum(1) / steps.count_B.clamp(min=1)
    bag.merge(_sequence_metrics(mean_B, steps.present_B, band, name))
    return bag


def _weighted(steps: Steps, value: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over valid steps, and their number."""
    total = select(value, steps.valid).sum() if value.shape == steps.valid.shape else value.squeeze(1) @ steps.count_B
    return total, counted


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
