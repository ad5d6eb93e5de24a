"""The loss of denoising steps."""

import torch
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.objective import Objective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.config import Rules
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.base import DIFFUSION_KEY, DiffusionLoss, PolicyLoss, steps_of
from flowgrpo_rc.losses.config import LossConfig


class DiffusionObjective(Objective[DiffusionBatch]):
    """The loss of FlowGRPO: the mean over all steps, rejected ones included, as in the document.

    In bypass mode the trainer gives one step at a time, so that every rejection level means the
    step, or with `bypass_level=window` all steps of a sample.
    """

    def __init__(
        self, config: LossConfig, loss: DiffusionLoss | None = None, rules: Rules | None = None
    ) -> None:
        """Takes the loss and the rules that the settings name; None makes them here."""
        section = config.diffusion_loss
        super().__init__(
            config.rollout_correction,
            rules,
            aggregation="token-mean",
            normalize="all",
            adv_clip_max=section.adv_clip_max,
        )
        self._section = section
        made = section.loss() if loss is None else loss
        assert isinstance(made, DiffusionLoss)
        self._loss = made
        self._loss_mode = section.loss_mode

    def compared(
        self, log_probs: Tensor, batch: DiffusionBatch, gaussian: GaussianSteps | None
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probs, or centered log-ratios to the rollout if the correction says so."""
        if not self._correction.centered:
            return super().compared(log_probs, batch, gaussian)
        if gaussian is None or gaussian.centered is None:
            raise ValueError(
                f"{KEY}.centered=true compares the means of the steps with those of the rollout, "
                "which the batch does not hold (prev_sample_mean)"
            )
        old = batch.old_centered
        if old is None and self._corrector is None:
            raise ValueError(
                f"{KEY}.centered=true with bypass_mode=false needs the centered log-ratio of the "
                "old policy, which the batch does not hold (old_centered): fill it in with "
                "`DiffusionBatch.with_old`"
            )
        # In bypass mode the old policy is the rollout's.
        return gaussian.centered, torch.zeros_like(gaussian.centered) if old is None else old

    def policy_loss(
        self,
        current: Tensor,
        old: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        batch: DiffusionBatch,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the loss that `loss_mode` names, with the bounds that it has at each step."""
        kl = None if gaussian is None else gaussian.kl
        if self._loss.needs_means and kl is None:
            raise ValueError(
                f"{DIFFUSION_KEY}.loss_mode={self._loss_mode} compares the means of the steps with "
                "those of the old policy, which the batch does not hold (prev_sample_mean)"
            )
        steps = steps_of(self._loss, gaussian, centered=bool(self._correction.centered))
        bound = batch.loss_bound
        policy = self._bounded(bound, current.dtype)(current, old, advantages, keep_mask, steps)
        if bound is not None:
            # A bound is inf until its step is warm, and would make the mean inf.
            warm = bound.isfinite()
            policy.metrics.mean("auto_bound_mean", bound, keep_mask & warm)
            policy.metrics.mean("auto_bound_warm_fraction", warm.double(), keep_mask)
        if self._loss.needs_means and kl is not None:
            policy.metrics.mean("step_kl_mean", kl, keep_mask)
            policy.metrics.max("step_kl_max", kl, keep_mask)
        return policy

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
        # Made anew for each forward: a loss holds its bound, which differs from step to step.
        return self._section.bounded(self._loss, bound.to(dtype))


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
    return DiffusionObjective(config).on_batch(log_probs, batch, gaussian)
