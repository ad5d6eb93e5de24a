"""How old the weights are that sampled a batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag


def staleness(policy_version: Tensor, step: int) -> MetricBag:
    """Measures how many steps the weights were behind, and which they were.

    Args:
      policy_version: version of the weights that made each sample, [B] int64.
      step: the step that the samples are for, from 1; fresh weights have the version step - 1.
    """
    behind = step - 1 - policy_version
    metrics = MetricBag()
    metrics.mean("rollout/staleness_mean", behind)
    metrics.max("rollout/staleness_max", behind)
    metrics.min("rollout/policy_version_min", policy_version)
    metrics.max("rollout/policy_version_max", policy_version)
    return metrics


def reuse_age(batches: Sequence[Batch], step: int) -> MetricBag:
    """Measures how many steps the weights were behind that made earlier batches.

    Args:
      batches: the batches that the step trains on again; without any there is no metric.
      step: the step, from 1.
    """
    metrics = MetricBag()
    for batch in batches:
        behind = step - 1 - batch.policy_version
        metrics.mean("reuse/age_mean", behind)
        metrics.max("reuse/age_max", behind)
    return metrics
