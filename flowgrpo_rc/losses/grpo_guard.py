"""GRPO-Guard, arXiv 2510.22319: the PPO clip on a ratio without bias and of the same scale at every
step.
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import PolicyLoss
from flowgrpo_rc.losses.ppo_clip import ppo_clip


def grpo_guard(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    gaussian: GaussianSteps,
    kl: Tensor,
    *,
    clip_ratio: float,
) -> PolicyLoss:
    """`ppo_clip` with the log-ratio (log_prob - old_log_prob + KL) std, over -dt; all [B, T].

    kl is the exact KL between the step of the old policy and that of the current one, for each
    sample alone. With it the log-ratio is mean_D[(mean - old_mean) (x' - old_mean)] / std, whose
    expectation over x' is 0; without it, -KL: positive advantages would be clipped later than
    negative ones. Gradients flow through the KL.
    """
    log_ratio = (select(log_probs - old_log_probs, kept) + select(kl, kept)) * gaussian.std
    policy = ppo_clip(log_ratio, advantages, kept, low=clip_ratio, high=clip_ratio)
    return policy._replace(values=policy.values / -gaussian.dt)
