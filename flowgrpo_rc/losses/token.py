"""The loss of tokens."""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.batch import TokenBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import LossTerms, denominator
from flowgrpo_rc.losses.config import LossConfig
from flowgrpo_rc.losses.policy import LossCorrection, Objective, loss_terms


class TokenObjective(Objective):
    """The loss of GRPO on whole responses; rejected tokens leave the mean, as in the documents for
    language models.

    Args:
      config: settings of the loss and the rollout correction; ValueError for a wrong loss.
    """

    def __init__(self, config: LossConfig) -> None:
        self._loss = config.token_loss.loss()
        self._aggregation = config.token_loss.loss_agg_mode
        self._correction = LossCorrection.of(config.rollout_correction)

    def terms(
        self, log_probs: Tensor, batch: TokenBatch, gaussian: GaussianSteps | None = None
    ) -> LossTerms:
        """Computes the terms of the loss on a batch.

        Args:
          log_probs: log-probs of the current policy, [B, T]; differentiable.
          batch: responses with advantages and old log-probs.
          gaussian: None; tokens are not Gaussian.

        Returns:
          Terms that add up over micro-batches and processes.

        Raises:
          ValueError: if the batch lacks what the loss or the correction needs.
        """
        return loss_terms(
            self._correction,
            self._loss,
            log_probs,
            batch,
            aggregation=self._aggregation,
            normalize="kept",
        )


def token_loss(
    config: LossConfig, log_probs: Tensor, batch: TokenBatch
) -> tuple[Tensor, MetricBag]:
    """Computes the loss of tokens on a whole batch.

    A training loop builds a `TokenObjective` once and sums its terms instead.

    Args:
      config: settings of the loss and the rollout correction.
      log_probs: log-probs of the current policy, [B, T]; differentiable.
      batch: responses with advantages and old log-probs.

    Returns:
      The loss, scalar, and metrics, names without prefix.

    Raises:
      ValueError: if the batch lacks what the loss or the correction needs.
    """
    terms = TokenObjective(config).terms(log_probs, batch)
    return terms.total / denominator(terms.parts()).to(terms.total.dtype), terms.metrics
