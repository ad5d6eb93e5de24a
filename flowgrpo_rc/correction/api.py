"""The public functions of rollout correction, under the names of the documents.

Shapes and dtypes are checked here, once; what is below trusts them. All functions raise ValueError
for wrong settings, for shapes that differ, and for log-probs that are no floating-point numbers.

Legend: B rows, T steps (SDE steps or tokens).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import (
    Correction,
    Corrector,
    require_rollout_log_probs,
    row_blocks,
)
from flowgrpo_rc.correction.diagnostics import put_gap
from flowgrpo_rc.correction.log_ratios import compute_log_ratios
from flowgrpo_rc.correction.thresholds import RS_KEY, STEP_KL
from flowgrpo_rc.plugins import check_that

B = TypeVar("B", bound=Batch)
# What can be said about the training policy alone.
_TRAINING_METRICS = ("training_log_ppl", "training_ppl")


class CorrectionResult(NamedTuple):
    """Weights, mask and metrics of a correction."""

    # Importance weights without gradient, 0 where there is no step, [B, T]; None without
    # `rollout_is`.
    weights: Tensor | None
    mask: Tensor  # the part of the response mask that is kept, in its dtype, [B, T]
    metrics: Mapping[str, float]  # names under `rollout_corr/`


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
    """Computes importance weights, rejection mask and metrics from log-probs.

    Args:
      old_log_prob: log-probs of the training graph, [B, T].
      rollout_log_prob: log-probs of the policy that sampled, [B, T].
      response_mask: the steps that exist, bool or numbers, [B, T].
      rollout_is: as in `RolloutCorrectionConfig`, like all settings down to `normalize`.
      step_kl: exact KL between rollout's and training graph's steps, [B, T], for
        `rollout_rs=step_kl`.

    Returns:
      Weights, mask and metrics.
    """
    _check_tensors(
        old_log_prob=old_log_prob,
        rollout_log_prob=rollout_log_prob,
        response_mask=response_mask,
        step_kl=step_kl,
    )
    correction = _corrected(
        old_log_prob,
        rollout_log_prob,
        response_mask,
        step_kl,
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
    metrics = MetricBag()
    metrics.merge(correction.metrics, "rollout_corr")
    mask = correction.mask.to(response_mask.dtype)
    return CorrectionResult(correction.weights, mask, metrics.compute())


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_mode: str | None = None,
    rollout_is_batch_normalize: bool = False,
) -> Tensor:
    """Computes importance weights from log-ratios.

    Args:
      log_ratio: training minus rollout log-probs, [B, T]. A step whose log-ratio is not finite does
        not exist.
      response_mask: the steps that exist, bool or numbers, [B, T].
      rollout_is: as in `RolloutCorrectionConfig`, like all settings below.

    Returns:
      The weights, [B, T], without gradient, 0 where there is no step.
    """
    _check_tensors(log_ratio=log_ratio, response_mask=response_mask)
    correction = _corrected(
        log_ratio,
        torch.zeros_like(log_ratio),
        response_mask,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_mode=rollout_is_mode,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
    )
    assert correction.weights is not None
    return correction.weights


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_rs: str | Sequence[str],
    rollout_rs_threshold: float | str | Sequence[float | str] | None = None,
    rollout_rs_threshold_lower: float | Sequence[float] | None = None,
    step_kl: Tensor | None = None,
) -> Tensor:
    """Computes the part of a mask that rejection criteria keep.

    Args:
      log_ratio: training minus rollout log-probs, [B, T].
      response_mask: the steps that exist, bool or numbers, [B, T].
      rollout_rs: as in `RolloutCorrectionConfig`, like the thresholds below.
      step_kl: exact KL between rollout's and training graph's steps, [B, T], for
        `rollout_rs=step_kl`.

    Returns:
      The mask that is left, [B, T], in the dtype of `response_mask`.
    """
    _check_tensors(log_ratio=log_ratio, response_mask=response_mask, step_kl=step_kl)
    correction = _corrected(
        log_ratio,
        torch.zeros_like(log_ratio),
        response_mask,
        step_kl,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_rs_threshold_lower=rollout_rs_threshold_lower,
    )
    return correction.mask.to(response_mask.dtype)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> Mapping[str, float]:
    """Computes perplexities, KL, k3, chi-squared and |difference| of two policies.

    Args:
      old_log_prob: log-probs of the training graph, [B, T].
      rollout_log_prob: log-probs of the policy that sampled, [B, T]; None for the metrics of the
        training policy alone, `training_ppl` and `training_log_ppl`.
      response_mask: the steps that exist, bool or numbers, [B, T]. Steps whose difference is not
        finite take no part.

    Returns:
      Name -> number, names without prefix.
    """
    _check_tensors(
        old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask
    )
    # Beside itself, a policy has the metrics of one policy.
    other_log_prob = old_log_prob if rollout_log_prob is None else rollout_log_prob
    step_mask = response_mask.bool()
    metrics = MetricBag()
    for rows in row_blocks(step_mask):
        ratios = compute_log_ratios(old_log_prob[rows], other_log_prob[rows], step_mask[rows])
        put_gap(metrics, ratios)
    values = metrics.compute()
    if rollout_log_prob is None:
        values = {name: values[name] for name in _TRAINING_METRICS if name in values}
    return values


def apply_bypass_mode(batch: B) -> B:
    """Takes the rollout's log-probs for the old policy's: old := rollout.

    Args:
      batch: samples with rollout log-probs.

    Returns:
      The batch with `old_log_probs`.

    Raises:
      ValueError: if the rollout recorded no log-probs, or in another shape than [B, T].
    """
    rollout_log_probs = require_rollout_log_probs(batch)
    _check_tensors(rollout_log_probs=rollout_log_probs, step_mask=batch.step_mask)
    return batch.replace(old_log_probs=rollout_log_probs)


def apply_rollout_correction_to_batch(
    batch: B,
    config: RolloutCorrectionConfig,
    *,
    step_kl: Tensor | None = None,
    all_reduce: AllReduce = identity,
) -> tuple[B, MetricBag]:
    """Corrects a batch in decoupled mode, old / rollout, once per global batch.

    Args:
      batch: samples with rollout and old log-probs.
      config: the settings.
      step_kl: exact KL between rollout's and old policy's steps, [B, T], where a criterion needs
        it.
      all_reduce: adds up a tensor over processes.

    Returns:
      The batch with `rollout_is_weights` (None without `rollout_is`) and `rejection_mask` (that of
      the batch, narrowed further), and metrics, names without prefix.

    Raises:
      ValueError: if old or rollout log-probs, or a KL that a criterion needs, are missing; for
        shapes that differ, and for masks that are not bool.
    """
    _check_tensors(
        old_log_probs=batch.old_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        step_mask=batch.step_mask,
        rejection_mask=batch.rejection_mask,
        step_kl=step_kl,
    )
    return Corrector(config).batch(batch, step_kl=step_kl, all_reduce=all_reduce)


# The diffusion document's names of the same functions.
apply_bypass_mode_to_diffusion_batch = apply_bypass_mode
apply_rollout_correction_to_diffusion_batch = apply_rollout_correction_to_batch


def _corrected(
    training_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    step_kl: Tensor | None = None,
    **settings: Any,
) -> Correction:
    """Corrects log-probs as a user's settings say, after these were checked."""
    config = RolloutCorrectionConfig(**settings)
    config.validate()
    corrector = Corrector(config)
    message = f"step_kl has no effect without {RS_KEY}={STEP_KL}: drop it, or set that"
    check_that(step_kl is None or corrector.rules.needs_step_kl, message)
    return corrector(training_log_probs, rollout_log_probs, response_mask.bool(), step_kl=step_kl)


def _check_tensors(**tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors that are given are [B, T], of a dtype that fits.

    Log-probs, log-ratios and KL are floating-point numbers. Masks of a batch are bool; only the
    documents' `response_mask` may hold numbers.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    # One column would be broadcast against many, and give numbers that look sound.
    shapes = {name: tuple(tensor.shape) for name, tensor in present.items()}
    alike = len(set(shapes.values())) == 1 and all(len(shape) == 2 for shape in shapes.values())
    check_that(alike, f"log-probs, mask and step_kl must all be [B, T]; got {shapes}")
    for name, tensor in present.items():
        if name in ("step_mask", "rejection_mask"):
            check_that(tensor.dtype == torch.bool, f"{name} must be bool; got {tensor.dtype}")
        elif name != "response_mask":
            message = f"{name} must hold floating-point numbers; got {tensor.dtype}"
            check_that(tensor.is_floating_point(), message)
