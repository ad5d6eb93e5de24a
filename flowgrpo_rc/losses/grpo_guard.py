"""GRPO-Guard: the PPO clip on a ratio without bias and of the same scale at every step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import DiffusionLoss, LossBound, PolicyLoss
from flowgrpo_rc.losses.ppo_clip import dual_bound, ppo_clip

REFERENCE_GUARD_CLIP = 2e-6  # clip_ratio of the published recipe


@dataclass(frozen=True, kw_only=True)
class GRPOGuard(DiffusionLoss):
    """`ppo_clip` on the log-ratio (log_prob - old_log_prob + KL) std, over -dt.

        log_prob - old_log_prob + KL = mean_D[(mean - old_mean) (x' - old_mean)] / std^2

    The KL is the exact one between the step of the old policy and that of the current policy, for
    each sample alone; gradients flow through it. The expectation of this log-ratio over x' is 0.
    Without the KL it is -KL, so that positive advantages would be clipped later than negative ones.

    With a centered correction the log-ratio is centered already, and the KL that a loss with
    `needs_density` gets is 0. The noise is then the one that the rollout drew, in both modes.

    Attributes:
      clip_ratio: half-width of the band on this ratio; of each step, [B, T], if it follows the
        mismatch.
      dual_clip: where the advantage is negative, this ratio counts as at most 1 + dual_clip *
        clip_ratio; None for no bound.

    See "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated Clipping",
    https://arxiv.org/abs/2510.22319.
    """

    needs_means = True
    needs_density = True
    tolerates_mismatch = True

    clip_ratio: float | Tensor
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong `dual_clip`."""
        dual_bound(self.clip_ratio, self.dual_clip)

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the loss of each step; see `DiffusionLoss`."""
        assert gaussian is not None
        assert gaussian.kl is not None
        # Each is selected before the sum: at a rejected step either may be inf.
        difference = select(log_probs - old_log_probs, keep_mask)
        log_ratio = (difference + select(gaussian.kl, keep_mask)) * gaussian.std
        policy = ppo_clip(
            log_ratio,
            advantages,
            keep_mask,
            clip_low=self.clip_ratio,
            clip_high=self.clip_ratio,
            dual_clip=dual_bound(self.clip_ratio, self.dual_clip),
        )
        # The gradient of a step grows with its length: without this, long ones would dominate.
        return policy._replace(values=policy.values / -gaussian.dt)

    def bound(
        self, mismatch: Tensor, gaussian: GaussianSteps | None, *, convention: str
    ) -> LossBound:
        """Returns the bound on the log-ratio above; see `DiffusionLoss.bound`."""
        assert gaussian is not None
        assert gaussian.kl is not None
        log_ratio = (mismatch + gaussian.kl.double()) * gaussian.std.double()
        return LossBound(
            "clip_ratio", self.clip_ratio, REFERENCE_GUARD_CLIP, "Guard's log-ratio", log_ratio
        )
