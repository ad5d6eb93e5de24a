"""From two log-probs to a loss, for SDE steps and tokens alike.

Between two log-probs and a mask there are three calls:

    Objective.terms      the loss of what one forward has evaluated: correction, policy loss, mean
      Corrector          the settings of the correction, parsed once; weights
        judge            which steps stay: every criterion of rejection
"""

import copy
import math
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.correct import Corrector, require_rollout_log_probs
from flowgrpo_rc.losses.base import LossTerms, PolicyLoss, counts, denominator
from flowgrpo_rc.losses.reinforce import reinforce

B = TypeVar("B", bound=Batch)


class Objective(ABC, Generic[B]):
    """The loss of a run, built once and called for every forward.

    `aggregation` is the mean that the loss is, see `shares`; `normalize` says which steps it
    counts, `all` or `kept`, if the correction does not. Advantages are clipped to +-
    `adv_clip_max`.
    """

    def __init__(
        self,
        correction: RolloutCorrectionConfig,
        rules: Rules | None,
        *,
        aggregation: str,
        normalize: str,
        adv_clip_max: float = math.inf,
    ) -> None:
        # A copy: settings that a caller changes later change nothing in a run that has begun.
        self._correction = copy.copy(correction)
        self._corrector = Corrector(correction, rules) if correction.bypass_mode else None
        self._aggregation = aggregation
        self._counts_kept = (correction.normalize or normalize) == "kept"
        self._adv_clip_max = adv_clip_max

    @abstractmethod
    def policy_loss(
        self,
        current: Tensor,
        old: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        batch: B,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the configured policy loss of each step, [B, T]; differentiable in `current`.

        `current` and `old` are as `compared` returns them, advantages are clipped, `keep_mask`
        holds the steps that were not rejected; `gaussian` is None where steps are not Gaussian.
        """

    def compared(
        self, log_probs: Tensor, batch: B, gaussian: GaussianSteps | None
    ) -> tuple[Tensor, Tensor]:
        """Returns two numbers for each step, [B, T], of the current and of the old policy.

        Their difference is the log-ratio of the policy loss.
        """
        assert batch.old_log_probs is not None
        return log_probs, batch.old_log_probs

    def terms(
        self, log_probs: Tensor, batch: B, gaussian: GaussianSteps | None = None
    ) -> LossTerms:
        """Computes the terms of the loss on a batch, which add up over micro-batches and processes.

            total = sum over steps of share * weight * policy loss

        Args:
          log_probs: log-probs of the current policy, [B, T]; differentiable.
          batch: samples with advantages and old log-probs; with rollout log-probs if the correction
            is made inside the loss, on [B, T] as given.
          gaussian: the current policy's steps, [B, T]; None where steps are not Gaussian. For
            losses that compare means, for centered log-ratios, and for `rollout_rs=step_kl`.

        Raises:
          ValueError: if the batch lacks what the loss or the correction needs.
        """
        if batch.advantages is None or batch.old_log_probs is None:
            raise ValueError("the loss needs advantages and old_log_probs; fill the batch first")
        current, old = self.compared(log_probs, batch, gaussian)
        step_mask = batch.step_mask
        allowed = batch.rejection_mask
        keep_mask = step_mask if allowed is None else step_mask & allowed
        weights = batch.rollout_is_weights
        weight_sums = None
        metrics = MetricBag()
        if self._corrector is not None:
            correction = self._corrector(
                log_probs,
                require_rollout_log_probs(batch),
                step_mask,
                allowed=allowed,
                step_kl=None if gaussian is None else gaussian.kl,
                num_elements=batch.num_elements,
                all_reduce=None,
            )
            metrics.merge(correction.metrics, "rollout_corr")
            keep_mask = keep_mask & correction.mask
            # The ratio of PPO is the weight already: a second one would count it twice.
            weights = None if self._correction.weights_are_metrics else correction.weights
            weight_sums = correction.weight_sums
        if self._correction.centered:
            # The corrector has looked at the log-probs alone.
            keep_mask = keep_mask & torch.isfinite(current.detach() - old)

        policy = self._policy_loss(current, old, batch, keep_mask, gaussian)
        metrics.merge(policy.metrics)
        values = policy.values
        if weights is not None:
            # A select: 0 * inf of a rejected step would be nan.
            values = select(values * weights, keep_mask)
        counted = keep_mask if self._counts_kept else step_mask
        share, number = shares(counted, self._aggregation, log_probs.dtype)
        total = (values * share).sum()
        _put_loss(metrics, total, number, weight_sums)
        return LossTerms(
            total=total,
            share=share,
            counts=counts(number, weight_sums),
            metrics=metrics,
            keep_mask=keep_mask,
            weights=weights,
        )

    def on_batch(
        self, log_probs: Tensor, batch: B, gaussian: GaussianSteps | None = None
    ) -> tuple[Tensor, MetricBag]:
        """Computes the loss of a whole batch, scalar, and its metrics; arguments as of `terms`."""
        terms = self.terms(log_probs, batch, gaussian)
        return terms.total / denominator(terms.counts).to(terms.total.dtype), terms.metrics

    def _policy_loss(
        self,
        current: Tensor,
        old: Tensor,
        batch: B,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes REINFORCE, or the configured loss, under the names that the settings ask for."""
        limit = self._adv_clip_max
        assert batch.advantages is not None
        advantages = batch.advantages.clamp(-limit, limit).to(current.dtype)
        if self._correction.loss_type == "reinforce":
            policy = reinforce(current, old, advantages, keep_mask)
        else:
            policy = self.policy_loss(current, old, advantages, keep_mask, batch, gaussian)
        names = self._correction.metric_names
        if names != "verl" and self._corrector is None:
            # slime's `ois` is the ratio to a recomputed policy, which bypass mode does not have.
            policy.metrics.rename({"ratio_mean": "ois"}, keep=names == "both")
        return policy


def _put_loss(
    metrics: MetricBag, total: Tensor, number: Tensor, weight_sums: Tensor | None
) -> None:
    """Puts pg_loss, the loss of the batch that all micro-batches and processes make together."""
    if weight_sums is None:
        # A ratio, since other micro-batches and processes still add to both.
        metrics.ratio("pg_loss", total, number)
        return
    # The loss is only known when all processes have added up their weights.
    metrics.ratio("_pg_loss", total, number)
    metrics.ratio("_mean_weight", *weight_sums)
    metrics.derive(
        "pg_loss", ("_pg_loss", "_mean_weight"), lambda loss, weight: loss / (weight or 1.0)
    )


def shares(counted: Tensor, aggregation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes how much each step counts in the sum, [B, T], and what the sum is divided by,
    float64.

    token-mean: the mean over the steps in `counted`, bool [B, T]. seq-mean-token-sum: the mean over
    sequences of their sums. seq-mean-token-mean: the mean over sequences of their means. A sequence
    without a counted step is not a sequence of the mean.
    """
    share = counted.to(dtype)
    counted_B = counted.sum(1)
    if aggregation == "token-mean":
        return share, counted_B.sum().double()
    if aggregation == "seq-mean-token-mean":
        share = share / counted_B.clamp(min=1).unsqueeze(1)
    return share, (counted_B > 0).sum().double()
