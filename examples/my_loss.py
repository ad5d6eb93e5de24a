"""A loss of your own: a function, named by `loss_mode=my_module:function`. Run from this folder:

flowgrpo-rc train actor.diffusion_loss.loss_mode=my_loss:cispo
flowgrpo-rc train --config-name token_grpo actor.token_loss.loss_mode=my_loss:cispo_tokens

The one here is CISPO (https://arxiv.org/abs/2506.13585): PPO's clip takes the gradient from steps
whose ratio has left the band; CISPO bounds the ratio and keeps the gradient of every step.
Advantages, the rollout correction's weights and rejection, the mean over steps and the KL penalty
are the trainer's, as for the losses of the package. A loss with options of its own is a class: see
docs/extending.md.
"""

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.losses.base import PolicyLoss
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.losses.ppo_clip import ratio_metrics


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    keep_mask: Tensor,
    settings: DiffusionLossConfig,
) -> PolicyLoss:
    """Computes CISPO for images, with the band 1 - clip_ratio to 1 + clip_ratio.

    All tensors are [B, T]; `settings` is `actor.diffusion_loss`.
    """
    width = settings.clip_ratio
    return _cispo(log_probs, old_log_probs, advantages, keep_mask, width, width)


def cispo_tokens(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    keep_mask: Tensor,
    settings: TokenLossConfig,
) -> PolicyLoss:
    """Computes CISPO for text; `settings` is `actor.token_loss`."""
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
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
