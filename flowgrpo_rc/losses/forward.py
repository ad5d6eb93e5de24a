"""The objective of finished samples with noise added."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.losses.base import ForwardLoss, LossTerms, Velocities
from flowgrpo_rc.losses.config import DiffusionLossConfig
from flowgrpo_rc.losses.policy import Objective, shares


class ForwardObjective(Objective):
    """The mean of a `ForwardLoss` over all samples and noise levels, times `adv_clip_max`.

    Args:
      config: settings of the loss; ValueError for a wrong one.
    """

    def __init__(self, config: DiffusionLossConfig) -> None:
        loss = config.loss()
        assert isinstance(loss, ForwardLoss)
        self._loss = loss
        self._adv_clip_max = config.adv_clip_max

    def terms(self, log_probs: Tensor, batch: DiffusionBatch, gaussian: Any = None) -> LossTerms:
        """Computes the terms of the loss on a batch.

        Args:
          log_probs: not read: [b, t].
          batch: samples with advantages, [b, t].
          gaussian: the `Velocities` that the loss compares, [b, t, ...].

        Returns:
          Terms that add up over micro-batches and processes.
        """
        assert isinstance(gaussian, Velocities)
        assert batch.advantages is not None
        limit = self._adv_clip_max
        advantages = (batch.advantages / limit).clamp(-1, 1).to(gaussian.current.dtype)
        policy = self._loss(gaussian, advantages)
        counted = batch.step_mask
        share, number = shares(counted, "token-mean", log_probs.dtype)
        total = limit * (policy.values * share).sum()
        zero = number.new_zeros(())
        policy.metrics.ratio("pg_loss", total, number)
        return LossTerms(
            total=total,
            share=share,
            number=number,
            weight_total=zero,
            weight_count=zero,
            metrics=policy.metrics,
            keep_mask=counted,
            weights=None,
        )
