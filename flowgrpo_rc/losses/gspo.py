"""GSPO: the PPO clip on one ratio for the whole response."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.base import PolicyLoss, TokenLoss
from flowgrpo_rc.losses.ppo_clip import ppo_clip


@dataclass(frozen=True, kw_only=True)
class GSPO(TokenLoss):
    """`ppo_clip` on the length-normalised ratio of each response.

    It has no band on the ratio of a single token.

    Attributes:
      clip_ratio_low: the ratio is clipped at 1 - clip_ratio_low.
      clip_ratio_high: the ratio is clipped at 1 + clip_ratio_high.
      clip_ratio_c: dual clip; None for none.

    See "Group Sequence Policy Optimization", https://arxiv.org/abs/2507.18071.
    """

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
    ) -> PolicyLoss:
        """Computes the loss of each token; see `TokenLoss`."""
        return ppo_clip(
            sequence_log_ratio(log_probs, old_log_probs, keep_mask),
            advantages,
            keep_mask,
            clip_low=self.clip_ratio_low,
            clip_high=self.clip_ratio_high,
            dual_clip=self.clip_ratio_c,
        )


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, keep_mask: Tensor) -> Tensor:
    """Computes the mean log-ratio of each sequence's kept steps.

        s_t = mean_kept(log_prob - old_log_prob) + log_prob_t - sg(log_prob_t)

    sg stops the gradient: a step has the value of the sequence and the gradient of its own
    log-prob. The mean of these gradients over the kept steps is the gradient of the sequence.

    Args:
      log_probs: log-probs of the current policy, [B, T].
      old_log_probs: log-probs of the old policy, [B, T].
      keep_mask: bool, the steps to take the mean over, [B, T].

    Returns:
      The log-ratio of the sequence, at each of its steps, [B, T].

    See "Group Sequence Policy Optimization", https://arxiv.org/abs/2507.18071, sections 4.1 and 4.3
    (the token-level form).
    """
    difference = select(log_probs - old_log_probs, keep_mask).detach()
    # Over kept tokens alone, the only ones that have a difference here.
    mean = difference.sum(1, keepdim=True) / keep_mask.sum(1, keepdim=True).clamp(min=1)
    # own - own.detach() is 0 with the gradient of the token's own log-prob.
    own = select(log_probs, keep_mask)
    return mean + own - own.detach()
