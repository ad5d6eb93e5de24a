"""GRPO-Guard: the PPO clip on a ratio without bias and of the same scale at every step."""

from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import LossBound, PolicyLoss
from flowgrpo_rc.losses.ppo_clip import StepClip

REFERENCE_GUARD_CLIP = 2e-6  # clip_ratio of the published recipe


@dataclass(frozen=True, kw_only=True)
class GRPOGuard(StepClip):
    """`ppo_clip` on the log-ratio (log_prob - old_log_prob + KL) std, over -dt.

        log_prob - old_log_prob + KL = mean_D[(mean - old_mean) (x' - old_mean)] / std^2

    The KL is the exact one between the step of the old policy and that of the current policy, for
    each sample alone; gradients flow through it. The expectation of this log-ratio over x' is 0.
    Without the KL it is -KL, so that positive advantages would be clipped later than negative ones.

    With a centered correction the log-ratio is centered already, and the KL that a loss with
    `needs_density` gets is 0. The noise is then the one that the rollout drew, in both modes.

    See "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated Clipping",
    https://arxiv.org/abs/2510.22319.
    """

    needs_means = True
    needs_density = True
    tolerates_mismatch = True
    own_ratio = "centered (GRPO-Guard's own)"

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
        policy = self.clipped(log_ratio, advantages, keep_mask)
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
