"""The one entry of rollout correction: log-probs [B, T] in, weights and mask out.

It sees only [B, T] and a mask of the steps that exist: SDE steps or tokens. References: rollout
correction in verl, verl-omni and slime; decoupled PPO, arXiv 2110.00641; truncated importance
sampling and rejection as described there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity, select
from flowgrpo_rc.correction.block import (
    correct_block,
    join_summaries,
    mean_parts,
    summarise,
    summary_metrics,
)
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.diagnostics import gap_rows, offpolicy_metrics
from flowgrpo_rc.correction.log_ratios import join, prepare
from flowgrpo_rc.correction.metric_names import apply_names
from flowgrpo_rc.correction.thresholds import RS_KEY, STEP_KL, THRESHOLD_KEY, WeightBounds
from flowgrpo_rc.correction.weights import weigh

B = TypeVar("B", bound=Batch)
# Rows are corrected in blocks of about so many elements: float64 temporaries stay in the cache and
# the memory small.
_BLOCK = {"cpu": 2**16, "cuda": 2**22}


class Correction(NamedTuple):
    """weights [B, T] or None, without gradient and 0 where there is no step; mask [B, T] bool, True
    where kept.

    weight_total and weight_count: the sum and number whose quotient is the mean weight of batch
    normalisation, not yet divided by; None without weights.
    """

    weights: Tensor | None
    mask: Tensor
    metrics: MetricBag
    weight_total: Tensor | None = None
    weight_count: Tensor | None = None


class CorrectionResult(NamedTuple):
    """As `Correction`, with the metrics on the host."""

    weights: Tensor | None
    mask: Tensor
    metrics: Mapping[str, float]


class CustomCorrection(Protocol):
    """What `custom_correction` names: weights [B, T] or None and the kept steps [B, T] bool, from
    log-probs [B, T] of the training graph and of the rollout and the mask of the steps that exist.
    No gradient flows through it."""

    def __call__(
        self, training: Tensor, rollout: Tensor, mask: Tensor, config: RolloutCorrectionConfig
    ) -> tuple[Tensor | None, Tensor]: ...


def measure(
    training_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    rules: Rules,
    *,
    allowed: Tensor | None = None,
    step_kl: Tensor | None = None,
) -> Correction:
    """Weights before batch normalisation, mask and diagnostics for log-probs [B, T].

    A step whose difference is not finite is rejected, whatever is configured, and counted in
    `rollout_rs_nonfinite_fraction`; it takes no part in weights or in any other metric. A sequence
    criterion sees it and rejects the sequence. Without a level the weight metrics are those of the
    token level.

    allowed [B, T] bool: what an earlier decision keeps, which the rules narrow further. step_kl [B,
    T] is for the criterion of that name. ValueError where one of them is there without the other,
    or `auto` bands without a decision.
    """
    _check_step_kl(rules, step_kl)
    if rules.auto and allowed is None:
        raise ValueError(
            f"{THRESHOLD_KEY}=auto:k needs the mismatch of the iterations before, which a run of "
            "the trainer has: put "
            "the decision of `correction.auto.AutoBands` into the batch's rejection_mask, or give "
            "a number"
        )
    weights = None if rules.level is None else torch.empty_like(training_log_probs)
    kept, summaries = torch.empty_like(mask), []
    for rows in _blocks(mask):
        given = {"allowed": allowed, "step_kl": step_kl}
        own = {name: None if values is None else values[rows] for name, values in given.items()}
        block = correct_block(
            training_log_probs[rows], rollout_log_probs[rows], mask[rows], rules, **own
        )
        summaries.append(block.summary)
        kept[rows] = block.kept
        if weights is not None:
            weights[rows] = block.weights
    summary = join_summaries(summaries)
    metrics = summary_metrics(summary, rules)
    if weights is None:
        return Correction(None, kept, metrics)
    return Correction(weights, kept, metrics, *mean_parts(summary, rules))


def correct(
    training_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    rules: Rules,
    *,
    step_kl: Tensor | None = None,
    all_reduce: AllReduce = identity,
) -> Correction:
    """`measure`, with the weights divided by their mean over the batch of all processes where the
    rules say so.
    """
    found = measure(training_log_probs, rollout_log_probs, mask, rules, step_kl=step_kl)
    return _normalised(found, all_reduce) if rules.batch_normalize else found


def normalisation(total: Tensor, count: Tensor) -> Tensor:
    """The mean weight that batch normalisation divides by; 1 where all weights are 0, as in
    verl.
    """
    mean = total / count.clamp(min=1)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))


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
    rollout = require_rollout_log_probs(batch)
    if batch.old_log_probs is None:
        raise ValueError(
            "decoupled correction needs old_log_probs: recompute them with the training graph first"
        )
    found = correct_with(
        config,
        batch.old_log_probs,
        rollout,
        batch.valid,
        allowed=batch.rejection_mask,
        step_kl=step_kl,
        num_elements=batch.num_elements,
        all_reduce=all_reduce,
    )
    return batch.replace(rollout_is_weights=found.weights, rejection_mask=found.mask), found.metrics


def apply_rollout_correction_to_diffusion_batch(
    batch: DiffusionBatch,
    config: RolloutCorrectionConfig,
    *,
    step_kl: Tensor | None = None,
    all_reduce: AllReduce = identity,
) -> tuple[DiffusionBatch, MetricBag]:
    """`apply_rollout_correction_to_batch` under the diffusion document's name."""
    return apply_rollout_correction_to_batch(batch, config, step_kl=step_kl, all_reduce=all_reduce)


def correct_with(
    config: RolloutCorrectionConfig,
    training: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    allowed: Tensor | None = None,
    step_kl: Tensor | None = None,
    num_elements: int = 1,
    normalise: bool = True,
    all_reduce: AllReduce = identity,
) -> Correction:
    """`correct` with the settings of a config and its metric names; without `normalise` the caller
    divides by the mean weight when it knows the whole batch. A `step_kl` that no criterion asks for
    is left alone; num_elements: of which a log-prob is the mean, for `log_prob_scale=sum`."""
    dtype = training.dtype
    if config.log_prob_scale == "sum":
        training, rollout = (
            log_probs.detach().double() * num_elements for log_probs in (training, rollout)
        )
    rules, custom = config.rules(), config.load_custom()
    if custom is None:
        step_kl = step_kl if rules.needs_step_kl else None
        found = measure(training, rollout, mask, rules, allowed=allowed, step_kl=step_kl)
    else:
        found = _custom(custom, training, rollout, mask, config)
    if rules.batch_normalize and normalise:
        found = _normalised(found, all_reduce)
    elif (
        rules.batch_normalize and found.weight_total is not None and found.weight_count is not None
    ):
        found.metrics.ratio("rollout_is_batch_norm_factor", found.weight_total, found.weight_count)
    apply_names(found.metrics, config.metric_names, rules.bounds.mode)
    return found._replace(weights=None if found.weights is None else found.weights.to(dtype))


def _check_step_kl(rules: Rules, step_kl: Tensor | None) -> None:
    if rules.needs_step_kl and step_kl is None:
        raise ValueError(
            f"{RS_KEY}={STEP_KL} needs step_kl [B, T], the exact KL between rollout's and "
            "training graph's steps. It "
            "follows from the step means that a rollout of images keeps (prev_sample_mean); "
            "tokens have none"
        )
    if step_kl is not None and not rules.needs_step_kl:
        raise ValueError(f"step_kl has no effect without {RS_KEY}={STEP_KL}: drop it, or set that")


def require_rollout_log_probs(batch: Batch) -> Tensor:
    """The batch's rollout log-probs [B, T], or a ValueError that says how to get them."""
    if batch.rollout_log_probs is None:
        raise ValueError(
            "rollout correction needs rollout_log_probs, which this rollout did not record: set "
            "rollout.calculate_log_probs=true"
        )
    return batch.rollout_log_probs


def _normalised(found: Correction, all_reduce: AllReduce) -> Correction:
    if found.weights is None:
        return found
    assert found.weight_total is not None
    assert found.weight_count is not None
    factor = normalisation(*all_reduce(torch.stack([found.weight_total, found.weight_count])))
    found.metrics.max("rollout_is_batch_norm_factor", factor)
    return found._replace(weights=(found.weights / factor).to(found.weights.dtype))


def _blocks(mask: Tensor) -> Iterator[slice]:
    rows, columns = mask.shape
    size = max(1, _BLOCK.get(mask.device.type, 2**20) // max(columns, 1))
    return (
        slice(start, start + size) for start in range(0, max(rows, 1), size)
    )  # without rows the names stay


def _custom(
    function: CustomCorrection,
    training: Tensor,
    rollout: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
) -> Correction:
    """The weights and mask of a user's function, measured like the built-in ones."""
    with torch.no_grad():
        weights, kept = function(training.detach(), rollout, mask, config)
    if kept.shape != mask.shape or (weights is not None and weights.shape != mask.shape):
        raise ValueError(
            f"custom_correction={config.custom_correction}: weights and mask must be "
            f"{tuple(mask.shape)}"
        )
    over_kept = config.normalize == "kept"
    rules = Rules("token", WeightBounds("truncate", 0.0, torch.inf), False, over_kept, (), None)
    steps = prepare(training, rollout, mask)
    kept, found = kept.bool() & steps.valid, weigh(steps, "token", rules.bounds)
    used = None if weights is None else select(weights.detach(), steps.valid)
    if used is not None:
        found = found._replace(used=used.double())
    summary = summarise(steps, found, kept, rules, (), torch.zeros_like(steps.count_B))
    metrics = summary_metrics(summary, rules)
    if used is None:
        return Correction(None, kept, metrics)
    return Correction(used, kept, metrics, *mean_parts(summary, rules))
