"""Flow-DPPO: a bound on the exact divergence of a step in place of a clip of its ratio."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.log_ratios import SAFETY_BOUND
from flowgrpo_rc.losses.base import REFERENCE_KL_THRESHOLD, DiffusionLoss, LossBound, PolicyLoss
from flowgrpo_rc.losses.ppo_clip import ratio_metrics


@dataclass(frozen=True, kw_only=True)
class FlowDPPO(DiffusionLoss):
    """The policy gradient with a mask on updates that lead too far away.

        L = -A r,   r = exp(log_prob - old_log_prob)
        L = 0 where KL > kl_threshold and (A > 0 and r > 1, or A < 0 and r < 1)

    The KL is the exact one between the step of the old policy and that of the current policy, mean
    over latent elements (the paper's, divided by their number D). No gradient flows through the
    decision. An update that leads a step back towards the old policy is never masked.

    See "Flow-DPPO", https://arxiv.org/abs/2606.11025.
    """

    needs_means = True

    kl_threshold: float | Tensor  # of each step, [B, T], if it follows the mismatch

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
        log_ratio = select(log_probs - old_log_probs, keep_mask)
        log_ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        leads_away = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
        # By the exact KL: the ratio of one sample holds the noise of that sample.
        is_far = gaussian.kl > self.kl_threshold
        masked = leads_away & is_far
        values = select(-advantages * torch.exp(log_ratio), keep_mask & ~masked)
        metrics = ratio_metrics(log_ratio, keep_mask)
        metrics.mean("clip_fraction", masked.double(), keep_mask)
        metrics.mean("kl_above_threshold_fraction", is_far.double(), keep_mask)
        return PolicyLoss(values, metrics)

    def bound(
        self, mismatch: Tensor, gaussian: GaussianSteps | None, *, convention: str
    ) -> LossBound:
        """Returns the bound on the KL; see `DiffusionLoss.bound`."""
        assert gaussian is not None
        assert gaussian.kl is not None
        return LossBound(
            "kl_threshold",
            self.kl_threshold,
            REFERENCE_KL_THRESHOLD,
            "the KL of a step",
            gaussian.kl.double(),
            is_kl=True,
        )
