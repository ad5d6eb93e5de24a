"""Metrics of the gap between rollout policy and training graph, and of the importance weights.

The names are those of the documents, without prefix. A block of rows [b, T] puts one number of each
row into a `MetricBag`; the metrics are functions of these columns, [B]. Sequences without a finite
step take no part.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments
from flowgrpo_rc.core.reduce import row_max, select_
from flowgrpo_rc.correction.log_ratios import HIGHEST_WEIGHT, LOWEST_WEIGHT, LogRatios, safe_expm1
from flowgrpo_rc.correction.thresholds import WeightBounds
from flowgrpo_rc.correction.weights import Weights


class GapColumns(NamedTuple):
    """Holds what `gap_metrics` needs of each row, [B]; r_t is the ratio training / rollout."""

    num_finite_B: Tensor  # number of finite steps
    training_sum_B: Tensor  # sum of the training log-probs over these steps
    rollout_sum_B: Tensor  # sum of the rollout log-probs
    log_ratio_sum_B: Tensor  # sum of log r_t
    k3_sum_B: Tensor  # sum of r_t - 1 - log r_t
    chi2_sum_B: Tensor  # sum of r_t^2 - 1
    absolute_sum_B: Tensor  # sum of |log r_t|
    highest_absolute_B: Tensor  # maximum of |log r_t|


def put_gap(metrics: MetricBag, ratios: LogRatios) -> None:
    """Puts the gap columns of a block of rows into `metrics`."""
    absolute = ratios.log_ratio.abs()
    columns = GapColumns(
        num_finite_B=ratios.num_finite_B,
        training_sum_B=ratios.training_sum_B,
        rollout_sum_B=ratios.rollout_sum_B,
        log_ratio_sum_B=ratios.log_ratio_sum_B,
        k3_sum_B=ratios.k3.sum(1),
        chi2_sum_B=_chi2(ratios.ratio_minus_one).sum(1),
        absolute_sum_B=absolute.sum(1),
        highest_absolute_B=row_max(absolute),
    )
    metrics.rows("gap", gap_metrics, columns)


def gap_metrics(columns: GapColumns) -> MetricBag:
    """Computes perplexities, KL estimates, chi-squared and the size of the differences.

        log_ppl_diff = log(training perplexity / rollout perplexity) = mean_t(-log r_t)

    of each sequence. `kl` is the mean of -log r_t over all steps, `chi2_token` that of r_t^2 - 1.
    """
    metrics = MetricBag()
    present_B = columns.num_finite_B > 0
    length_B = columns.num_finite_B.clamp(min=1)
    sums = {"training": columns.training_sum_B, "rollout": columns.rollout_sum_B}
    for name, log_prob_sum_B in sums.items():
        log_ppl_B = -log_prob_sum_B / length_B
        metrics.mean(f"{name}_log_ppl", log_ppl_B, present_B)
        metrics.mean(f"{name}_ppl", safe_expm1(log_ppl_B) + 1, present_B)
    # The difference itself, not that of two perplexities, which would cancel.
    log_ppl_diff_B = -columns.log_ratio_sum_B / length_B
    metrics.mean("log_ppl_diff", log_ppl_diff_B, present_B)
    metrics.mean("log_ppl_abs_diff", log_ppl_diff_B.abs(), present_B)
    metrics.max("log_ppl_diff_max", log_ppl_diff_B, present_B)
    metrics.min("log_ppl_diff_min", log_ppl_diff_B, present_B)
    metrics.mean("ppl_ratio", safe_expm1(log_ppl_diff_B) + 1, present_B)
    num_finite = columns.num_finite_B.sum()
    metrics.ratio("kl", -columns.log_ratio_sum_B.sum(), num_finite)
    metrics.ratio("k3_kl", columns.k3_sum_B.sum(), num_finite)
    metrics.ratio("chi2_token", columns.chi2_sum_B.sum(), num_finite)
    metrics.mean("chi2_seq", _chi2(safe_expm1(columns.log_ratio_sum_B)), present_B)
    metrics.ratio("logprob_abs_diff_mean", columns.absolute_sum_B.sum(), num_finite)
    metrics.max("logprob_abs_diff_max", columns.highest_absolute_B, present_B)
    return metrics


class WeightColumns(NamedTuple):
    """Holds what `weight_metrics` needs of each row, [B]; w is a weight after its bounds."""

    num_finite_B: Tensor  # number of finite steps
    raw_sum_B: Tensor  # sum over these steps of the weights before their bounds
    used_sum_B: Tensor  # sum of w
    square_sum_B: Tensor  # sum of w^2
    deviation_sum_B: Tensor  # sum of w - 1
    deviation_square_sum_B: Tensor  # sum of (w - 1)^2
    highest_B: Tensor  # largest weight, -inf without any
    lowest_B: Tensor  # smallest weight, inf without any
    num_high_B: Tensor  # number of weights above the upper bound
    num_low_B: Tensor  # number of weights below the lower bound


def put_weights(
    metrics: MetricBag, ratios: LogRatios, weights: Weights, bounds: WeightBounds
) -> None:
    """Puts the weight columns of a block of rows into `metrics`."""
    # About 1: the square of 1 + 1e-8 has no digit left for the 1e-8.
    deviation = select_(weights.used - 1, ratios.unit_mask(weights.used))
    # As in verl, the extrema are those after the bounds for steps, and before for sequences.
    extreme = weights.used if weights.per_step else weights.unbounded
    columns = WeightColumns(
        num_finite_B=ratios.num_finite_B,
        raw_sum_B=ratios.row_sum(weights.raw),
        used_sum_B=ratios.row_sum(weights.used),
        square_sum_B=ratios.row_sum(weights.used**2),
        deviation_sum_B=ratios.row_sum(deviation),
        deviation_square_sum_B=ratios.row_sum(deviation.square_()),
        highest_B=ratios.row_highest(extreme),
        lowest_B=ratios.row_lowest(extreme),
        num_high_B=ratios.row_count(weights.raw > bounds.upper),
        num_low_B=ratios.row_count(weights.raw < _lower(bounds)),
    )
    metrics.rows("weights", partial(weight_metrics, bounds, weights.per_step), columns)


def weight_metrics(bounds: WeightBounds, per_step: bool, columns: WeightColumns) -> MetricBag:
    """Computes statistics of the weights w after their bounds, before batch normalisation.

        effective sample size = mean(w)^2 / mean(w^2)

    Mean, standard deviation and effective sample size are over finite steps. Standard deviations
    are built from moments about 1, which keep their digits where weights are 1 + 1e-8. Fractions
    beyond the bounds count steps if these are weighed (`per_step`), and sequences otherwise.
    """
    metrics = MetricBag()
    num_finite = columns.num_finite_B.sum()

    # Means over steps, and what follows from them.
    metrics.ratio("rollout_is_mean", columns.used_sum_B.sum(), num_finite)
    metrics.ratio("rollout_is_raw_mean", columns.raw_sum_B.sum(), num_finite)
    metrics.ratio("_weight_deviation", columns.deviation_sum_B.sum(), num_finite)
    metrics.ratio("_weight_deviation_square", columns.deviation_square_sum_B.sum(), num_finite)
    moments = ("_weight_deviation", "_weight_deviation_square")
    metrics.derive("rollout_is_std", moments, std_from_moments)
    metrics.ratio("_weight_square", columns.square_sum_B.sum(), num_finite)
    square = ("rollout_is_mean", "_weight_square")
    metrics.derive("rollout_is_eff_sample_size", square, _effective_sample_size)

    # Extrema and fractions beyond the bounds, of steps or of sequences.
    metrics.max("rollout_is_max", columns.highest_B)
    metrics.min("rollout_is_min", columns.lowest_B)
    num_units = num_finite if per_step else (columns.num_finite_B > 0).sum()
    metrics.ratio("rollout_is_ratio_fraction_high", columns.num_high_B.sum(), num_units)
    metrics.ratio("rollout_is_ratio_fraction_low", columns.num_low_B.sum(), num_units)
    if bounds.mode != "truncate":
        num_outside_B = columns.num_high_B + columns.num_low_B
        if not per_step:
            # A sequence outside the bounds takes all its steps with it.
            num_outside_B = num_outside_B * columns.num_finite_B
        metrics.ratio("rollout_is_oob_ratio", num_outside_B.sum(), num_finite)

    # Of the mean weight of each sequence that has a finite step.
    present_B = columns.num_finite_B > 0
    length_B = columns.num_finite_B.clamp(min=1)
    raw_mean_B = columns.raw_sum_B / length_B
    high_B = (raw_mean_B > bounds.upper).double()
    low_B = (raw_mean_B < _lower(bounds)).double()
    metrics.mean("rollout_is_seq_fraction_high", high_B, present_B)
    metrics.mean("rollout_is_seq_fraction_low", low_B, present_B)
    put_sequences(metrics, "rollout_is", columns.used_sum_B / length_B, present_B, centre=1.0)
    return metrics


def put_sequences(
    metrics: MetricBag, name: str, mean_B: Tensor, present_B: Tensor, *, centre: float
) -> None:
    """Puts statistics of the mean of each sequence under the names that start with `name`_seq.

    Args:
      metrics: takes in the metrics.
      name: of the statistic.
      mean_B: its mean over each sequence, [B].
      present_B: bool, the sequences that have a finite step, [B].
      centre: what deviations and moments are about; 1 for weights, which are near 1.
    """
    deviation_B = mean_B - centre
    metrics.mean(f"{name}_seq_mean", mean_B, present_B)
    metrics.mean(f"_{name}_seq_deviation", deviation_B, present_B)
    metrics.mean(f"_{name}_seq_deviation_square", deviation_B**2, present_B)
    metrics.sum(f"_{name}_seq_count", present_B)
    moments = (f"_{name}_seq_{moment}" for moment in ("deviation", "deviation_square", "count"))
    metrics.derive(f"{name}_seq_std", tuple(moments), sample_std_from_moments)
    metrics.max(f"{name}_seq_max", mean_B, present_B)
    metrics.min(f"{name}_seq_min", mean_B, present_B)
    metrics.max(f"{name}_seq_max_deviation", deviation_B.abs(), present_B)


def _lower(bounds: WeightBounds) -> float:
    """Returns the lower bound of the metrics; for a mode without one, 1 / the upper bound."""
    return 1 / bounds.upper if bounds.mode == "truncate" else bounds.lower


def _effective_sample_size(mean: float, mean_square: float) -> float:
    """Computes mean(w)^2 / mean(w^2), a fraction of the batch; 0 where all weights are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0


def _chi2(ratio_minus_one: Tensor) -> Tensor:
    """Computes ratio^2 - 1 with the ratio bounded to exp(+-20)."""
    # r^2 - 1 = (r - 1)(r + 1), which does not cancel where r is near 1.
    bounded = ratio_minus_one.clamp(LOWEST_WEIGHT - 1, HIGHEST_WEIGHT - 1)
    return (bounded + 2).mul_(bounded)
