"""REINFORCE on samples of another policy, for steps and tokens."""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.base import PolicyLoss


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
) -> PolicyLoss:
    """Computes the loss of REINFORCE for each step, [B, T], without a clip and without metrics.

        L = -A log_prob

    The importance weight current / rollout is applied outside, detached. This is what the documents
    of the rollout correction call pure importance sampling (mathematics, section 3.2.2). The old
    log-probs are not used: every loss is called alike. Steps outside the mask have loss 0 and no
    gradient.
    """
    # Selected before the product as well: 0 times an infinite log-prob has a nan gradient.
    values = -advantages * select(log_probs, keep_mask)
    return PolicyLoss(select(values, keep_mask), MetricBag())
