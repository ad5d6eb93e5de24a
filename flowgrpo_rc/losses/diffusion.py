"""The loss of SDE steps: correction, policy loss, weights, mask and mean."""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.correct import correct_with, require_rollout_log_probs
from flowgrpo_rc.losses.base import LossConfig
from flowgrpo_rc.losses.flow_grpo import flow_grpo
from flowgrpo_rc.losses.reinforce import reinforce


def diffusion_loss(
    config: LossConfig, log_probs: Tensor, batch: DiffusionBatch, *, num_elements: int | None = None
) -> tuple[Tensor, MetricBag]:
    """Loss (scalar) and metrics for the current policy's log-probs [B, T] on `batch`.

    Bypass mode corrects here, on [B, T] as given (one SDE step at a time in the trainer, so every rejection level
    means the step), with current / rollout: `ppo_clip` takes only the rejection mask, since its ratio is the
    weight; `reinforce` takes mask and weight. Decoupled mode applies the batch's own mask and weights.

    Rejected steps are selected out, never multiplied, and stay in the denominator as the diffusion document has it:
    the mean is over `num_elements` (default: all B x T of this batch; the trainer gives the number in the global
    mini-batch, so that micro-batches and processes add up).

    Raises ValueError where the batch lacks advantages, old or rollout log-probs.
    """
    correction = config.rollout_correction
    if batch.advantages is None or batch.old_log_probs is None:
        raise ValueError("diffusion_loss needs advantages and old_log_probs; fill the batch first")
    metrics = MetricBag()
    kept = torch.ones_like(log_probs, dtype=torch.bool) if batch.rejection_mask is None else batch.rejection_mask
    weights = batch.rollout_is_weights
    if correction.bypass_mode:
        found = correct_with(correction, log_probs, require_rollout_log_probs(batch))
        metrics.merge(found.metrics, "rollout_corr")
        kept = kept & found.mask
        weights = found.weights if correction.loss_type == "reinforce" else None
    limit = config.diffusion_loss.adv_clip_max
    advantages = batch.advantages.to(log_probs.dtype).clamp(-limit, limit)
    if correction.loss_type == "reinforce":
        policy = reinforce(log_probs, advantages, kept)
    else:
        policy = flow_grpo(log_probs, batch.old_log_probs, advantages, kept, config.diffusion_loss.clip_ratio)
    metrics.merge(policy.metrics)
    values = policy.values if weights is None else torch.where(kept, policy.values * weights, 0.0)
    loss = values.sum() / (values.numel() if num_elements is None else num_elements)
    metrics.mean("pg_loss", values)
    return loss, metrics
