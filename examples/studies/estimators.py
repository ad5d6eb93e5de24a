"""The estimators that the gradient study compares, as settings of this package; their calibration.

Legend: B samples, T steps of the SDE window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from flow import STEPS, Evaluation
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
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.history import ROBUST
from flowgrpo_rc.correction.log_ratios import compute_log_ratios
from flowgrpo_rc.correction.rejection import statistic
from flowgrpo_rc.correction.thresholds import parse_bands

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
SWEEP = (0.1, 0.3, 1.0, 2.0, 4.0, 10.0)  # clip_ratio over the floor
LEVELS = ("token", "sequence", "geometric")
WINDOW = {"bypass_mode": True, "bypass_level": "window"}

Pair = tuple[DiffusionBatch, Evaluation]


class Estimator(NamedTuple):
    """One way to estimate the gradient.

    Attributes:
      correction: settings of the rollout correction.
      loss: settings of the loss.
      auto: for `auto` bands, the bands that followed the calibrating batches; None for the others.
    """

    correction: RolloutCorrectionConfig
    loss: DiffusionLossConfig
    auto: AutoBands | None = None

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
          found: the training graph on it.

        Returns:
          The batch with its old policy and, in decoupled mode, weights and rejection.
        """
        kl = found.gaussian.kl
        if self.auto is not None:
            batch, _ = self.auto.judge(batch, found.log_probs, kl)
        if self.correction.bypass_mode:
            return apply_bypass_mode_to_diffusion_batch(batch)
        batch = batch.with_old(found.log_probs, found.means)
        return apply_rollout_correction_to_diffusion_batch(batch, self.correction, step_kl=kl)[0]

    def slopes(
        self, batch: DiffusionBatch, rewards: Tensor, found: Evaluation
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Computes the slope of the loss at every log-prob and at every KL, before an update.

        Args:
          batch: a settled batch.
          rewards: reward of each sample, [B].
          found: the training graph on the batch.

        Returns:
          The slope at the log-probs, [B, T]; the slope at the KLs, [B, T]; metrics of the loss.
        """
        valid = torch.ones_like(rewards, dtype=torch.bool)
        if self.correction.excludes_rejected and batch.rejection_mask is not None:
            valid = batch.rejection_mask.any(1)
        advantages = group_relative(rewards, batch.group, valid, global_std=True).values
        batch = batch.replace(advantages=advantages.unsqueeze(1).expand(-1, batch.num_steps))
        # In decoupled mode the old policy is the current one, and their KL has neither value nor
        # slope yet.
        kl = found.gaussian.kl if self.correction.bypass_mode else torch.zeros_like(found.log_probs)
        log_probs, kl = (one.clone().requires_grad_() for one in (found.log_probs, kl))
        config = LossConfig(rollout_correction=self.correction, diffusion_loss=self.loss)
        loss, metrics = diffusion_loss(
            config, log_probs, batch, GaussianSteps(found.gaussian.std, found.gaussian.dt, kl)
        )
        loss.backward()
        unused = kl.grad is None or not self.correction.bypass_mode
        kl_slope = torch.zeros_like(kl) if unused else kl.grad
        return log_probs.grad, kl_slope, metrics.compute()


class Calibration(NamedTuple):
    """One kind of mismatch before an update, on batches that the study does not use again.

    Attributes:
      floor: robust standard deviation of the log-ratio.
      by_step: the same of each step, [T].
      absolute: mean, median and 99th percentile of |log-ratio|.
      clip: calibrated clip of FlowGRPO.
      guard_clip: calibrated clip of Guard.
      bands: criterion -> the threshold that rejects the fraction `REJECTED`.
      kl: calibrated threshold of Flow-DPPO.
      mean_kl: mean KL of the steps.
    """

    floor: float
    by_step: list[float]
    absolute: dict[str, float]
    clip: float
    guard_clip: float
    bands: dict[str, str | float]
    kl: float
    mean_kl: float


def calibrate(pairs: Sequence[Pair]) -> Calibration:
    """Measures a mismatch on batches, each with the training graph on it."""
    training = torch.cat([found.log_probs for _, found in pairs])
    rollout = torch.cat([batch.rollout_log_probs for batch, _ in pairs])
    kl, std = (
        torch.cat([getattr(found.gaussian, name) for _, found in pairs]) for name in ("kl", "std")
    )
    steps = compute_log_ratios(training, rollout, torch.ones_like(training, dtype=torch.bool), kl)
    ratio = steps.log_ratio
    magnitude = ratio.abs()
    guard = torch.expm1((ratio + kl) * std).abs()
    return Calibration(
        floor=_robust(ratio.flatten()),
        by_step=[_robust(column) for column in ratio.T],
        absolute={
            "mean": magnitude.mean().item(),
            "p50": _quantile(magnitude, 0.5),
            "p99": _quantile(magnitude, 0.99),
        },
        clip=MARGIN * _quantile(torch.expm1(ratio).abs(), WITHIN),
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


def estimators(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """Makes every estimator that the study compares.

    Args:
      seen: the calibration of the mismatch.
      pairs: the calibrating batches, each with the training graph on it.

    Returns:
      The name under which results are stored -> estimator.
    """
    found = {
        **_bypass(seen, pairs),
        **_decoupled(seen, pairs),
        **_reinforce(),
        **_other_losses(seen),
    }
    for estimator in found.values():
        estimator.correction.validate()
        estimator.loss.validate()
    return found


def _ppo(clip: float, mode: str = "flow_grpo", **correction: Any) -> Estimator:
    loss = DiffusionLossConfig(loss_mode=mode, clip_ratio=clip)
    return Estimator(RolloutCorrectionConfig(**correction), loss)


def _auto(clip: float, criterion: str, pairs: Sequence[Pair], **correction: Any) -> Estimator:
    given = {"rollout_rs": criterion, "rollout_rs_threshold": "auto:4", **correction}
    return _ppo(clip, **given)._replace(auto=auto_bands(criterion, pairs))


def _bypass(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """FlowGRPO in bypass mode, with several clips and criteria of rejection."""
    found = {
        "bypass": _ppo(REFERENCE_CLIP, bypass_mode=True),
        "bypass_calibrated": _ppo(seen.clip, bypass_mode=True),
        "bypass_band_of_tokens": _ppo(
            seen.clip, bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"
        ),
    }
    for multiple in SWEEP:
        clip = min(multiple * seen.floor, 0.99)
        found[f"bypass_clip_{multiple:g}"] = _ppo(clip, bypass_mode=True)
    for name, threshold in seen.bands.items():
        found[f"bypass_{name}"] = _ppo(
            seen.clip, rollout_rs=name, rollout_rs_threshold=threshold, **WINDOW
        )
    found["bypass_auto_k1"] = _auto(seen.clip, "token_k1", pairs, bypass_mode=True)
    found["bypass_auto_step_kl"] = _auto(seen.clip, "step_kl", pairs, bypass_mode=True)
    return found


def _decoupled(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """FlowGRPO in decoupled mode: recomputed old log-probs, with weights, rejection, or neither."""
    found = {"recomputed": _ppo(REFERENCE_CLIP)}
    for level in LEVELS:
        for scale in ("mean", "sum"):
            found[f"decoupled_{level}_{scale}"] = _ppo(
                REFERENCE_CLIP, rollout_is=level, log_prob_scale=scale
            )
    found["decoupled_sequence_sum_unbounded"] = _ppo(
        REFERENCE_CLIP, rollout_is="sequence", log_prob_scale="sum", rollout_is_threshold=1e8
    )
    rejecting = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": seen.bands["seq_mean_k1"]}
    found["recomputed_seq_mean_k1"] = _ppo(REFERENCE_CLIP, **rejecting)
    found["decoupled_sequence_seq_mean_k1"] = _ppo(
        REFERENCE_CLIP, rollout_is="sequence", **rejecting
    )
    found["recomputed_auto_k1"] = _auto(seen.clip, "token_k1", pairs)
    return found


def _reinforce() -> dict[str, Estimator]:
    """Policy gradients without a clip, with several weights."""
    free = {"loss_type": "reinforce", **WINDOW}
    found = {"reinforce": _ppo(REFERENCE_CLIP, **free)}
    for level in LEVELS:
        found[f"reinforce_{level}"] = _ppo(REFERENCE_CLIP, rollout_is=level, **free)
    found["reinforce_sequence_sum"] = _ppo(
        REFERENCE_CLIP, rollout_is="sequence", log_prob_scale="sum", **free
    )
    return found


def _other_losses(seen: Calibration) -> dict[str, Estimator]:
    """Guard and Flow-DPPO."""

    def dppo(threshold: float) -> Estimator:
        loss = DiffusionLossConfig(loss_mode="flow_dppo", kl_threshold=threshold)
        return Estimator(RolloutCorrectionConfig(bypass_mode=True), loss)

    return {
        "guard": _ppo(REFERENCE_GUARD_CLIP, "grpo_guard", bypass_mode=True),
        "guard_calibrated": _ppo(seen.guard_clip, "grpo_guard", bypass_mode=True),
        "guard_recomputed": _ppo(REFERENCE_GUARD_CLIP, "grpo_guard"),
        "dppo": dppo(DiffusionLossConfig.kl_threshold),
        "dppo_calibrated": dppo(seen.kl),
    }


def estimands() -> dict[str, Estimator]:
    """Makes the two estimators of the truth, which see rollouts of the policy itself."""
    decoupled = RolloutCorrectionConfig()
    return {
        name: Estimator(decoupled, DiffusionLossConfig(loss_mode=name))
        for name in ("flow_grpo", "grpo_guard")
    }
