"""The correction itself: log-probs [B, T] in, weights, mask and metrics out.

It sees log-probs and a mask of the steps that exist, whether they are SDE steps or tokens. The
`Corrector` holds the settings, parsed once, and goes through the rows in blocks; `rejection.judge`
decides which steps stay; everything below them is a formula.

References: rollout correction in verl, verl-omni and slime; decoupled PPO,
https://arxiv.org/abs/2110.00641. Truncated importance sampling and rejection are described there.

Legend: B rows, T steps.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity, select
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.diagnostics import put_gap, put_weights
from flowgrpo_rc.correction.log_ratios import compute_log_ratios
from flowgrpo_rc.correction.metric_names import apply_names
from flowgrpo_rc.correction.rejection import judge, put_decisions
from flowgrpo_rc.correction.thresholds import RS_KEY, STEP_KL, THRESHOLD_KEY, WeightBounds
from flowgrpo_rc.correction.weights import mean_weight_terms, weigh

B = TypeVar("B", bound=Batch)
# A block has about so many elements: its float64 temporaries stay in the cache, and memory small.
_BLOCK = {"cpu": 2**16, "cuda": 2**22}
_UNBOUNDED = WeightBounds("truncate", 0.0, torch.inf)


class Correction(NamedTuple):
    """Holds what a correction makes of log-probs."""

    weights: Tensor | None  # without gradient, 0 where there is no step, [B, T]; None for none
    mask: Tensor  # bool, the steps that stay in the loss, [B, T]
    metrics: MetricBag  # names without prefix
    # Sum and number of the weights whose mean is normalised, [2] float64; None without.
    weight_sums: Tensor | None


class Corrector:
    """Corrects log-probs as one rollout correction says, whose settings `validate` has passed.

    They are parsed once: here, unless `rules` are given.
    """

    def __init__(self, config: RolloutCorrectionConfig, rules: Rules | None = None) -> None:
        self.config = config
        self.rules = config.rules() if rules is None else rules
        self._custom = config.load_custom()

    def __call__(
        self,
        training_log_probs: Tensor,
        rollout_log_probs: Tensor,
        step_mask: Tensor,
        *,
        allowed: Tensor | None = None,
        step_kl: Tensor | None = None,
        num_elements: int = 1,
        all_reduce: AllReduce | None = identity,
    ) -> Correction:
        """Computes weights, mask and metrics, under the names that the settings ask for.

        A step whose difference is not finite is rejected, whatever is configured, and only
        `rollout_rs_nonfinite_fraction` counts it. A criterion of sequences rejects its sequence.
        Weights are in the dtype of the training log-probs.

        Args:
          training_log_probs: log-probs of the training graph, [B, T].
          rollout_log_probs: log-probs of the policy that sampled, [B, T].
          step_mask: bool, the steps that exist, [B, T].
          allowed: bool, the steps that an earlier decision keeps, [B, T]; None for everything.
          step_kl: exact KL of the steps, [B, T]; left alone unless a criterion asks for it.
          num_elements: number of elements that a log-prob is the mean of, for `log_prob_scale=sum`.
          all_reduce: adds up a tensor over processes; None leaves batch normalisation to the
            caller, who knows the whole batch.

        Raises:
          ValueError: if a criterion needs `step_kl` or, for `auto:k`, an earlier decision, and
            there is none; if a custom correction returns tensors of another shape.
        """
        dtype = training_log_probs.dtype
        if self.config.log_prob_scale == "sum":
            # In float64: D times a difference of 1e-4 must keep the digits of that difference.
            training_log_probs = training_log_probs.detach().double() * num_elements
            rollout_log_probs = rollout_log_probs.detach().double() * num_elements
        if self._custom is not None:
            correction = self._customised(training_log_probs, rollout_log_probs, step_mask)
            return self._normalised(correction, dtype, all_reduce)
        _check_given(self.rules, allowed, step_kl)
        rules = self.rules
        keep_mask = torch.empty_like(step_mask)
        # In fp16 a small weight would be rounded before the normalisation makes it large.
        precision = torch.promote_types(training_log_probs.dtype, torch.float32)
        weights = torch.empty_like(training_log_probs, dtype=precision) if rules.level else None
        terms = keep_mask.new_empty((2, len(step_mask)), dtype=torch.float64)
        metrics = MetricBag()
        for rows in row_blocks(step_mask):
            ratios = compute_log_ratios(
                training_log_probs[rows],
                rollout_log_probs[rows],
                step_mask[rows],
                step_kl[rows] if rules.needs_step_kl and step_kl is not None else None,
            )
            # Without a level the weight metrics are those of the token level.
            weight = weigh(ratios, rules.level or "token", rules.bounds)
            put_gap(metrics, ratios)
            put_weights(metrics, ratios, weight, rules.bounds)
            allowed_rows = None if allowed is None else allowed[rows]
            keep_mask[rows] = judge(metrics, ratios, weight, rules, allowed_rows)
            if weights is not None:
                weights[rows] = weight.of_steps(ratios.finite_mask)
            if rules.batch_normalize:
                over = keep_mask[rows] if rules.over_kept else None
                # By row, so that the sum does not depend on where blocks begin.
                terms[:, rows] = mean_weight_terms(ratios, weight, over)
        sums = terms.sum(1) if rules.batch_normalize and rules.level else None
        correction = Correction(weights, keep_mask, metrics, sums)
        return self._normalised(correction, dtype, all_reduce)

    def _normalised(
        self, correction: Correction, dtype: torch.dtype, all_reduce: AllReduce | None
    ) -> Correction:
        """Divides weights by their mean where the settings ask for it; rounds them to `dtype`."""
        weights, _, metrics, sums = correction
        if weights is not None and sums is not None:
            # A micro-batch in the loss is not the batch whose mean counts.
            if all_reduce is not None:
                factor = normalisation(*all_reduce(sums))
                metrics.max("rollout_is_batch_norm_factor", factor)
                weights = (weights / factor).to(weights.dtype)
            else:
                dtype = weights.dtype  # not rounded before the loss divides by their mean
                metrics.ratio("rollout_is_batch_norm_factor", *sums)
        apply_names(metrics, self.config.metric_names, self.rules.bounds.mode)
        return correction._replace(weights=None if weights is None else weights.to(dtype))

    def batch(
        self, batch: B, *, step_kl: Tensor | None = None, all_reduce: AllReduce = identity
    ) -> tuple[B, MetricBag]:
        """Corrects a batch by its old log-probs, once per global batch (decoupled mode).

        See `api.apply_rollout_correction_to_batch`.
        """
        rollout_log_probs = require_rollout_log_probs(batch)
        if batch.old_log_probs is None:
            raise ValueError(
                "decoupled correction needs old_log_probs: recompute them with the training graph "
                "first"
            )
        correction = self(
            batch.old_log_probs,
            rollout_log_probs,
            batch.step_mask,
            allowed=batch.rejection_mask,
            step_kl=step_kl,
            num_elements=batch.num_elements,
            all_reduce=all_reduce,
        )
        corrected = batch.replace(
            rollout_is_weights=correction.weights, rejection_mask=correction.mask
        )
        return corrected, correction.metrics

    def _customised(
        self, training_log_probs: Tensor, rollout_log_probs: Tensor, step_mask: Tensor
    ) -> Correction:
        """Calls the user's function, and measures its weights and mask like the built-in ones."""
        assert self._custom is not None
        config = self.config
        with torch.no_grad():
            used, keep_mask = self._custom(
                training_log_probs.detach(), rollout_log_probs, step_mask, config
            )
        shape = step_mask.shape
        if keep_mask.shape != shape or (used is not None and used.shape != shape):
            raise ValueError(
                f"custom_correction={config.custom_correction}: weights and mask must be "
                f"{tuple(shape)}"
            )
        # The user's mask may keep a broken step, whose loss would be nan.
        ratios = compute_log_ratios(training_log_probs, rollout_log_probs, step_mask)
        keep_mask = keep_mask.bool() & ratios.finite_mask
        weights = weigh(ratios, "token", _UNBOUNDED)
        if used is not None:
            used = select(used.detach(), ratios.finite_mask)
            weights = weights._replace(used=used.double())
        metrics = MetricBag()
        put_gap(metrics, ratios)
        put_weights(metrics, ratios, weights, _UNBOUNDED)
        put_decisions(metrics, ratios, keep_mask, torch.zeros_like(ratios.num_finite_B))
        sums = None
        if used is not None and self.rules.batch_normalize:
            over = keep_mask if self.rules.over_kept else None
            sums = mean_weight_terms(ratios, weights, over).sum(1)
        return Correction(used, keep_mask, metrics, sums)


def normalisation(total: Tensor, count: Tensor) -> Tensor:
    """Computes the mean weight that batch normalisation divides by: total / count, float64 scalars.

    It is 1 where all weights are 0, as in verl.
    """
    # The weights of all micro-batches and processes, divided once.
    mean = total / count.clamp(min=1)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))


def require_rollout_log_probs(batch: Batch) -> Tensor:
    """Returns the rollout log-probs of a batch, [B, T]; ValueError if it has none."""
    if batch.rollout_log_probs is None:
        raise ValueError(
            "rollout correction needs rollout_log_probs, which this rollout did not record: the "
            "engine must give the log-prob of each step that it samples"
        )
    return batch.rollout_log_probs


def row_blocks(step_mask: Tensor) -> Iterator[slice]:
    """Yields the rows of each block of a mask, [B, T].

    Without any row it yields one empty block, so that the names of the metrics stay.
    """
    num_rows, num_steps = step_mask.shape
    size = max(1, _BLOCK.get(step_mask.device.type, 2**20) // max(num_steps, 1))
    for start in range(0, max(num_rows, 1), size):
        yield slice(start, start + size)


def _check_given(rules: Rules, allowed: Tensor | None, step_kl: Tensor | None) -> None:
    """Raises ValueError if a criterion needs what was not given."""
    if rules.needs_step_kl and step_kl is None:
        raise ValueError(
            f"{RS_KEY}={STEP_KL} needs step_kl [B, T], the exact KL between rollout's and training "
            "graph's steps. It follows from the step means that a rollout of images keeps "
            "(prev_sample_mean); tokens have none"
        )
    if rules.auto and allowed is None:
        raise ValueError(
            f"{THRESHOLD_KEY}=auto:k needs the mismatch of the iterations before, which a run of "
            "the trainer has: put the decision of `correction.auto_bands.AutoBands` into the "
            "batch's rejection_mask, or give a number"
        )
