"""From log-probs to a loss, for SDE steps and tokens alike: correction, policy loss, weights, mask
and mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector, require_rollout_log_probs
from flowgrpo_rc.losses.base import LossTerms, StepLoss
from flowgrpo_rc.losses.reinforce import reinforce


def loss_terms(
    correction: RolloutCorrectionConfig,
    step_loss: StepLoss,
    log_probs: Tensor,
    batch: Batch,
    *,
    aggregation: str,
    normalize: str,
    step_kl: Tensor | None = None,
) -> LossTerms:
    """The terms of the loss for the current policy's log-probs [B, T] on `batch`.

    Bypass mode corrects here, on [B, T] as given, with current / rollout: `ppo_clip` (the
    `step_loss`) takes only the rejection mask, since its ratio is the weight; `reinforce` takes
    mask and weight. Decoupled mode applies the batch's own mask and weights. Rejected steps are
    selected out, never multiplied; `normalize` is the path's default for whether they stay in the
    denominator; step_kl [B, T] is for the criterion of that name.

    Raises ValueError where the batch lacks advantages, old or rollout log-probs.
    """
    if batch.advantages is None or batch.old_log_probs is None:
        raise ValueError("the loss needs advantages and old_log_probs; fill the batch first")
    metrics, valid, weights = MetricBag(), batch.valid, batch.rollout_is_weights
    kept = valid if batch.rejection_mask is None else valid & batch.rejection_mask
    weight_total = weight_count = torch.zeros((), dtype=torch.float64, device=log_probs.device)
    loss_name = "pg_loss"
    if correction.bypass_mode:
        rollout = require_rollout_log_probs(batch)
        found = Corrector(correction)(
            log_probs,
            rollout,
            valid,
            allowed=batch.rejection_mask,
            step_kl=step_kl,
            num_elements=batch.num_elements,
            normalise=False,
        )
        metrics.merge(found.metrics, "rollout_corr")
        kept, weights = kept & found.mask, None if correction.weights_are_metrics else found.weights
        if (
            correction.rollout_is_batch_normalize
            and found.weight_total is not None
            and found.weight_count is not None
        ):
            weight_total, weight_count, loss_name = (
                found.weight_total,
                found.weight_count,
                "_pg_loss",
            )
            metrics.ratio("_mean_weight", weight_total, weight_count)
            metrics.derive(
                "pg_loss", ("_pg_loss", "_mean_weight"), lambda loss, weight: loss / (weight or 1.0)
            )
    function = reinforce if correction.loss_type == "reinforce" else step_loss
    policy = function(log_probs, batch.old_log_probs, batch.advantages.to(log_probs.dtype), kept)
    if correction.metric_names != "verl" and not correction.bypass_mode:
        policy.metrics.rename({"ratio_mean": "ois"}, keep=correction.metric_names == "both")
    metrics.merge(policy.metrics)
    values = policy.values if weights is None else select(policy.values * weights, kept)
    counted = kept if (correction.normalize or normalize) == "kept" else valid
    share, number = shares(counted, aggregation, log_probs.dtype)
    total = (values * share).sum()
    metrics.ratio(loss_name, total, number)
    return LossTerms(total, share, number, weight_total, weight_count, metrics, kept, weights)


def shares(counted: Tensor, aggregation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """How much each step [B, T] counts in the sum, and the number (float64) that the sum is divided
    by.

    token-mean: the mean over steps; seq-mean-token-sum: over sequences, of their sums;
    seq-mean-token-mean: over sequences, of their means. A sequence without a counted step is none.
    """
    share, counted_B = counted.to(dtype), counted.sum(1)
    if aggregation == "token-mean":
        return share, counted_B.sum().double()
    if aggregation == "seq-mean-token-mean":
        share = share / counted_B.clamp(min=1).unsqueeze(1)
    return share, (counted_B > 0).sum().double()
