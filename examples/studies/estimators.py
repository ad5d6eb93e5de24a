"""An estimator of the gradient study, as settings of this package; the calibration of a mismatch.

Legend: B samples, T steps of the SDE window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gradient_problem import STEPS, Evaluation
from torch import Tensor

from flowgrpo_rc import (
    DiffusionBatch,
    DiffusionLossConfig,
    LossConfig,
    RolloutCorrectionConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
)
from flowgrpo_rc.core.advantages import group_relative
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.history import ROBUST
from flowgrpo_rc.correction.log_ratios import compute_log_ratios
from flowgrpo_rc.correction.rejection import statistic
from flowgrpo_rc.correction.thresholds import parse_bands
from flowgrpo_rc.losses.auto_clip import AutoClip

REFERENCE_CLIP = 1e-4
REFERENCE_GUARD_CLIP = 2e-6
REJECTED = 0.05  # fraction of a clean rollout that a calibrated band rejects
# A calibrated clip is MARGIN times the quantile WITHIN of the mismatch.
WITHIN = 0.99
MARGIN = 1.25
# All windows have the same number of steps. So seq_sum rejects what seq_mean rejects, and
# seq_max_k2 what seq_max_k3 rejects.
CRITERIA = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k3",
    "step_kl",
)

Pair = tuple[DiffusionBatch, Evaluation]


class Estimator(NamedTuple):
    """One way to estimate the gradient.

    Attributes:
      correction: settings of the rollout correction.
      loss: settings of the loss.
      bands: for `auto` bands, those that followed the calibrating batches; None for the others.
      clip: for a bound of `auto:k`, the one that followed them; None for the others.
    """

    correction: RolloutCorrectionConfig
    loss: DiffusionLossConfig
    bands: AutoBands | None = None
    clip: AutoClip | None = None

    @property
    def estimand(self) -> str:
        """Returns the name of the on-policy gradient that it estimates.

        Guard has one of its own, since it weighs steps and scales ratios differently.
        """
        return "grpo_guard" if self.loss.loss_mode == "grpo_guard" else "flow_grpo"

    def settle(self, batch: DiffusionBatch, found: Evaluation) -> DiffusionBatch:
        """Fills in everything that comes before the loss.

        Args:
          batch: a batch as sampled.
          found: the policy before any update on it.

        Returns:
          The batch with its old policy and, in decoupled mode, weights and rejection.
        """
        kl = found.gaussian.kl
        if self.bands is not None:
            batch, _ = self.bands.judge(batch, found.log_probs, kl)
        if self.clip is not None:
            batch = batch.replace(loss_bound=self.clip.bounds(batch.step_indices))
        if self.correction.bypass_mode:
            return apply_bypass_mode_to_diffusion_batch(batch)
        centered = found.gaussian.centered if self.correction.centered else None
        batch = batch.with_old(found.log_probs, found.means, centered)
        return apply_rollout_correction_to_diffusion_batch(batch, self.correction, step_kl=kl)[0]

    def coefficients(
        self, batch: DiffusionBatch, rewards: Tensor, now: Evaluation
    ) -> tuple[Tensor, dict[str, float]]:
        """Computes the slopes of the loss at the quantities of `Evaluation.slopes`.

        Args:
          batch: a settled batch.
          rewards: reward of each sample, [B].
          now: the policy that is updated, on the batch.

        Returns:
          The slopes, [3, B, T]; metrics of the loss.
        """
        valid = torch.ones_like(rewards, dtype=torch.bool)
        if self.correction.excludes_rejected and batch.rejection_mask is not None:
            valid = batch.rejection_mask.any(1)
        advantages = group_relative(rewards, batch.group, valid, global_std=True).values
        batch = batch.replace(advantages=advantages.unsqueeze(1).expand(-1, batch.num_steps))
        kl = now.gaussian.kl if self.correction.bypass_mode else now.old_kl
        leaves = [now.log_probs, kl, now.gaussian.centered]
        log_probs, kl, centered = (one.clone().requires_grad_() for one in leaves)
        config = LossConfig(rollout_correction=self.correction, diffusion_loss=self.loss)
        gaussian = now.gaussian._replace(kl=kl, centered=centered)
        loss, metrics = diffusion_loss(config, log_probs, batch, gaussian)
        by_log_prob, by_kl, by_centered = torch.autograd.grad(
            loss, [log_probs, kl, centered], materialize_grads=True
        )
        # The centered log-ratio has the slope of the log-prob plus that of the KL from the rollout.
        found = torch.stack([by_log_prob + by_centered, by_centered, torch.zeros_like(by_kl)])
        found[1 if self.correction.bypass_mode else 2] += by_kl
        return found, metrics.compute()


class Calibration(NamedTuple):
    """One kind of mismatch before an update, on batches that the study does not use again.

    Attributes:
      floor: robust standard deviation of the log-ratio.
      by_step: the same of each step, [T].
      absolute: mean, median and 99th percentile of |log-ratio|.
      clip: calibrated clip of FlowGRPO.
      guard_clip: calibrated clip of Guard.
      centered_clip: calibrated clip of FlowGRPO with the centered log-ratio.
      bands: criterion -> the threshold that rejects the fraction `REJECTED`.
      kl: calibrated threshold of Flow-DPPO.
      mean_kl: mean KL of the steps.
    """

    floor: float
    by_step: list[float]
    absolute: dict[str, float]
    clip: float
    guard_clip: float
    centered_clip: float
    bands: dict[str, str | float]
    kl: float
    mean_kl: float


def calibrate(pairs: Sequence[Pair]) -> Calibration:
    """Measures a mismatch on batches, each with the policy on it."""
    training = torch.cat([found.log_probs for _, found in pairs])
    rollout = torch.cat([batch.rollout_log_probs for batch, _ in pairs])
    kl, std, centered = (
        torch.cat([getattr(found.gaussian, name) for _, found in pairs])
        for name in ("kl", "std", "centered")
    )
    steps = compute_log_ratios(training, rollout, torch.ones_like(training, dtype=torch.bool), kl)
    ratio = steps.log_ratio
    magnitude = ratio.abs()
    guard = torch.expm1(centered * std).abs()
    return Calibration(
        floor=_robust(ratio.flatten()),
        by_step=[_robust(column) for column in ratio.T],
        absolute={
            "mean": magnitude.mean().item(),
            "p50": _quantile(magnitude, 0.5),
            "p99": _quantile(magnitude, 0.99),
        },
        clip=MARGIN * _quantile(torch.expm1(ratio).abs(), WITHIN),
        centered_clip=MARGIN * _quantile(torch.expm1(centered).abs(), WITHIN),
        guard_clip=MARGIN * _quantile(guard, WITHIN),
        bands={name: _threshold(statistic(steps, _band(name)), name) for name in CRITERIA},
        kl=MARGIN * _quantile(kl, WITHIN),
        mean_kl=kl.mean().item(),
    )


def _band(name: str) -> Any:
    return parse_bands(name, "0.5_2.0" if name.endswith("k1") else 1.0)[0]


def _threshold(values: Tensor, name: str) -> str | float:
    bound = _quantile(values.abs(), 1 - REJECTED)
    return f"{math.exp(-bound)!r}_{math.exp(bound)!r}" if name.endswith("k1") else bound


def _robust(values: Tensor) -> float:
    return ROBUST * (values - values.median()).abs().median().item()


def _quantile(values: Tensor, q: float) -> float:
    return torch.quantile(values.flatten()[: 2**24], q).item()


def auto_bands(criterion: str, pairs: Sequence[Pair]) -> AutoBands:
    """Makes `auto:4` bands that have seen the calibrating batches, each as one iteration."""
    bands = AutoBands(parse_bands(criterion, "auto:4"), STEPS, torch.device("cpu"))
    for batch, found in pairs:
        bands.judge(batch, found.log_probs, found.gaussian.kl)
        bands.finish(identity)
    return bands


def follow(estimator: Estimator, pairs: Sequence[Pair]) -> Estimator:
    """Gives a bound of `auto:k` the calibrating batches to follow, each as one iteration.

    Args:
      estimator: its clip_ratio or kl_threshold is `auto:k`.
      pairs: the calibrating batches, each with the policy on it.
    """
    (deviations,) = estimator.loss.auto.values()
    clip = AutoClip(
        estimator.loss.loss(),
        deviations,
        None,
        centered=estimator.correction.centered,
        num_steps=STEPS,
        device=torch.device("cpu"),
    )
    for batch, found in pairs:
        clip.observe(batch, found.log_probs, found.gaussian)
        clip.finish(identity)
    return estimator._replace(clip=clip)


def ppo(clip: float | str, mode: str = "flow_grpo", **correction: Any) -> Estimator:
    """Makes an estimator with a clip.

    Args:
      clip: clip_ratio.
      mode: loss_mode.
      **correction: settings of the rollout correction.
    """
    loss = DiffusionLossConfig(loss_mode=mode, clip_ratio=clip)
    return Estimator(RolloutCorrectionConfig(**correction), loss)


def dppo(threshold: float | str, **correction: Any) -> Estimator:
    """Makes an estimator with Flow-DPPO's mask.

    Args:
      threshold: kl_threshold.
      **correction: settings of the rollout correction.
    """
    loss = DiffusionLossConfig(loss_mode="flow_dppo", kl_threshold=threshold)
    return Estimator(RolloutCorrectionConfig(**correction), loss)


def checked(given: dict[str, Estimator]) -> dict[str, Estimator]:
    """Returns estimators by name as they are; ValueError for a wrong setting."""
    for estimator in given.values():
        estimator.correction.validate()
        estimator.loss.validate()
    return given


def estimands(*, centered: bool = False) -> dict[str, Estimator]:
    """Makes the two estimators of the truth, which see rollouts of the policy itself.

    Args:
      centered: credit the recorded noise, for a policy that does not sample in its own precision.
    """
    return {mode: ppo(0.99, mode, centered=centered) for mode in ("flow_grpo", "grpo_guard")}
