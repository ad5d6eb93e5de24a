"""A loss of your own: a class, named by `loss_mode=my_module.MyLoss`. Run from this folder:

flowgrpo-rc train actor.diffusion_loss.loss_mode=my_loss.Cispo
flowgrpo-rc train --config-name token_grpo actor.token_loss.loss_mode=my_loss.CispoTokens

The one here is CISPO (https://arxiv.org/abs/2506.13585): PPO's clip takes the gradient from steps
whose ratio has left the band; CISPO bounds the ratio and keeps the gradient of every step.
Advantages, the rollout correction's weights and rejection, the mean over steps and the KL penalty
are the trainer's, as for the losses of the package. A field is a key beside `loss_mode`: see
docs/extending.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import DiffusionLoss, PolicyLoss, TokenLoss
from flowgrpo_rc.losses.ppo_clip import ratio_metrics


@dataclass(frozen=True, kw_only=True)
class Cispo(DiffusionLoss):
    """CISPO for images, with the band 1 - clip_ratio to 1 + clip_ratio."""

    clip_ratio: float

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the loss of each step; all tensors are [B, T]."""
        width = self.clip_ratio
        return _cispo(log_probs, old_log_probs, advantages, keep_mask, width, width)


@dataclass(frozen=True, kw_only=True)
class CispoTokens(TokenLoss):
    """CISPO for text, with the band 1 - clip_ratio_low to 1 + clip_ratio_high."""

    clip_ratio_low: float
    clip_ratio_high: float

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
    ) -> PolicyLoss:
        """Computes the loss of each token; all tensors are [B, T]."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return _cispo(log_probs, old_log_probs, advantages, keep_mask, low, high)


def _cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    keep_mask: Tensor,
    low: float,
    high: float,
) -> PolicyLoss:
    """-A clamp(r, 1 - low, 1 + high) log p, with no gradient through r; 0 where not kept."""
    log_ratio = select(log_probs - old_log_probs, keep_mask)
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    metrics = ratio_metrics(log_ratio, keep_mask)
    metrics.mean("clip_fraction", (weight != ratio).double(), keep_mask)
    return PolicyLoss(-advantages * weight * select(log_probs, keep_mask), metrics)
