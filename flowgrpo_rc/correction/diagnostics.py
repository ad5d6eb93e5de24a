"""Diagnostics of the gap between the rollout policy and the training graph, under the documents'
names.

Blocks of rows [b, T] become sums and extrema of each row; the metrics follow once, from those of
all rows [B]. Sequences without a valid step take no part.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments
from flowgrpo_rc.core.reduce import row_max, select_
from flowgrpo_rc.correction.log_ratios import HIGHEST_WEIGHT, LOWEST_WEIGHT, Steps, safe_expm1
from flowgrpo_rc.correction.thresholds import WeightBounds
from flowgrpo_rc.correction.weights import Weights


class GapRows(NamedTuple):
    """Of each row: number of valid steps; sums over them of log-probs, log-ratio, k3, ratio^2 - 1
    and |log-ratio|; the largest |log-ratio|."""

    valid: Tensor
    training: Tensor
    rollout: Tensor
    log_ratio: Tensor
    k3: Tensor
    chi2: Tensor
    absolute: Tensor
    highest_absolute: Tensor


class WeightRows(NamedTuple):
    """Of each row: sums over valid steps of the raw and of the used weight w, of w^2, w - 1 and (w
    - 1)^2; extrema; and how many weights lie above and below the bounds."""

    raw: Tensor
    used: Tensor
    square: Tensor
    deviation: Tensor
    deviation_square: Tensor
    highest: Tensor
    lowest: Tensor
    high: Tensor
    low: Tensor


def gap_rows(steps: Steps) -> GapRows:
    absolute = steps.log_ratio.abs()
    return GapRows(
        valid=steps.count_B,
        training=steps.training_B,
        rollout=steps.rollout_B,
        log_ratio=steps.total_B,
        k3=steps.k3.sum(1),
        chi2=_chi2(steps.ratio_minus_one).sum(1),
        absolute=absolute.sum(1),
        highest_absolute=row_max(absolute),
    )


def weight_rows(steps: Steps, weights: Weights, bounds: WeightBounds) -> WeightRows:
    """The extrema are those after the bounds at token level, and of the unbounded ratio at sequence
    level, as in verl. A lone upper bound has its reciprocal beside it."""
    raw, used, deviation = (
        weights.raw,
        weights.used,
        select_(weights.used - 1, steps.units(weights.used)),
    )
    extreme = used if weights.per_step else weights.unbounded
    return WeightRows(
        raw=steps.sum_B(raw),
        used=steps.sum_B(used),
        square=steps.sum_B(used**2),
        deviation=steps.sum_B(deviation),
        deviation_square=steps.sum_B(deviation**2),
        highest=steps.highest_B(extreme),
        lowest=steps.lowest_B(extreme),
        high=steps.number_B(raw > bounds.upper),
        low=steps.number_B(raw < _lower(bounds)),
    )


def offpolicy_metrics(gap: GapRows) -> MetricBag:
    """Perplexities, KL estimates, chi-squared and |difference|.

    log_ppl_diff is log(training perplexity / rollout perplexity), the mean of -log-ratio of a
    sequence.
    """
    bag = MetricBag()
    present_B, counted, lengths = gap.valid > 0, gap.valid.sum(), gap.valid.clamp(min=1)
    for name, log_probs_B in (("training", gap.training), ("rollout", gap.rollout)):
        log_ppl_B = -log_probs_B / lengths
        bag.mean(f"{name}_log_ppl", log_ppl_B, present_B)
        bag.mean(f"{name}_ppl", safe_expm1(log_ppl_B) + 1, present_B)
    diff_B = -gap.log_ratio / lengths
    bag.mean("log_ppl_diff", diff_B, present_B)
    bag.mean("log_ppl_abs_diff", diff_B.abs(), present_B)
    bag.max("log_ppl_diff_max", diff_B, present_B)
    bag.min("log_ppl_diff_min", diff_B, present_B)
    bag.mean("ppl_ratio", safe_expm1(diff_B) + 1, present_B)
    bag.ratio("kl", -gap.log_ratio.sum(), counted)
    bag.ratio("k3_kl", gap.k3.sum(), counted)
    bag.ratio("chi2_token", gap.chi2.sum(), counted)
    bag.mean("chi2_seq", _chi2(safe_expm1(gap.log_ratio)), present_B)
    bag.ratio("logprob_abs_diff_mean", gap.absolute.sum(), counted)
    bag.max("logprob_abs_diff_max", gap.highest_absolute, present_B)
    return bag


def weight_metrics(
    rows: WeightRows, count_B: Tensor, bounds: WeightBounds, *, per_step: bool
) -> MetricBag:
    """Statistics of the weights; count_B: valid steps of each row.

    mean, std and effective sample size are those after the bounds, before batch normalisation, over
    valid steps. Fractions beyond the bounds count what the level weighs. Standard deviations are
    built from moments about 1, which keep their digits where weights are 1 + 1e-8.
    """
    bag, counted, present_B = MetricBag(), count_B.sum(), count_B > 0
    bag.ratio("rollout_is_mean", rows.used.sum(), counted)
    bag.ratio("rollout_is_raw_mean", rows.raw.sum(), counted)
    bag.ratio("_weight_deviation", rows.deviation.sum(), counted)
    bag.ratio("_weight_deviation_square", rows.deviation_square.sum(), counted)
    moments = ("_weight_deviation", "_weight_deviation_square")
    bag.derive("rollout_is_std", moments, std_from_moments)
    bag.ratio("_weight_square", rows.square.sum(), counted)
    bag.derive(
        "rollout_is_eff_sample_size", ("rollout_is_mean", "_weight_square"), _effective_sample_size
    )
    bag.max("rollout_is_max", rows.highest)
    bag.min("rollout_is_min", rows.lowest)
    units = counted if per_step else present_B.sum()
    bag.ratio("rollout_is_ratio_fraction_high", rows.high.sum(), units)
    bag.ratio("rollout_is_ratio_fraction_low", rows.low.sum(), units)
    if bounds.mode != "truncate":
        outside_B = rows.high + rows.low
        bag.ratio(
            "rollout_is_oob_ratio", (outside_B if per_step else outside_B * count_B).sum(), counted
        )
    used_B, raw_B = (total_B / count_B.clamp(min=1) for total_B in (rows.used, rows.raw))
    bag.merge(_sequence_metrics(used_B, present_B))
    bag.mean("rollout_is_seq_fraction_high", (raw_B > bounds.upper).double(), present_B)
    bag.mean("rollout_is_seq_fraction_low", (raw_B < _lower(bounds)).double(), present_B)
    return bag


def _sequence_metrics(used_B: Tensor, present_B: Tensor) -> MetricBag:
    bag = MetricBag()
    bag.mean("rollout_is_seq_mean", used_B, present_B)
    bag.mean("_seq_deviation", used_B - 1, present_B)
    bag.mean("_seq_deviation_square", (used_B - 1) ** 2, present_B)
    bag.sum("_seq_count", present_B)
    moments = ("_seq_deviation", "_seq_deviation_square", "_seq_count")
    bag.derive("rollout_is_seq_std", moments, sample_std_from_moments)
    bag.max("rollout_is_seq_max", used_B, present_B)
    bag.min("rollout_is_seq_min", used_B, present_B)
    bag.max("rollout_is_seq_max_deviation", (used_B - 1).abs(), present_B)
    return bag


def _lower(bounds: WeightBounds) -> float:
    return 1 / bounds.upper if bounds.mode == "truncate" else bounds.lower


def _effective_sample_size(mean: float, mean_square: float) -> float:
    """1 / mean(w^2) for weights normalised to mean 1: a fraction of the batch; 0 where all weights
    are 0.
    """
    return mean * mean / mean_square if mean_square > 0 else 0.0


def _chi2(ratio_minus_one: Tensor) -> Tensor:
    """ratio^2 - 1 with the ratio bounded to exp(+-20)."""
    bounded = ratio_minus_one.clamp(LOWEST_WEIGHT - 1, HIGHEST_WEIGHT - 1)
    return (bounded + 2).mul_(bounded)
