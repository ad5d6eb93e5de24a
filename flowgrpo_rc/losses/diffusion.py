"""The loss of denoising steps."""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.base import (
    DIFFUSION_KEY,
    DiffusionLoss,
    LossTerms,
    PolicyLoss,
    denominator,
    steps_of,
)
from flowgrpo_rc.losses.config import LossConfig
from flowgrpo_rc.losses.policy import Credited, LossCorrection, Objective, loss_terms


class DiffusionObjective(Objective):
    """The loss of FlowGRPO: the mean over all steps, rejected ones included, as in the document.

    In bypass mode the trainer gives one step at a time, so that every rejection level means the
    step, or with `bypass_level=window` all steps of a sample.

    Args:
      config: settings of the loss and the rollout correction; ValueError for a wrong loss.
    """

    def __init__(self, config: LossConfig) -> None:
        self._section = config.diffusion_loss
        self._loss = config.diffusion_loss.step_loss()
        self._loss_mode = config.diffusion_loss.loss_mode
        self._adv_clip_max = config.diffusion_loss.adv_clip_max
        self._correction = LossCorrection.of(config.rollout_correction)

    def terms(
        self, log_probs: Tensor, batch: DiffusionBatch, gaussian: GaussianSteps | None = None
    ) -> LossTerms:
        """Computes the terms of the loss on a batch.

        Args:
          log_probs: log-probs of the current policy, [B, T]; differentiable.
          batch: samples with advantages and old log-probs.
          gaussian: the current policy's steps, [B, T]; for a centered log-ratio, for losses that
            compare means, and for `rollout_rs=step_kl`.

        Returns:
          Terms that add up over micro-batches and processes.

        Raises:
          ValueError: if the batch lacks what the loss or the correction needs.
        """
        kl = None if gaussian is None else gaussian.kl
        centered = self._correction.centered
        credited = _centered(batch, gaussian, self._correction) if centered else None
        steps = steps_of(self._loss, gaussian, centered=centered)

        def step_loss(
            log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
        ) -> PolicyLoss:
            if self._loss.needs_means and kl is None:
                raise ValueError(
                    f"{DIFFUSION_KEY}.loss_mode={self._loss_mode} compares the means of the steps "
                    "with those of the old policy, which the batch does not hold (prev_sample_mean)"
                )
            loss = self._bounded(batch.loss_bound, log_probs.dtype)
            policy = loss(log_probs, old_log_probs, advantages, keep_mask, steps)
            if batch.loss_bound is not None:
                warm = batch.loss_bound.isfinite()
                policy.metrics.mean("auto_bound_mean", batch.loss_bound, keep_mask & warm)
                policy.metrics.mean("auto_bound_warm_fraction", warm.double(), keep_mask)
            if self._loss.needs_means and kl is not None:
                policy.metrics.mean("step_kl_mean", kl, keep_mask)
                policy.metrics.max("step_kl_max", kl, keep_mask)
            return policy

        if batch.advantages is not None:
            limit = self._adv_clip_max
            batch = batch.replace(advantages=batch.advantages.clamp(-limit, limit))
        return loss_terms(
            self._correction,
            step_loss,
            log_probs,
            batch,
            aggregation="token-mean",
            normalize="all",
            step_kl=kl,
            credited=credited,
        )

    def _bounded(self, bound: Tensor | None, dtype: torch.dtype) -> DiffusionLoss:
        """Returns the loss with the bound that it has at each step, if that is not a number."""
        if not self._section.auto:
            return self._loss
        if bound is None:
            raise ValueError(
                f"{DIFFUSION_KEY}: a bound that is auto:k needs the mismatch of the iterations "
                "before, which a run of the trainer has: put the bounds of "
                "`losses.auto_clip.AutoClip` into the batch's loss_bound, or give a number"
            )
        return self._section.step_loss(bound.to(dtype))


def _centered(
    batch: DiffusionBatch, gaussian: GaussianSteps | None, correction: LossCorrection
) -> Credited:
    """Returns the centered log-ratios to the rollout of the current and the old policy."""
    if gaussian is None or gaussian.centered is None:
        raise ValueError(
            f"{KEY}.centered=true compares the means of the steps with those of the rollout, which "
            "the batch does not hold (prev_sample_mean)"
        )
    old = batch.old_centered
    if old is None and correction.corrector is None:
        raise ValueError(
            f"{KEY}.centered=true with bypass_mode=false needs the centered log-ratio of the old "
            "policy, which the batch does not hold (old_centered): fill it in with "
            "`DiffusionBatch.with_old`"
        )
    if old is None:
        # In bypass mode the old policy is the rollout's.
        old = torch.zeros_like(gaussian.centered)
    return Credited(gaussian.centered, old)


def diffusion_loss(
    config: LossConfig,
    log_probs: Tensor,
    batch: DiffusionBatch,
    gaussian: GaussianSteps | None = None,
) -> tuple[Tensor, MetricBag]:
    """Computes the loss of denoising steps on a whole batch.

    A training loop builds a `DiffusionObjective` once and sums its terms instead.

    Args:
      config: settings of the loss and the rollout correction.
      log_probs: log-probs of the current policy, [B, T]; differentiable.
      batch: samples with advantages and old log-probs.
      gaussian: the current policy's steps, [B, T]; for a centered log-ratio, for losses that
        compare means, and for `rollout_rs=step_kl`.

    Returns:
      The loss, scalar, and metrics, names without prefix.

    Raises:
      ValueError: if the batch lacks what the loss or the correction needs.
    """
    terms = DiffusionObjective(config).terms(log_probs, batch, gaussian)
    return terms.total / denominator(terms.parts()).to(terms.total.dtype), terms.metrics
