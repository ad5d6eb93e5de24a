"""How old the weights are that sampled a batch."""

from __future__ import annotations

from torch import Tensor

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
