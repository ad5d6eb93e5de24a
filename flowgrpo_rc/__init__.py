"""FlowGRPO with rollout correction for flow-matching diffusion models.

The public names below are imported when they are first asked for, so that the command line can
answer `--help` without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo_rc.algorithms.policy_gradient.images import diffusion_loss
    from flowgrpo_rc.algorithms.policy_gradient.text import token_loss
    from flowgrpo_rc.api import Run, compare, evaluate, export, plan, train
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
    from flowgrpo_rc.monitoring.health import check_rollout_correction_health
    from flowgrpo_rc.report.figure import plot_rollout_correction

__version__ = "0.9.0"

__all__ = [
    "DiffusionBatch",
    "DiffusionLossConfig",
    "LossConfig",
    "MetricBag",
    "Prompt",
    "PromptBatch",
    "Rewards",
    "RolloutCorrectionConfig",
    "Run",
    "SamplerSpec",
    "TokenBatch",
    "TokenLossConfig",
    "TokenSpec",
    "apply_bypass_mode",
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "check_rollout_correction_health",
    "compare",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "diffusion_loss",
    "evaluate",
    "export",
    "plan",
    "plot_rollout_correction",
    "token_loss",
    "train",
]

# Module -> the public names that it holds.
_MODULES = {
    "api": "Run compare evaluate export plan train",
    "batch": "DiffusionBatch Prompt PromptBatch Rewards SamplerSpec TokenBatch TokenSpec",
    "core.metrics": "MetricBag",
    "correction.api": (
        "apply_bypass_mode apply_bypass_mode_to_diffusion_batch apply_rollout_correction_to_batch "
        "apply_rollout_correction_to_diffusion_batch compute_offpolicy_metrics "
        "compute_rollout_correction_and_rejection_mask compute_rollout_correction_weights "
        "compute_rollout_rejection_mask"
    ),
    "correction.config": "RolloutCorrectionConfig",
    "losses.config": "DiffusionLossConfig LossConfig TokenLossConfig",
    "algorithms.policy_gradient.images": "diffusion_loss",
    "algorithms.policy_gradient.text": "token_loss",
    "monitoring.health": "check_rollout_correction_health",
    "report.figure": "plot_rollout_correction",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names alone, whether imported or not."""
    return [*__all__, "__version__"]
