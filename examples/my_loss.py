"""A loss of your own: a function, named by `loss_mode=my_module:function`. Run from this folder:

flowgrpo-rc train actor.diffusion_loss.loss_mode=my_loss:cispo
flowgrpo-rc train --config-name token_grpo actor.token_loss.loss_mode=my_loss:cispo_tokens

The one here is CISPO (https://arxiv.org/abs/2506.13585): PPO's clip takes the gradient from steps
whose ratio has left the band; CISPO bounds the ratio and keeps the gradient of every step.
Advantages, the rollout correction's weights and rejection, the mean over steps and the KL penalty
are the trainer's, as for the losses of the package.
"""

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.base import DiffusionLossConfig, PolicyLoss, TokenLossConfig
from flowgrpo_rc.losses.ppo_clip import ratio_metrics


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    settings: DiffusionLossConfig,
) -> PolicyLoss:
    """Of images: the band is 1 - clip_ratio to 1 + clip_ratio. All [B, T]; `settings` is
    `actor.diffusion_loss`.
    """
    return _cispo(
        log_probs, old_log_probs, advantages, kept, settings.clip_ratio, settings.clip_ratio
    )


def cispo_tokens(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    settings: TokenLossConfig,
) -> PolicyLoss:
    """Of text: `settings` is `actor.token_loss`."""
    return _cispo(
        log_probs,
        old_log_probs,
        advantages,
        kept,
        settings.clip_ratio_low,
        settings.clip_ratio_high,
    )


def _cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    low: float,
    high: float,
) -> PolicyLoss:
    """-A clamp(r, 1 - low, 1 + high) log p, with no gradient through r; 0 where not kept."""
    log_ratio = select(log_probs - old_log_probs, kept)
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    metrics = ratio_metrics(log_ratio, kept)
    metrics.mean("clip_fraction", (weight != ratio).double(), kept)
    return PolicyLoss(-advantages * weight * select(log_probs, kept), metrics)
