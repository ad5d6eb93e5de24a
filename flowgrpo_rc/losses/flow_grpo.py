"""FlowGRPO: the PPO clip on the ratio of a denoising step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import DiffusionLoss, PolicyLoss
from flowgrpo_rc.losses.ppo_clip import dual_bound, ppo_clip


@dataclass(frozen=True, kw_only=True)
class FlowGRPO(DiffusionLoss):
    """`ppo_clip` on the mean-pooled ratio exp(log_prob - old_log_prob) of each step.

    Attributes:
      clip_ratio: half-width of the band; of each step, [B, T], if it follows the mismatch.
      dual_clip: where the advantage is negative, the ratio counts as at most 1 + dual_clip *
        clip_ratio; None for no bound.

    See "Flow-GRPO: Training Flow Matching Models via Online RL", https://arxiv.org/abs/2505.05470.
    """

    clip_ratio: float | Tensor
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong `dual_clip`."""
        dual_bound(self.clip_ratio, self.dual_clip)

    @property
    def clip_band(self) -> float | Tensor:
        """Half-width of the band."""
        return self.clip_ratio

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the loss of each step; see `DiffusionLoss`."""
        return ppo_clip(
            log_probs - old_log_probs,
            advantages,
            keep_mask,
            clip_low=self.clip_ratio,
            clip_high=self.clip_ratio,
            dual_clip=dual_bound(self.clip_ratio, self.dual_clip),
        )
