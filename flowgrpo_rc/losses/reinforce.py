"""REINFORCE on samples of another policy, for steps and tokens."""

from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.base import PolicyLoss


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
) -> PolicyLoss:
    """Computes the loss of REINFORCE for each step, without a clip.

        L = -A log_prob

    The importance weight current / rollout is applied outside, detached. This is what the documents
    of the rollout correction call pure importance sampling (mathematics, section 3.2.2).

    Args:
      log_probs: log-probs of the current policy, [B, T].
      old_log_probs: not used; here so that every loss is called alike.
      advantages: advantage of the sample that each step belongs to, [B, T].
      keep_mask: bool, [B, T]; steps outside it have loss 0 and no gradient.

    Returns:
      The loss of each step, [B, T], and no metrics.
    """
    # Selected before the product as well: 0 times an infinite log-prob has a nan gradient.
    values = -advantages * select(log_probs, keep_mask)
    return PolicyLoss(select(values, keep_mask), MetricBag())
