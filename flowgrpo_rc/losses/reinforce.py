"""Off-policy REINFORCE without a clip, `pure IS` in the documents (mathematics, section 3.2.2)."""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.base import PolicyLoss


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, kept: Tensor
) -> PolicyLoss:
    """-A log_prob for each step [B, T]; the importance weight is applied outside, detached."""
    return PolicyLoss(select(-advantages * select(log_probs, kept), kept), MetricBag())
