"""The one entry of rollout correction: log-probs [B, T] in, weights and mask out.

It sees only [B, T] and a mask of valid steps (all of them for a diffusion window). References: rollout correction in
verl and verl-omni; decoupled PPO, arXiv 2110.00641; truncated importance sampling and rejection as described there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.correction.bands import Band, parse_bands
from flowgrpo_rc.correction.config import IS_LEVELS, KEY, RolloutCorrectionConfig
from flowgrpo_rc.correction.divergence import offpolicy_metrics, rejection_metrics, weight_metrics
from flowgrpo_rc.correction.importance import batch_mean, raw_weights, truncate
from flowgrpo_rc.correction.rejection import rejection_mask


class Correction(NamedTuple):
    """weights [B, T] or None, without gradient and 0 at invalid steps; mask [B, T] bool, True where kept."""

    weights: Tensor | None
    mask: Tensor
    metrics: MetricBag


class CorrectionResult(NamedTuple):
    """As `Correction`, with the metrics on the host."""

    weights: Tensor | None
    mask: Tensor
    metrics: Mapping[str, float]


def correct(
    training_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    rollout_is: str | None,
    rollout_is_threshold: float,
    batch_normalize: bool,
    bands: Sequence[Band],
    all_reduce: AllReduce = identity,
) -> Correction:
    """Weights, mask and diagnostics for log-probs [B, T] of the training graph and of the rollout.

    A step whose difference is not finite is rejected, whatever is configured, and counted in
    `rollout_rs_nonfinite_fraction`; it takes no part in weights or in any other metric. A sequence criterion sees it
    and rejects the sequence. Without `rollout_is` the weight metrics are those of the token level.
    """
    training, rollout = training_log_probs.detach().double(), rollout_log_probs.detach().double()
    difference = training - rollout
    finite = mask & torch.isfinite(difference)
    kept = rejection_mask(difference, mask, bands)
    training, rollout = _select(training, finite), _select(rollout, finite)
    log_ratio = training - rollout
    level = rollout_is or "token"
    weights = truncate(raw_weights(log_ratio, finite, level), rollout_is_threshold)
    metrics = offpolicy_metrics(training, rollout, finite)
    metrics.merge(weight_metrics(log_ratio, weights, finite, level, rollout_is_threshold))
    metrics.merge(rejection_metrics(kept, mask, difference))
    if batch_normalize:
        factor = batch_mean(weights, finite, level, all_reduce=all_reduce)
        metrics.max("rollout_is_batch_norm_factor", factor)
        weights = weights / factor.clamp(min=torch.finfo(torch.float64).tiny)
    return Correction(None if rollout_is is None else weights.to(training_log_probs.dtype), kept, metrics)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | Sequence[str] | None = None,
    rollout_rs_threshold: float | str | Sequence[float | str] | None = None,
) -> CorrectionResult:
    """Importance weights, rejection mask and metrics (named `rollout_corr/...`) for log-probs [B, T].

    `old_log_prob` is the training graph's, `response_mask` marks the valid steps. Settings mean what they mean in
    `RolloutCorrectionConfig`. Raises ValueError for wrong settings or shapes that differ.
    """
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape or old_log_prob.ndim != 2:
        raise ValueError(
            "old_log_prob, rollout_log_prob and response_mask must all be [B, T]; got "
            f"{tuple(old_log_prob.shape)}, {tuple(rollout_log_prob.shape)} and {tuple(response_mask.shape)}"
        )
    settings = RolloutCorrectionConfig(
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    settings.validate()
    found = correct(
        old_log_prob,
        rollout_log_prob,
        response_mask.bool(),
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        batch_normalize=rollout_is_batch_normalize,
        bands=settings.bands(),
    )
    bag = MetricBag()
    bag.merge(found.metrics, "rollout_corr")
    mask = found.mask.to(response_mask.dtype)
    return CorrectionResult(found.weights, mask, bag.compute())


def compute_rollout_correction_weights(
    log_ratio: Tensor, response_mask: Tensor, *, rollout_is: str, rollout_is_threshold: float = 2.0
) -> Tensor:
    """Truncated weights [B, T] for log-ratios training - rollout [B, T]; no gradient, 0 at invalid steps.

    Steps whose log-ratio is not finite are invalid. Raises ValueError for an unknown level.
    """
    if rollout_is not in IS_LEVELS:
        raise ValueError(f"{KEY}.rollout_is={rollout_is!r}: allowed are {', '.join(IS_LEVELS)}")
    valid = response_mask.bool() & torch.isfinite(log_ratio)
    weights = raw_weights(log_ratio.detach().double(), valid, rollout_is)
    return truncate(weights, rollout_is_threshold).to(log_ratio.dtype)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_rs: str | Sequence[str],
    rollout_rs_threshold: float | str | Sequence[float | str],
) -> Tensor:
    """The part of `response_mask` [B, T] that the criteria keep, for log-ratios training - rollout [B, T]."""
    bands = parse_bands(rollout_rs, rollout_rs_threshold)
    return rejection_mask(log_ratio.detach().double(), response_mask.bool(), bands).to(response_mask.dtype)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Mapping[str, float]:
    """Diagnostics of log-probs [B, T], without prefix: perplexities, KL, k3, chi-squared, |difference|.

    Steps whose difference is not finite take no part.
    """
    training, rollout = old_log_prob.detach().double(), rollout_log_prob.detach().double()
    valid = response_mask.bool() & torch.isfinite(training - rollout)
    return offpolicy_metrics(training, rollout, valid).compute()


def apply_bypass_mode_to_diffusion_batch(batch: DiffusionBatch) -> DiffusionBatch:
    """old_log_probs := rollout_log_probs. ValueError if the rollout recorded none."""
    return batch.replace(old_log_probs=require_rollout_log_probs(batch))


def apply_rollout_correction_to_diffusion_batch(
    batch: DiffusionBatch, config: RolloutCorrectionConfig, *, all_reduce: AllReduce = identity
) -> tuple[DiffusionBatch, MetricBag]:
    """Decoupled correction, once per global batch: old / rollout -> weights and mask on the batch.

    Returns the batch with `rollout_is_weights` (None without `rollout_is`) and `rejection_mask`, and the metrics
    under their names without prefix. ValueError if old or rollout log-probs are missing.
    """
    rollout = require_rollout_log_probs(batch)
    if batch.old_log_probs is None:
        raise ValueError("decoupled correction needs old_log_probs: recompute them with the training graph first")
    found = correct_with(config, batch.old_log_probs, rollout, all_reduce=all_reduce)
    return batch.replace(rollout_is_weights=found.weights, rejection_mask=found.mask), found.metrics


def correct_with(
    config: RolloutCorrectionConfig, training: Tensor, rollout: Tensor, *, all_reduce: AllReduce = identity
) -> Correction:
    """`correct` with the settings of a config, for steps [B, T] that are all valid."""
    return correct(
        training,
        rollout,
        torch.ones_like(training, dtype=torch.bool),
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        batch_normalize=config.rollout_is_batch_normalize,
        bands=config.bands(),
        all_reduce=all_reduce,
    )


def require_rollout_log_probs(batch: DiffusionBatch) -> Tensor:
    """The batch's rollout log-probs [B, T], or a ValueError that says how to get them."""
    if batch.rollout_log_probs is None:
        raise ValueError(
            "rollout correction needs rollout_log_probs, which this rollout did not record: set "
            "rollout.calculate_log_probs=true"
        )
    return batch.rollout_log_probs


def _select(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))
