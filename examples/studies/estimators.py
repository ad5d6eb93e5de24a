"""The estimators that the gradient study compares, as settings of this package, and what calibrates
them.

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
from flowgrpo_rc.correction.auto_bands import ROBUST, AutoBands
from flowgrpo_rc.correction.log_ratios import compute_log_ratios
from flowgrpo_rc.correction.rejection import statistic
from flowgrpo_rc.correction.thresholds import parse_bands

REFERENCE_CLIP, REFERENCE_GUARD_CLIP = 1e-4, 2e-6
REJECTED = 0.05  # what a calibrated band rejects of a clean rollout
WITHIN, MARGIN = 0.99, 1.25  # a calibrated band ends a quarter above this quantile
# With as many steps in every window, seq_sum rejects what seq_mean rejects, and seq_max_k2 what
# seq_max_k3 does.
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

Pair = tuple[DiffusionBatch, Evaluation]


class Estimator(NamedTuple):
    """Settings, and for `auto` the bands that followed the calibrating batches."""

    correction: RolloutCorrectionConfig
    loss: DiffusionLossConfig
    auto: AutoBands | None = None

    @property
    def estimand(self) -> str:
        """Whose on-policy gradient it estimates: Guard weighs steps and scales ratios in a way of
        its own.
        """
        return "grpo_guard" if self.loss.loss_mode == "grpo_guard" else "flow_grpo"

    def settle(self, batch: DiffusionBatch, found: Evaluation) -> DiffusionBatch:
        """The batch with its old policy and, where they come before the loss, weights and
        rejection.
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
        """Of the loss at every log-prob and at every KL [B, T], for a settled batch before an
        update; metrics.
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
        kl_slope = (
            torch.zeros_like(kl) if kl.grad is None or not self.correction.bypass_mode else kl.grad
        )
        return log_probs.grad, kl_slope, metrics.compute()


class Calibration(NamedTuple):
    """What one kind of mismatch looks like before an update, on batches that the study does not use
    again.

    floor: robust standard deviation of the log-ratio; by_step: the same of each step [T]; absolute:
    mean, median, 99th percentile of |log-ratio|; clip, guard_clip, kl: the calibrated bands of
    FlowGRPO, Guard and Flow-DPPO; bands: criterion -> the threshold that rejects `REJECTED`;
    mean_kl: of the steps.
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
    """From batches and the training graph on them."""
    training = torch.cat([found.log_probs for _, found in pairs])
    rollout = torch.cat([batch.rollout_log_probs for batch, _ in pairs])
    kl, std = (
        torch.cat([getattr(found.gaussian, name) for _, found in pairs]) for name in ("kl", "std")
    )
    steps = compute_log_ratios(training, rollout, torch.ones_like(training, dtype=torch.bool), kl)
    ratio, magnitude = steps.log_ratio, steps.log_ratio.abs()
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
    """`auto:4` bands that have seen the calibrating batches, each as one iteration."""
    bands = AutoBands(parse_bands(criterion, "auto:4"), STEPS, torch.device("cpu"))
    for batch, found in pairs:
        bands.judge(batch, found.log_probs, found.gaussian.kl)
        bands.finish(identity)
    return bands


def estimators(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """Every estimator by the name under which its results are stored."""

    def ppo(clip: float, mode: str = "flow_grpo", **correction: Any) -> Estimator:
        return Estimator(
            RolloutCorrectionConfig(**correction),
            DiffusionLossConfig(loss_mode=mode, clip_ratio=clip),
        )

    def auto(criterion: str, **correction: Any) -> Estimator:
        given = {"rollout_rs": criterion, "rollout_rs_threshold": "auto:4", **correction}
        return ppo(seen.clip, **given)._replace(auto=auto_bands(criterion, pairs))

    def dppo(threshold: float) -> Estimator:
        return Estimator(bypass, DiffusionLossConfig(loss_mode="flow_dppo", kl_threshold=threshold))

    bypass, window = (
        RolloutCorrectionConfig(bypass_mode=True),
        {"bypass_mode": True, "bypass_level": "window"},
    )
    found = {
        "bypass": ppo(REFERENCE_CLIP, bypass_mode=True),
        "bypass_calibrated": ppo(seen.clip, bypass_mode=True),
        "bypass_band_of_tokens": ppo(
            seen.clip, bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"
        ),
    }
    for multiple in SWEEP:
        found[f"bypass_clip_{multiple:g}"] = ppo(min(multiple * seen.floor, 0.99), bypass_mode=True)
    for name, threshold in seen.bands.items():
        found[f"bypass_{name}"] = ppo(
            seen.clip, rollout_rs=name, rollout_rs_threshold=threshold, **window
        )
    found["bypass_auto_k1"] = auto("token_k1", bypass_mode=True)
    found["bypass_auto_step_kl"] = auto("step_kl", bypass_mode=True)
    found["recomputed"] = ppo(REFERENCE_CLIP)
    for level in ("token", "sequence", "geometric"):
        for scale in ("mean", "sum"):
            found[f"decoupled_{level}_{scale}"] = ppo(
                REFERENCE_CLIP, rollout_is=level, log_prob_scale=scale
            )
    unbounded = {"rollout_is": "sequence", "log_prob_scale": "sum", "rollout_is_threshold": 1e8}
    found["decoupled_sequence_sum_unbounded"] = ppo(REFERENCE_CLIP, **unbounded)
    rejecting = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": seen.bands["seq_mean_k1"]}
    found["recomputed_seq_mean_k1"] = ppo(REFERENCE_CLIP, **rejecting)
    found["decoupled_sequence_seq_mean_k1"] = ppo(
        REFERENCE_CLIP, rollout_is="sequence", **rejecting
    )
    found["recomputed_auto_k1"] = auto("token_k1")
    free = {"loss_type": "reinforce", **window}
    found["reinforce"] = ppo(REFERENCE_CLIP, **free)
    for level in ("token", "sequence", "geometric"):
        found[f"reinforce_{level}"] = ppo(REFERENCE_CLIP, rollout_is=level, **free)
    found["reinforce_sequence_sum"] = ppo(
        REFERENCE_CLIP, rollout_is="sequence", log_prob_scale="sum", **free
    )
    found["guard"] = ppo(REFERENCE_GUARD_CLIP, "grpo_guard", bypass_mode=True)
    found["guard_calibrated"] = ppo(seen.guard_clip, "grpo_guard", bypass_mode=True)
    found["guard_recomputed"] = ppo(REFERENCE_GUARD_CLIP, "grpo_guard")
    found["dppo"] = dppo(DiffusionLossConfig.kl_threshold)
    found["dppo_calibrated"] = dppo(seen.kl)
    for estimator in found.values():
        estimator.correction.validate()
        estimator.loss.validate()
    return found


def estimands() -> dict[str, Estimator]:
    """On rollouts of the policy itself: FlowGRPO's gradient and Guard's."""
    decoupled = RolloutCorrectionConfig()
    return {
        name: Estimator(decoupled, DiffusionLossConfig(loss_mode=name))
        for name in ("flow_grpo", "grpo_guard")
    }
