"""The loss of tokens."""

from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.objective import Objective
from flowgrpo_rc.batch import TokenBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.config import Rules
from flowgrpo_rc.losses.base import PolicyLoss, TokenLoss
from flowgrpo_rc.losses.config import LossConfig


class TokenObjective(Objective[TokenBatch]):
    """The loss of GRPO on whole responses; rejected tokens leave the mean, as in the documents for
    language models.
    """

    def __init__(
        self, config: LossConfig, loss: TokenLoss | None = None, rules: Rules | None = None
    ) -> None:
        """Takes the loss and the rules that the settings name; None makes them here."""
        section = config.token_loss
        correction = config.rollout_correction
        super().__init__(correction, rules, aggregation=section.loss_agg_mode, normalize="kept")
        self._loss = section.loss() if loss is None else loss

    def policy_loss(
        self,
        current: Tensor,
        old: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        batch: TokenBatch,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the loss that `loss_mode` names; tokens are no Gaussians."""
        return self._loss(current, old, advantages, keep_mask)


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
    return TokenObjective(config).on_batch(log_probs, batch)
