"""The one entry of rollout correction: log-probs [B, T] in, weights and mask out.

It sees only [B, T] and a mask of the steps that exist: SDE steps or tokens. References: rollout
correction in verl, verl-omni and slime; decoupled PPO, arXiv 2110.00641; truncated importance
sampling and rejection as described there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
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
from flowgrpo_rc.correction.log_ratios import prepare
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


class Corrector:
    """Corrects log-probs as one rollout correction says; the settings are parsed once, when it is made.

    Args:
      config: settings that `RolloutCorrectionConfig.validate` has passed.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self.config = config
        self.rules = config.rules()
        self._custom = config.load_custom()

    def __call__(
        self,
        training_log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor,
        *,
        allowed: Tensor | None = None,
        step_kl: Tensor | None = None,
        num_elements: int = 1,
        normalise: bool = True,
        all_reduce: AllReduce = identity,
    ) -> Correction:
        """Computes weights, mask and metrics, under the names that the settings ask for.

        Args:
          training_log_probs: log-probs of the training graph, [B, T].
          rollout_log_probs: log-probs of the policy that sampled, [B, T].
          mask: bool, the steps that exist, [B, T].
          allowed: bool, what an earlier decision keeps, [B, T]; None for everything.
          step_kl: exact KL between rollout's and training graph's steps, [B, T]; left alone unless a
            criterion asks for it.
          num_elements: number of elements that a log-prob is the mean of, for `log_prob_scale=sum`.
          normalise: False leaves batch normalisation to the caller, who knows the whole batch.
          all_reduce: adds up a tensor over processes.

        Returns:
          The correction, with weights in the dtype of the training log-probs.
        """
        dtype, rules = training_log_probs.dtype, self.rules
        if self.config.log_prob_scale == "sum":
            training_log_probs = training_log_probs.detach().double() * num_elements
            rollout_log_probs = rollout_log_probs.detach().double() * num_elements
        if self._custom is None:
            step_kl = step_kl if rules.needs_step_kl else None
            found = measure(
                training_log_probs, rollout_log_probs, mask, rules, allowed=allowed, step_kl=step_kl
            )
        else:
            found = _custom(self._custom, training_log_probs, rollout_log_probs, mask, self.config)
        if rules.batch_normalize and normalise:
            found = _normalised(found, all_reduce)
        elif rules.batch_normalize and found.weight_total is not None:
            assert found.weight_count is not None
            found.metrics.ratio(
                "rollout_is_batch_norm_factor", found.weight_total, found.weight_count
            )
        apply_names(found.metrics, self.config.metric_names, rules.bounds.mode)
        if found.weights is None:
            return found
        return found._replace(weights=found.weights.to(dtype))

    def batch(
        self, batch: B, *, step_kl: Tensor | None = None, all_reduce: AllReduce = identity
    ) -> tuple[B, MetricBag]:
        """Corrects a batch by its old log-probs, once per global batch (decoupled mode).

        Args:
          batch: samples with rollout and old log-probs.
          step_kl: exact KL between rollout's and old policy's steps, [B, T].
          all_reduce: adds up a tensor over processes.

        Returns:
          The batch with `rollout_is_weights` (None without `rollout_is`) and `rejection_mask` (that of
          the batch, narrowed further), and metrics, names without prefix.

        Raises:
          ValueError: if the batch lacks old or rollout log-probs, or `step_kl` is needed and missing.
        """
        rollout = require_rollout_log_probs(batch)
        if batch.old_log_probs is None:
            raise ValueError(
                "decoupled correction needs old_log_probs: recompute them with the training graph first"
            )
        found = self(
            batch.old_log_probs,
            rollout,
            batch.valid,
            allowed=batch.rejection_mask,
            step_kl=step_kl,
            num_elements=batch.num_elements,
            all_reduce=all_reduce,
        )
        corrected = batch.replace(rollout_is_weights=found.weights, rejection_mask=found.mask)
        return corrected, found.metrics


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
