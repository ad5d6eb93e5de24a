"""Flow-DPPO, arXiv 2606.11025: a bound on the exact divergence of a step in place of a clip of its
ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.log_ratios import SAFETY_BOUND
from flowgrpo_rc.losses.base import PolicyLoss
from flowgrpo_rc.losses.ppo_clip import ratio_metrics


def flow_dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    kl: Tensor,
    *,
    kl_threshold: float,
) -> PolicyLoss:
    """-A ratio, and 0 where the KL exceeds `kl_threshold` and the update would move the step
    further away: up where the ratio is above 1, down where it is below; all [B, T].

    kl is the exact KL between the step of the old policy and that of the current one, mean over D
    (the paper's divided by D). No gradient flows through the decision; what moves a step back is
    never masked.
    """
    log_ratio = select(log_probs - old_log_probs, kept).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    away = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    masked = away & (kl > kl_threshold)
    values = select(-advantages * torch.exp(log_ratio), kept & ~masked)
    bag = ratio_metrics(log_ratio, kept)
    bag.mean("clip_fraction", masked.double(), kept)
    bag.mean("kl_above_threshold_fraction", (kl > kl_threshold).double(), kept)
    return PolicyLoss(values, bag)
