"""GSPO: the PPO clip on one ratio for the whole response."""

from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.ppo_clip import TokenClip


@dataclass(frozen=True, kw_only=True)
class GSPO(TokenClip):
    """`ppo_clip` on the length-normalised ratio of each response; no band on that of one token.

    See "Group Sequence Policy Optimization", https://arxiv.org/abs/2507.18071.
    """

    def log_ratio(self, log_probs: Tensor, old_log_probs: Tensor, keep_mask: Tensor) -> Tensor:
        """Computes the mean log-ratio of each sequence's kept steps, at each of its steps.

            s_t = mean_kept(log_prob - old_log_prob) + log_prob_t - sg(log_prob_t)

        sg stops the gradient: a step has the value of the sequence and the gradient of its own
        log-prob. The mean of these gradients over the kept steps is the gradient of the sequence.

        See "Group Sequence Policy Optimization", https://arxiv.org/abs/2507.18071, sections 4.1 and
        4.3 (the token-level form).
        """
        difference = select(log_probs - old_log_probs, keep_mask).detach()
        # Over kept tokens alone, the only ones that have a difference here.
        mean = difference.sum(1, keepdim=True) / keep_mask.sum(1, keepdim=True).clamp(min=1)
        # x - x.detach() is 0 with the gradient of the token's own log-prob.
        selected = select(log_probs, keep_mask)
        return mean + selected - selected.detach()
