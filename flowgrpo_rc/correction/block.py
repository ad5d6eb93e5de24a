"""A block of rows [b, T], from log-probs to weights, mask and what each row adds to the metrics.

Everything of size [b, T] stays inside a block; what leaves it, beside weights and mask, are sums
and extrema of rows. So the metrics do not depend on how rows are blocked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import masked_sum, row_counts, select
from flowgrpo_rc.correction.config import Rules
from flowgrpo_rc.correction.diagnostics import (
    GapRows,
    WeightRows,
    gap_rows,
    offpolicy_metrics,
    weight_metrics,
    weight_rows,
)
from flowgrpo_rc.correction.log_ratios import Steps, join, prepare
from flowgrpo_rc.correction.rejection import (
    BandRows,
    DecisionRows,
    band_metrics,
    count_catastrophic,
    judge,
    rejection_metrics,
    statistic,
)
from flowgrpo_rc.correction.weights import Weights, outside, weigh


class NormalisedRows(NamedTuple):
    """Sum of the weights, and number of the steps, over all valid steps or kept ones."""

    total: Tensor
    number: Tensor


class Summary(NamedTuple):
    """What the metrics need of each row, `bands` in the order of the rules; and `normalised`, of
    which batch normalisation takes the mean."""

    gap: GapRows
    weights: WeightRows
    normalised: NormalisedRows
    decisions: DecisionRows
    bands: Sequence[BandRows]


class Block(NamedTuple):
    """weights [b, T] float64, 0 where there is no step, before batch normalisation; kept [b, T]
    bool.
    """

    weights: Tensor
    kept: Tensor
    summary: Summary


def correct_block(
    training: Tensor,
    rollout: Tensor,
    mask: Tensor,
    rules: Rules,
    *,
    allowed: Tensor | None = None,
    step_kl: Tensor | None = None,
) -> Block:
    """Weights (of the token level if the rules have none), mask and summary for log-probs and exact
    KL [b, T].

    allowed [b, T] bool: what an earlier decision keeps; None for everything.
    """
    steps = prepare(training, rollout, mask, step_kl)
    weights = weigh(steps, rules.level or "token", rules.bounds)
    kept, bands, catastrophic_B = steps.valid, [], torch.zeros_like(steps.count_B)
    if allowed is not None:
        kept = kept & allowed
    for band in rules.bands:
        inside, rows = judge(steps, band, statistic(steps, band))
        kept = kept & inside
        bands.append(rows)
    if rules.level is not None and rules.bounds.mode == "mask":
        kept = kept & ~outside(weights.raw, rules.bounds)
    if rules.log_veto is not None:
        catastrophic_B = count_catastrophic(steps, rules.log_veto)
        kept = kept & (catastrophic_B == 0).unsqueeze(1)
    used = (
        weights.used
        if weights.per_step
        else select(weights.used.expand_as(steps.valid), steps.valid)
    )
    return Block(used, kept, summarise(steps, weights, kept, rules, bands, catastrophic_B))


def summarise(
    steps: Steps,
    weights: Weights,
    kept: Tensor,
    rules: Rules,
    bands: Sequence[BandRows],
    catastrophic_B: Tensor,
) -> Summary:
    """kept: the steps [b, T] that stay; bands: what the criteria found; catastrophic_B: steps below
    the veto.
    """
    weighed = weight_rows(steps, weights, rules.bounds)
    decisions = DecisionRows(steps.existing_B, steps.count_B, row_counts(kept), catastrophic_B)
    normalised = NormalisedRows(weighed.used, steps.count_B)
    if rules.over_kept:
        normalised = NormalisedRows(
            masked_sum(weights.used.expand_as(kept), kept, 1), decisions.kept
        )
    return Summary(gap_rows(steps), weighed, normalised, decisions, bands)


def join_summaries(parts: Sequence[Summary]) -> Summary:
    return Summary(
        join([part.gap for part in parts]),
        join([part.weights for part in parts]),
        join([part.normalised for part in parts]),
        join([part.decisions for part in parts]),
        [join(rows) for rows in zip(*(part.bands for part in parts), strict=True)],
    )


def summary_metrics(summary: Summary, rules: Rules) -> MetricBag:
    count_B = summary.gap.valid
    metrics = offpolicy_metrics(summary.gap)
    metrics.merge(weight_metrics(summary.weights, count_B, rules.bounds, per_step=rules.per_step))
    metrics.merge(rejection_metrics(summary.decisions))
    for band, rows in zip(rules.bands, summary.bands, strict=True):
        metrics.merge(band_metrics(rows, count_B, band))
    return metrics


def mean_parts(summary: Summary, rules: Rules) -> tuple[Tensor, Tensor]:
    """Sum and number of the weights whose mean is normalised: those of steps, or of sequences that
    have a step.
    """
    total_B, number_B = summary.normalised
    if rules.per_step:
        return total_B.sum(), number_B.sum()
    return (total_B / number_B.clamp(min=1)).sum(), (number_B > 0).sum().double()
