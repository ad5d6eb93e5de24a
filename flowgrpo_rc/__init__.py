"""FlowGRPO with rollout correction for flow-matching diffusion models."""

from __future__ import annotations

from flowgrpo_rc.batch import (
    DiffusionBatch,
    Prompt,
    PromptBatch,
    Rewards,
    SamplerSpec,
    TokenBatch,
    TokenSpec,
)
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.api import (
    apply_bypass_mode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_batch,
    apply_rollout_correction_to_diffusion_batch,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig
from flowgrpo_rc.losses.diffusion import diffusion_loss
from flowgrpo_rc.losses.token import token_loss
from flowgrpo_rc.monitoring.health import check_rollout_correction_health
from flowgrpo_rc.report.figure import plot_rollout_correction

__version__ = "0.1.0"

__all__ = [
    "DiffusionBatch",
    "DiffusionLossConfig",
    "LossConfig",
    "MetricBag",
    "Prompt",
    "PromptBatch",
    "Rewards",
    "RolloutCorrectionConfig",
    "SamplerSpec",
    "TokenBatch",
    "TokenLossConfig",
    "TokenSpec",
    "apply_bypass_mode",
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "check_rollout_correction_health",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "diffusion_loss",
    "plot_rollout_correction",
    "token_loss",
]
