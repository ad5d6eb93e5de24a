"""The public functions of rollout correction, under the names of the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import (
    Corrector,
    _blocks,
    correct,
    measure,
    require_rollout_log_probs,
)
from flowgrpo_rc.correction.diagnostics import gap_rows, offpolicy_metrics
from flowgrpo_rc.correction.log_ratios import join, prepare

B = TypeVar("B", bound=Batch)


class CorrectionResult(NamedTuple):
    """As `Correction`, with the metrics on the host."""

    weights: Tensor | None
    mask: Tensor
    metrics: Mapping[str, float]


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_mode: str | None = None,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | Sequence[str] | None = None,
    rollout_rs_threshold: float | str | Sequence[float | str] | None = None,
    rollout_rs_threshold_lower: float | Sequence[float] | None = None,
    rollout_token_veto_threshold: float | None = None,
    normalize: str | None = None,
    step_kl: Tensor | None = None,
) -> CorrectionResult:
    """Importance weights, rejection mask and metrics (named `rollout_corr/...`) for log-probs [B,
    T].

    `old_log_prob` is the training graph's, `response_mask` marks the steps that exist, `step_kl` is
    the exact KL [B, T] between rollout's and training graph's steps, for `rollout_rs=step_kl`.
    Settings mean what they mean in `RolloutCorrectionConfig`. Raises ValueError for wrong settings
    or shapes that differ.
    """
    given = {
        "old_log_prob": old_log_prob,
        "rollout_log_prob": rollout_log_prob,
        "response_mask": response_mask,
    }
    given |= {} if step_kl is None else {"step_kl": step_kl}
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if len(set(shapes.values())) != 1 or old_log_prob.ndim != 2:
        raise ValueError(f"log-probs, mask and step_kl must all be [B, T]; got {shapes}")
    config = RolloutCorrectionConfig(
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_mode=rollout_is_mode,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_rs_threshold_lower=rollout_rs_threshold_lower,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
        normalize=normalize,
    )
    config.validate()
    found = correct(
        old_log_prob, rollout_log_prob, response_mask.bool(), config.rules(), step_kl=step_kl
    )
    bag = MetricBag()
    bag.merge(found.metrics, "rollout_corr")
    return CorrectionResult(found.weights, found.mask.to(response_mask.dtype), bag.compute())


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_mode: str | None = None,
    rollout_is_batch_normalize: bool = False,
) -> Tensor:
    """Weights [B, T] for log-ratios training - rollout [B, T]; no gradient, 0 where there is no
    step.

    Steps whose log-ratio is not finite do not exist. Raises ValueError for an unknown level or
    mode.
    """
    config = RolloutCorrectionConfig(
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_mode=rollout_is_mode,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
    )
    config.validate()
    weights = correct(
        log_ratio, torch.zeros_like(log_ratio), response_mask.bool(), config.rules()
    ).weights
    assert weights is not None
    return weights


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_rs: str | Sequence[str],
    rollout_rs_threshold: float | str | Sequence[float | str] | None = None,
    rollout_rs_threshold_lower: float | Sequence[float] | None = None,
    step_kl: Tensor | None = None,
) -> Tensor:
    """The part of `response_mask` [B, T] that the criteria keep, for log-ratios training - rollout
    [B, T] and, with `step_kl` among them, the exact KL [B, T]."""
    config = RolloutCorrectionConfig(
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_rs_threshold_lower=rollout_rs_threshold_lower,
    )
    config.validate()
    rules, rollout = config.rules(), torch.zeros_like(log_ratio)
    found = measure(log_ratio, rollout, response_mask.bool(), rules, step_kl=step_kl)
    return found.mask.to(response_mask.dtype)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Mapping[str, float]:
    """Diagnostics of log-probs [B, T], without prefix: perplexities, KL, k3, chi-squared,
    |difference|.

    Steps whose difference is not finite take no part.
    """
    mask = response_mask.bool()
    gaps = [
        gap_rows(prepare(old_log_prob[rows], rollout_log_prob[rows], mask[rows]))
        for rows in _blocks(mask)
    ]
    return offpolicy_metrics(join(gaps)).compute()


def apply_bypass_mode(batch: B) -> B:
    """old_log_probs := rollout_log_probs. ValueError if the rollout recorded none."""
    return batch.replace(old_log_probs=require_rollout_log_probs(batch))


def apply_bypass_mode_to_diffusion_batch(batch: DiffusionBatch) -> DiffusionBatch:
    """`apply_bypass_mode` under the diffusion document's name."""
    return apply_bypass_mode(batch)


def apply_rollout_correction_to_batch(
    batch: B,
    config: RolloutCorrectionConfig,
    *,
    step_kl: Tensor | None = None,
    all_reduce: AllReduce = identity,
) -> tuple[B, MetricBag]:
    """Decoupled correction, once per global batch: old / rollout -> weights and mask on the batch.

    step_kl [B, T]: exact KL between rollout's and old policy's steps, where a criterion needs it.
    Returns the batch with `rollout_is_weights` (None without `rollout_is`) and `rejection_mask`
    (that of the batch narrowed further), and the metrics under their names without prefix.
    ValueError if old or rollout log-probs, or that KL, are missing.
    """
    return Corrector(config).batch(batch, step_kl=step_kl, all_reduce=all_reduce)


def apply_rollout_correction_to_diffusion_batch(
    batch: DiffusionBatch,
    config: RolloutCorrectionConfig,
    *,
    step_kl: Tensor | None = None,
    all_reduce: AllReduce = identity,
) -> tuple[DiffusionBatch, MetricBag]:
    """`apply_rollout_correction_to_batch` under the diffusion document's name."""
    return apply_rollout_correction_to_batch(batch, config, step_kl=step_kl, all_reduce=all_reduce)
