"""The estimators of the gradient study that differ in weights, rejection and width of the clip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from estimators import (
    REFERENCE_CLIP,
    REFERENCE_GUARD_CLIP,
    Calibration,
    Estimator,
    Pair,
    auto_bands,
    checked,
    dppo,
    ppo,
)

from flowgrpo_rc import DiffusionLossConfig

SWEEP = (0.1, 0.3, 1.0, 2.0, 4.0, 10.0)  # clip_ratio over the floor
LEVELS = ("token", "sequence", "geometric")
WINDOW = {"bypass_mode": True, "bypass_level": "window"}


def corrections(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """Makes every estimator that this part of the study compares.

    Args:
      seen: the calibration of the mismatch.
      pairs: the calibrating batches, each with the policy on it.

    Returns:
      The name under which results are stored -> estimator.
    """
    return checked(
        {
            **_bypass(seen, pairs),
            **_decoupled(seen, pairs),
            **_reinforce(),
            **_other_losses(seen),
        }
    )


def _auto(clip: float, criterion: str, pairs: Sequence[Pair], **correction: Any) -> Estimator:
    given = {"rollout_rs": criterion, "rollout_rs_threshold": "auto:4", **correction}
    return ppo(clip, **given)._replace(bands=auto_bands(criterion, pairs))


def _bypass(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """FlowGRPO in bypass mode, with several clips and criteria of rejection."""
    found = {
        "bypass": ppo(REFERENCE_CLIP, bypass_mode=True),
        "bypass_calibrated": ppo(seen.clip, bypass_mode=True),
        "bypass_band_of_tokens": ppo(
            seen.clip, bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"
        ),
    }
    for multiple in SWEEP:
        clip = min(multiple * seen.floor, 0.99)
        found[f"bypass_clip_{multiple:g}"] = ppo(clip, bypass_mode=True)
    for name, threshold in seen.bands.items():
        found[f"bypass_{name}"] = ppo(
            seen.clip, rollout_rs=name, rollout_rs_threshold=threshold, **WINDOW
        )
    found["bypass_auto_k1"] = _auto(seen.clip, "token_k1", pairs, bypass_mode=True)
    found["bypass_auto_step_kl"] = _auto(seen.clip, "step_kl", pairs, bypass_mode=True)
    return found


def _decoupled(seen: Calibration, pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """FlowGRPO in decoupled mode: recomputed old log-probs, with weights, rejection, or neither."""
    found = {"recomputed": ppo(REFERENCE_CLIP)}
    for level in LEVELS:
        for scale in ("mean", "sum"):
            found[f"decoupled_{level}_{scale}"] = ppo(
                REFERENCE_CLIP, rollout_is=level, log_prob_scale=scale
            )
    found["decoupled_sequence_sum_unbounded"] = ppo(
        REFERENCE_CLIP, rollout_is="sequence", log_prob_scale="sum", rollout_is_threshold=1e8
    )
    rejecting = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": seen.bands["seq_mean_k1"]}
    found["recomputed_seq_mean_k1"] = ppo(REFERENCE_CLIP, **rejecting)
    found["decoupled_sequence_seq_mean_k1"] = ppo(
        REFERENCE_CLIP, rollout_is="sequence", **rejecting
    )
    found["recomputed_auto_k1"] = _auto(seen.clip, "token_k1", pairs)
    return found


def _reinforce() -> dict[str, Estimator]:
    """Policy gradients without a clip, with several weights."""
    free = {"loss_type": "reinforce", **WINDOW}
    found = {"reinforce": ppo(REFERENCE_CLIP, **free)}
    for level in LEVELS:
        found[f"reinforce_{level}"] = ppo(REFERENCE_CLIP, rollout_is=level, **free)
    found["reinforce_sequence_sum"] = ppo(
        REFERENCE_CLIP, rollout_is="sequence", log_prob_scale="sum", **free
    )
    return found


def _other_losses(seen: Calibration) -> dict[str, Estimator]:
    """Guard and Flow-DPPO."""
    return {
        "guard": ppo(REFERENCE_GUARD_CLIP, "grpo_guard", bypass_mode=True),
        "guard_calibrated": ppo(seen.guard_clip, "grpo_guard", bypass_mode=True),
        "guard_recomputed": ppo(REFERENCE_GUARD_CLIP, "grpo_guard"),
        "dppo": dppo(DiffusionLossConfig.kl_threshold, bypass_mode=True),
        "dppo_calibrated": dppo(seen.kl, bypass_mode=True),
    }
