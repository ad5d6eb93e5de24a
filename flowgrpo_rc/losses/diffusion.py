"""The loss of SDE steps."""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import LossConfig, LossTerms, PolicyLoss, denominator
from flowgrpo_rc.losses.policy import loss_terms
from flowgrpo_rc.losses.ppo_clip import ppo_clip


def diffusion_terms(
    config: LossConfig, log_probs: Tensor, batch: DiffusionBatch, gaussian: GaussianSteps | None = None
) -> LossTerms:
    """`loss_terms` of FlowGRPO for log-probs [B, T]. In bypass mode the trainer gives one SDE step at a time, so that
    every rejection level means the step, or with `bypass_level=window` all of a sample. The mean is over all steps,
    rejected ones included, as the document has it.

    gaussian [B, T]: the steps of the current policy, for what needs more than log-probs: `rollout_rs=step_kl`.
    """
    settings = config.diffusion_loss

    def step_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, kept: Tensor) -> PolicyLoss:
        clip = settings.clip_ratio
        return ppo_clip(log_probs - old_log_probs, advantages, kept, low=clip, high=clip)

    if batch.advantages is not None:
        limit = settings.adv_clip_max
        batch = batch.replace(advantages=batch.advantages.clamp(-limit, limit))
    correction = config.rollout_correction
    kl = None if gaussian is None else gaussian.kl
    return loss_terms(correction, step_loss, log_probs, batch, aggregation="token-mean", normalize="all", step_kl=kl)


def diffusion_loss(
    config: LossConfig, log_probs: Tensor, batch: DiffusionBatch, gaussian: GaussianSteps | None = None
) -> tuple[Tensor, MetricBag]:
    """Loss (scalar) and metrics for the current policy's log-probs [B, T] on `batch`; see `diffusion_terms`."""
    terms = diffusion_terms(config, log_probs, batch, gaussian)
    return terms.total / denominator(terms.parts()).to(terms.total.dtype), terms.metrics
