"""Diagnostics of the gap between the rollout policy and the training graph, under the documents' names.

Sequences without a valid step take no part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments
from flowgrpo_rc.correction.bands import WeightBounds
from flowgrpo_rc.correction.importance import Weights, outside
from flowgrpo_rc.correction.steps import HIGHEST_WEIGHT, LOWEST_WEIGHT, Steps, safe_expm1


def offpolicy_metrics(steps: Steps) -> MetricBag:
    """Perplexities, KL estimates, chi-squared and |difference|.

    log_ppl_diff is log(training perplexity / rollout perplexity), the mean of -log-ratio of a sequence.
    """
    bag = MetricBag()
    present_B, counted = steps.present_B, steps.count_B.sum()
    lengths = steps.count_B.clamp(min=1)
    for name, log_probs in (("training", steps.training), ("rollout", steps.rollout)):
        log_ppl_B = -log_probs.sum(1) / lengths
        bag.mean(f"{name}_log_ppl", log_ppl_B, present_B)
        bag.mean(f"{name}_ppl", safe_expm1(log_ppl_B) + 1, present_B)
    diff_B = -steps.mean_B
    bag.mean("log_ppl_diff", diff_B, present_B)
    bag.mean("log_ppl_abs_diff", diff_B.abs(), present_B)
    bag.max("log_ppl_diff_max", diff_B, present_B)
    bag.min("log_ppl_diff_min", diff_B, present_B)
    bag.mean("ppl_ratio", safe_expm1(diff_B) + 1, present_B)
    bag.ratio("kl", -steps.total_B.sum(), counted)
    bag.ratio("k3_kl", (steps.ratio_minus_one - steps.log_ratio).clamp(min=0).sum(), counted)
    bag.ratio("chi2_token", _chi2(steps.ratio_minus_one).sum(), counted)
    bag.mean("chi2_seq", _chi2(safe_expm1(steps.total_B)), present_B)
    absolute = steps.log_ratio.abs()
    bag.ratio("logprob_abs_diff_mean", absolute.sum(), counted)
    bag.max("logprob_abs_diff_max", absolute, steps.valid)
    return bag


def weight_metrics(steps: Steps, weights: Weights, bounds: WeightBounds) -> MetricBag:
    """Statistics of the weights.

    mean, std and effective sample size are those after the bounds, before batch normalisation, over valid steps.
    max and min are those after the bounds at token level, and of the unbounded ratio at sequence level, as in verl.
    Fractions beyond the bounds (a lone upper bound has its reciprocal beside it) count what the level weighs.
    Standard deviations are built from moments about 1, which keep their digits where weights are 1 + 1e-8.
    """
    bag, counted = MetricBag(), steps.count_B.sum()
    raw, used, per_step = weights.raw, weights.used, weights.per_step
    units = steps.valid if per_step else steps.present_B.unsqueeze(1)
    share = steps.valid.double() if per_step else steps.count_B.unsqueeze(1)
    deviation = used - 1
    bag.ratio("rollout_is_mean", _dot(share, used), counted)
    bag.ratio("rollout_is_raw_mean", _dot(share, raw), counted)
    bag.ratio("_weight_deviation", _dot(share, deviation), counted)
    bag.ratio("_weight_deviation_square", _dot(share, deviation**2), counted)
    moments = ("_weight_deviation", "_weight_deviation_square")
    bag.derive("rollout_is_std", moments, std_from_moments)
    bag.ratio("_weight_square", _dot(share, used**2), counted)
    bag.derive("rollout_is_eff_sample_size", ("rollout_is_mean", "_weight_square"), _effective_sample_size)
    extreme = used if per_step else weights.unbounded
    bag.max("rollout_is_max", extreme, units)
    bag.min("rollout_is_min", extreme, units)
    lower = 1 / bounds.upper if bounds.mode == "truncate" else bounds.lower
    bag.ratio("rollout_is_ratio_fraction_high", ((raw > bounds.upper) & units).sum(), units.sum())
    bag.ratio("rollout_is_ratio_fraction_low", ((raw < lower) & units).sum(), units.sum())
    if bounds.mode != "truncate":
        bag.ratio("rollout_is_oob_ratio", _dot(share, outside(raw, bounds).double()), counted)
    lengths = steps.count_B.clamp(min=1)
    used_B = (share * used).sum(1) / lengths
    raw_B = (share * raw).sum(1) / lengths
    bag.merge(_sequence_metrics(used_B, steps.present_B))
    bag.mean("rollout_is_seq_fraction_high", (raw_B > bounds.upper).double(), steps.present_B)
    bag.mean("rollout_is_seq_fraction_low", (raw_B < lower).double(), steps.present_B)
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


def _dot(share: Tensor, values: Tensor) -> Tensor:
    return torch.dot(share.flatten(), values.flatten())


def _effective_sample_size(mean: float, mean_square: float) -> float:
    """1 / mean(w^2) for weights normalised to mean 1: a fraction of the batch; 0 where all weights are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0


def _chi2(ratio_minus_one: Tensor) -> Tensor:
    """ratio^2 - 1 with the ratio bounded to exp(+-20)."""
    bounded = ratio_minus_one.clamp(LOWEST_WEIGHT - 1, HIGHEST_WEIGHT - 1)
    return bounded * (bounded + 2)
