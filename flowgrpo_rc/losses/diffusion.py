"""The loss of SDE steps."""

from __future__ import annotations

from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import (
    DIFFUSION_KEY,
    LossConfig,
    LossTerms,
    PolicyLoss,
    custom_loss,
    denominator,
)
from flowgrpo_rc.losses.flow_dppo import flow_dppo
from flowgrpo_rc.losses.grpo_guard import grpo_guard
from flowgrpo_rc.losses.policy import loss_terms
from flowgrpo_rc.losses.ppo_clip import ppo_clip


def diffusion_terms(
    config: LossConfig,
    log_probs: Tensor,
    batch: DiffusionBatch,
    gaussian: GaussianSteps | None = None,
) -> LossTerms:
    """`loss_terms` of FlowGRPO for log-probs [B, T]. In bypass mode the trainer gives one SDE step
    at a time, so that every rejection level means the step, or with `bypass_level=window` all of a
    sample. The mean is over all steps, rejected ones included, as the document has it.

    gaussian [B, T]: the steps of the current policy, for what needs more than log-probs: the losses
    `grpo_guard` and `flow_dppo`, and `rollout_rs=step_kl`. ValueError where such a thing is
    missing.
    """
    settings = config.diffusion_loss
    own = custom_loss(DIFFUSION_KEY, settings.loss_mode)
    kl = None if gaussian is None else gaussian.kl

    def step_loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, kept: Tensor
    ) -> PolicyLoss:
        given = (log_probs, old_log_probs, advantages, kept)
        if own is not None:
            return own(*given, settings)
        if settings.loss_mode == "flow_grpo":
            clip = settings.clip_ratio
            return ppo_clip(log_probs - old_log_probs, advantages, kept, low=clip, high=clip)
        if gaussian is None or kl is None:
            raise ValueError(
                f"{DIFFUSION_KEY}.loss_mode={settings.loss_mode} compares the means of the steps "
                "with those of the old "
                "policy, which the batch does not hold (prev_sample_mean)"
            )
        if settings.loss_mode == "grpo_guard":
            policy = grpo_guard(*given, gaussian, kl, clip_ratio=settings.clip_ratio)
        else:
            policy = flow_dppo(*given, kl, kl_threshold=settings.kl_threshold)
        policy.metrics.mean("step_kl_mean", kl, kept)
        policy.metrics.max("step_kl_max", kl, kept)
        return policy

    if batch.advantages is not None:
        limit = settings.adv_clip_max
        batch = batch.replace(advantages=batch.advantages.clamp(-limit, limit))
    correction = config.rollout_correction
    return loss_terms(
        correction,
        step_loss,
        log_probs,
        batch,
        aggregation="token-mean",
        normalize="all",
        step_kl=kl,
    )


def diffusion_loss(
    config: LossConfig,
    log_probs: Tensor,
    batch: DiffusionBatch,
    gaussian: GaussianSteps | None = None,
) -> tuple[Tensor, MetricBag]:
    """Loss (scalar) and metrics for the current policy's log-probs [B, T] on `batch`; see
    `diffusion_terms`.
    """
    terms = diffusion_terms(config, log_probs, batch, gaussian)
    return terms.total / denominator(terms.parts()).to(terms.total.dtype), terms.metrics
