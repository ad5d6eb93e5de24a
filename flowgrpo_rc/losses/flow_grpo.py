"""FlowGRPO: the PPO clip on the ratio of a denoising step."""

from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import PolicyLoss
from flowgrpo_rc.losses.ppo_clip import StepClip


@dataclass(frozen=True, kw_only=True)
class FlowGRPO(StepClip):
    """`ppo_clip` on the mean-pooled ratio exp(log_prob - old_log_prob) of each step.

    See "Flow-GRPO: Training Flow Matching Models via Online RL", https://arxiv.org/abs/2505.05470.
    """

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
        return self.clipped(log_probs - old_log_probs, advantages, keep_mask)
