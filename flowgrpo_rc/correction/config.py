"""Settings of the rollout correction, `algorithm.rollout_correction` in the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.correction.bands import Band, parse_bands

KEY = "algorithm.rollout_correction"
LOSS_TYPES = ("ppo_clip", "reinforce")
IS_LEVELS = ("token", "sequence")


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """What to do about the difference between the rollout policy and the training graph.

    bypass_mode: True takes old := rollout and corrects inside the loss, step by step, with current / rollout.
        False (decoupled) recomputes old with the training graph and corrects once per batch with old / rollout.
    loss_type: `ppo_clip`, or `reinforce` (truncated importance sampling without a clip; bypass mode only).
    rollout_is: importance weights at `token` (each SDE step) or `sequence` (product over the window) level, or
        null for none. Under bypass mode with ppo_clip they are diagnostics: the PPO ratio is the weight already.
    rollout_is_threshold: weights are truncated above it.
    rollout_is_batch_normalize: divide the weights by their mean over the batch (decoupled mode).
    rollout_rs: rejection criteria, one or several separated by commas: token_k1..k3, seq_sum_k1..k3,
        seq_mean_k1..k3, seq_max_k2, seq_max_k3.
    rollout_rs_threshold: a band "lower_upper" on the ratio training / rollout for k1 (one number u means
        "1/u_u"), one positive upper bound for k2 and k3; one for all criteria or one for each.
    """

    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: Any = None
    rollout_rs_threshold: Any = None

    def bands(self) -> tuple[Band, ...]:
        """The rejection criteria with their bounds, parsed."""
        return parse_bands(self.rollout_rs, self.rollout_rs_threshold)

    def validate(self) -> None:
        """Raise ValueError for a wrong or contradictory setting, naming the key and what is allowed."""
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"{KEY}.loss_type={self.loss_type!r}: allowed are {', '.join(LOSS_TYPES)}")
        if self.rollout_is is not None and self.rollout_is not in IS_LEVELS:
            raise ValueError(f"{KEY}.rollout_is={self.rollout_is!r}: allowed are null, {', '.join(IS_LEVELS)}")
        if not self.rollout_is_threshold >= 1:
            raise ValueError(
                f"{KEY}.rollout_is_threshold={self.rollout_is_threshold}: give 1 or more (a lower bound would shrink "
                "the weights of samples that need no correction)"
            )
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError(
                f"{KEY}.loss_type=reinforce compares the current policy with the rollout and needs "
                f"{KEY}.bypass_mode=true; set that, or loss_type=ppo_clip"
            )
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError(
                f"{KEY}.rollout_is_batch_normalize=true has no weights to normalise: set {KEY}.rollout_is "
                "to token or sequence, or leave it false"
            )
        if self.rollout_is_batch_normalize and self.bypass_mode:
            raise ValueError(
                f"{KEY}.rollout_is_batch_normalize=true needs the weights of the whole batch, which bypass mode "
                f"does not have (it corrects step by step): set {KEY}.bypass_mode=false, or leave it false"
            )
        self.bands()
