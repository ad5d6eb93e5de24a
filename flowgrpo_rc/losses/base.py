"""Settings and contract of the policy losses. One file in this folder is one loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.config import RolloutCorrectionConfig

KEY = "actor.diffusion_loss"


@dataclass(kw_only=True)
class DiffusionLossConfig:
    """loss_mode: the loss under `loss_type=ppo_clip`; clip_ratio: half-width of the PPO band on the mean-pooled
    ratio; adv_clip_max: advantages are clipped to +- this."""

    loss_mode: str = "flow_grpo"
    clip_ratio: float = 1e-4
    adv_clip_max: float = 5.0

    def validate(self) -> None:
        if self.loss_mode != "flow_grpo":
            raise ValueError(f"{KEY}.loss_mode={self.loss_mode!r}: allowed is flow_grpo")
        if not 0 < self.clip_ratio < 1:
            raise ValueError(f"{KEY}.clip_ratio={self.clip_ratio}: give a number between 0 and 1")
        if not self.adv_clip_max > 0:
            raise ValueError(f"{KEY}.adv_clip_max={self.adv_clip_max}: give a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What `diffusion_loss` reads: the actor's loss settings and the one rollout correction."""

    diffusion_loss: DiffusionLossConfig
    rollout_correction: RolloutCorrectionConfig


class PolicyLoss(NamedTuple):
    """values [B, T]: loss of each step before weights, mask and mean; metrics: names without prefix."""

    values: Tensor
    metrics: MetricBag
