"""From log-probs to a loss, for SDE steps and tokens alike: correction, policy loss, weights, mask
and mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector, require_rollout_log_probs
from flowgrpo_rc.losses.base import LossTerms, StepLoss
from flowgrpo_rc.losses.reinforce import reinforce


class Objective(ABC):
    """The loss of a run, built once and called for every micro-batch."""

    @abstractmethod
    def terms(
        self, log_probs: Tensor, batch: Any, gaussian: GaussianSteps | None = None
    ) -> LossTerms:
        """Computes the terms of the loss on a batch.

        Args:
          log_probs: log-probs of the current policy, [B, T]; differentiable.
          batch: samples with advantages and old log-probs.
          gaussian: the current policy's steps, [B, T]; None where steps are not Gaussian.

        Returns:
          Terms that add up over micro-batches and processes.

        Raises:
          ValueError: if the batch lacks what the loss or the correction needs.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCorrection:
    """What the loss does about the difference between rollout and training graph.

    Attributes:
      corrector: corrects current / rollout inside the loss; None if the batch brings the weights
        and the mask of old / rollout.
      weights_are_metrics: the corrector's weights are only reported, since the PPO ratio is the
        weight already.
      batch_normalize: the corrector's weights are to be divided by their mean over the whole batch.
      centered: the log-ratio of the policy loss is centered (`core.transition.centered_log_ratio`).
      reinforce: REINFORCE is the policy loss, in place of the configured one.
      normalize: steps that the denominator counts, `all` or `kept`; None: the default of the path.
      metric_names: `verl`, `slime` or `both`.
    """

    corrector: Corrector | None
    weights_are_metrics: bool
    batch_normalize: bool
    centered: bool
    reinforce: bool
    normalize: str | None
    metric_names: str

    @classmethod
    def of(cls, config: RolloutCorrectionConfig) -> LossCorrection:
        """Parses the settings of a rollout correction, once for a run."""
        return cls(
            corrector=Corrector(config) if config.corrects_in_loss else None,
            weights_are_metrics=config.weights_are_metrics,
            batch_normalize=config.rollout_is_batch_normalize,
            centered=bool(config.centered),
            reinforce=config.loss_type == "reinforce",
            normalize=config.normalize,
            metric_names=config.metric_names,
        )


class _Corrected(NamedTuple):
    """What the correction makes of a batch.

    Attributes:
      keep_mask: bool, the steps that are trained on, [B, T].
      weights: what the loss of each step is multiplied by, [B, T]; None for nothing.
      mean_weight: sum and number of weights that are still to be divided by their mean; None if
        there are none.
      metrics: names without prefix.
    """

    keep_mask: Tensor
    weights: Tensor | None
    mean_weight: tuple[Tensor, Tensor] | None
    metrics: MetricBag


class Credited(NamedTuple):
    """Two numbers for each step whose difference is the log-ratio of the policy loss.

    Attributes:
      current: of the current policy, [B, T]; differentiable.
      old: of the old policy, [B, T].
    """

    current: Tensor
    old: Tensor


def loss_terms(
    correction: LossCorrection,
    step_loss: StepLoss,
    log_probs: Tensor,
    batch: Batch,
    *,
    aggregation: str,
    normalize: str,
    step_kl: Tensor | None = None,
    credited: Credited | None = None,
) -> LossTerms:
    """Computes the terms of the loss on a batch.

        total = sum over steps of share * weight * policy loss

    Rejected steps are selected out, never multiplied by 0.

    Args:
      correction: what to do about the difference between rollout and training graph.
      step_loss: the policy loss, unless the correction asks for REINFORCE.
      log_probs: log-probs of the current policy, [B, T]; differentiable.
      batch: samples with advantages and old log-probs; with rollout log-probs if the correction is
        made inside the loss, on [B, T] as given.
      aggregation: mean that the loss is, see `shares`.
      normalize: steps that the denominator counts, `all` or `kept`, if the correction does not say.
      step_kl: exact KL between the rollout's steps and the current policy's, [B, T], for the
        criterion of that name.
      credited: what the policy loss takes in place of the log-probs; None for the log-probs.

    Returns:
      Terms that add up over micro-batches and processes.

    Raises:
      ValueError: if the batch lacks advantages, old or rollout log-probs.
    """
    if batch.advantages is None or batch.old_log_probs is None:
        raise ValueError("the loss needs advantages and old_log_probs; fill the batch first")
    corrected = _correct(correction, log_probs, batch, step_kl)
    keep_mask = corrected.keep_mask
    metrics = corrected.metrics

    policy_loss = reinforce if correction.reinforce else step_loss
    advantages = batch.advantages.to(log_probs.dtype)
    if credited is None:
        credited = Credited(log_probs, batch.old_log_probs)
    else:
        # `_correct` has looked at the log-probs alone.
        keep_mask = keep_mask & torch.isfinite(credited.current.detach() - credited.old)
    policy = policy_loss(credited.current, credited.old, advantages, keep_mask)
    if correction.metric_names != "verl" and correction.corrector is None:
        policy.metrics.rename({"ratio_mean": "ois"}, keep=correction.metric_names == "both")
    metrics.merge(policy.metrics)

    values = policy.values
    if corrected.weights is not None:
        values = select(values * corrected.weights, keep_mask)
    counts_kept = (correction.normalize or normalize) == "kept"
    counted = keep_mask if counts_kept else batch.step_mask
    share, number = shares(counted, aggregation, log_probs.dtype)
    total = (values * share).sum()

    if corrected.mean_weight is None:
        weight_total = torch.zeros((), dtype=torch.float64, device=log_probs.device)
        weight_count = weight_total
        metrics.ratio("pg_loss", total, number)
    else:
        weight_total, weight_count = corrected.mean_weight
        # `_correct` has defined pg_loss as this, divided by the mean weight of all processes.
        metrics.ratio("_pg_loss", total, number)
    return LossTerms(
        total=total,
        share=share,
        number=number,
        weight_total=weight_total,
        weight_count=weight_count,
        metrics=metrics,
        keep_mask=keep_mask,
        weights=corrected.weights,
    )


def _correct(
    correction: LossCorrection, log_probs: Tensor, batch: Batch, step_kl: Tensor | None
) -> _Corrected:
    """Corrects current / rollout inside the loss, or takes the correction that the batch brings."""
    metrics = MetricBag()
    valid = batch.step_mask
    keep_mask = valid if batch.rejection_mask is None else valid & batch.rejection_mask
    if correction.corrector is None:
        return _Corrected(keep_mask, batch.rollout_is_weights, None, metrics)
    found = correction.corrector(
        log_probs,
        require_rollout_log_probs(batch),
        valid,
        allowed=batch.rejection_mask,
        step_kl=step_kl,
        num_elements=batch.num_elements,
        normalise=False,
    )
    metrics.merge(found.metrics, "rollout_corr")
    weights = None if correction.weights_are_metrics else found.weights
    mean_weight = None
    if correction.batch_normalize and found.weight_total is not None:
        assert found.weight_count is not None
        mean_weight = (found.weight_total, found.weight_count)
        # The loss is only known when all processes have added up their weights.
        metrics.ratio("_mean_weight", *mean_weight)
        metrics.derive(
            "pg_loss", ("_pg_loss", "_mean_weight"), lambda loss, weight: loss / (weight or 1.0)
        )
    return _Corrected(keep_mask & found.mask, weights, mean_weight, metrics)


def shares(counted: Tensor, aggregation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes how much each step counts in the sum, and what the sum is divided by.

    token-mean: the mean over steps. seq-mean-token-sum: the mean over sequences of their sums.
    seq-mean-token-mean: the mean over sequences of their means. A sequence without a counted step
    is not a sequence of the mean.

    Args:
      counted: bool, the steps that the mean is taken over, [B, T].
      aggregation: one of the three means.
      dtype: of the shares.

    Returns:
      The share of each step, [B, T], and the number of steps or sequences, float64 scalar.
    """
    share = counted.to(dtype)
    counted_B = counted.sum(1)
    if aggregation == "token-mean":
        return share, counted_B.sum().double()
    if aggregation == "seq-mean-token-mean":
        share = share / counted_B.clamp(min=1).unsqueeze(1)
    return share, (counted_B > 0).sum().double()
