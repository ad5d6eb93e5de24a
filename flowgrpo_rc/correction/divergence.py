"""Diagnostics of the gap between the rollout policy and the training graph, under the documents' names.

Log-ratios of mean-pooled log-probabilities are of the order of 1e-4, where fp32 makes k3 negative and variances
zero: everything here is float64. Sequences without a valid step take no part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowgrpo_rc.core.kl import k1, k3
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.reduce import masked_mean, masked_sum
from flowgrpo_rc.correction.importance import SAFETY_BOUND, aggregate, raw_weights

_LARGEST_EXPONENT = 700.0


def offpolicy_metrics(training: Tensor, rollout: Tensor, mask: Tensor) -> MetricBag:
    """Perplexities, KL estimates, chi-squared and |difference| for log-probs [B, T] float64."""
    bag = MetricBag()
    log_ratio = training - rollout
    present = mask.any(1)
    training_log_ppl = -masked_mean(training, mask, 1)
    rollout_log_ppl = -masked_mean(rollout, mask, 1)
    difference = rollout_log_ppl - training_log_ppl
    bag.mean("training_log_ppl", training_log_ppl, present)
    bag.mean("training_ppl", training_log_ppl.exp(), present)
    bag.mean("rollout_log_ppl", rollout_log_ppl, present)
    bag.mean("rollout_ppl", rollout_log_ppl.exp(), present)
    bag.mean("log_ppl_diff", difference, present)
    bag.mean("log_ppl_abs_diff", difference.abs(), present)
    bag.max("log_ppl_diff_max", difference, present)
    bag.min("log_ppl_diff_min", difference, present)
    bag.derive("ppl_ratio", ("log_ppl_diff",), lambda diff: math.exp(min(-diff, _LARGEST_EXPONENT)))
    bag.mean("kl", k1(log_ratio), mask)
    bag.mean("k3_kl", k3(log_ratio), mask)
    bounded = 2 * SAFETY_BOUND
    bag.mean("chi2_token", torch.expm1((2 * log_ratio).clamp(-bounded, bounded)), mask)
    bag.mean("chi2_seq", torch.expm1((2 * masked_sum(log_ratio, mask, 1)).clamp(-bounded, bounded)), present)
    bag.mean("logprob_abs_diff_mean", log_ratio.abs(), mask)
    bag.max("logprob_abs_diff_max", log_ratio.abs(), mask)
    return bag


def weight_metrics(log_ratio: Tensor, weights: Tensor, mask: Tensor, level: str, upper: float) -> MetricBag:
    """Statistics of the weights after truncation, as the diffusion document defines them.

    The fractions above and below the bounds (`upper` and its reciprocal) come from the log-ratio, before truncation.
    Standard deviations are built from moments about 1, which keep their digits where weights are 1 + 1e-8.
    """
    bag = MetricBag()
    present = mask.any(1)
    bag.mean("rollout_is_mean", weights, mask)
    bag.mean("_weight_deviation", weights - 1, mask)
    bag.mean("_weight_deviation_square", (weights - 1) ** 2, mask)
    bag.max("rollout_is_max", weights, mask)
    bag.min("rollout_is_min", weights, mask)
    moments = ("_weight_deviation", "_weight_deviation_square")
    bag.derive("rollout_is_std", moments, std_from_moments)
    bag.derive("rollout_is_eff_sample_size", moments, _effective_sample_size)
    unbounded, limit = aggregate(log_ratio, mask, level), math.log(upper)
    bag.mean("rollout_is_ratio_fraction_high", (unbounded > limit).double(), mask)
    bag.mean("rollout_is_ratio_fraction_low", (unbounded < -limit).double(), mask)
    sequence = masked_mean(weights, mask, 1)
    bag.mean("rollout_is_seq_mean", sequence, present)
    bag.mean("_seq_deviation", sequence - 1, present)
    bag.mean("_seq_deviation_square", (sequence - 1) ** 2, present)
    bag.max("rollout_is_seq_max", sequence, present)
    bag.min("rollout_is_seq_min", sequence, present)
    bag.max("rollout_is_seq_max_deviation", (sequence - 1).abs(), present)
    bag.derive("rollout_is_seq_std", ("_seq_deviation", "_seq_deviation_square"), std_from_moments)
    unbounded_sequence = masked_mean(raw_weights(log_ratio, mask, level), mask, 1)
    bag.mean("rollout_is_seq_fraction_high", (unbounded_sequence > upper).double(), present)
    bag.mean("rollout_is_seq_fraction_low", (unbounded_sequence < 1 / upper).double(), present)
    return bag


def rejection_metrics(kept: Tensor, mask: Tensor, log_ratio: Tensor) -> MetricBag:
    """Fractions of steps and of sequences (any step) that were rejected, under both documents' names."""
    bag = MetricBag()
    rejected = mask & ~kept
    present = mask.any(1)
    for prefix in ("rollout_rs", "rollout_is"):
        bag.mean(f"{prefix}_masked_fraction", rejected.double(), mask)
        bag.mean(f"{prefix}_seq_masked_fraction", rejected.any(1).double(), present)
    bag.mean("rollout_rs_nonfinite_fraction", (~torch.isfinite(log_ratio)).double(), mask)
    bag.mean("rollout_is_veto_fraction", torch.zeros_like(present, dtype=torch.float64), present)
    return bag


def _effective_sample_size(deviation: float, square_deviation: float) -> float:
    """1 / mean(w^2) for weights normalised to mean 1, a fraction of the batch; from moments of w - 1."""
    square = square_deviation + 2 * deviation + 1
    return (1 + deviation) ** 2 / square if square > 0 else 0.0
