"""The estimators of the gradient study that differ in mode, log-ratio and trust region.

The name of an estimator is MODE_RATIO_REGION: `bypass_centered_auto`. Guard is a loss of its own,
`guard_MODE_RATIO_REGION`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from estimators import (
    REFERENCE_CLIP,
    REFERENCE_GUARD_CLIP,
    Calibration,
    Estimator,
    Pair,
    checked,
    dppo,
    follow,
    ppo,
)

from flowgrpo_rc import DiffusionLossConfig

NONE = 0.999  # a clip that holds nothing back
AUTO = "auto:4"
THRESHOLD = DiffusionLossConfig.kl_threshold  # as published
RATIOS = ("plain", "centered")
# `auto` needs a mismatch before the update, which decoupled mode does not have.
REGIONS = {
    "bypass": ("none", "published", "calibrated", "auto", "dppo", "dppo_auto"),
    "decoupled": ("none", "published", "calibrated", "dppo"),
}
GUARD_REGIONS = {
    "bypass": ("none", "published", "auto"),
    "decoupled": ("none", "published"),
}


DEVIATIONS = (4, 8, 16, 32)  # of `auto:k`, where its width is varied
CLIPS = (1e-4, 1e-3, 1e-2)  # of decoupled mode, there


class Choice(NamedTuple):
    """Holds what an estimator of this file is made of.

    Attributes:
      mode: `bypass` or `decoupled`.
      ratio: `plain` or `centered`.
      region: the trust region.
      guard: whether the loss is GRPO-Guard's.
    """

    mode: str
    ratio: str
    region: str
    guard: bool = False

    @property
    def name(self) -> str:
        """Returns the name under which results are stored."""
        kind = "guard_" if self.guard else ""
        return f"{kind}{self.mode}_{self.ratio}_{self.region}"


CHOICES = tuple(
    Choice(mode, ratio, region, guard)
    for guard, regions in ((False, REGIONS), (True, GUARD_REGIONS))
    for mode, names in regions.items()
    for ratio in RATIOS
    for region in names
)
# The choices that the sweep over sizes of the mismatch compares.
SWEPT = tuple(choice for choice in CHOICES if choice.region == "none")


def regions(
    seen: Calibration, pairs: Sequence[Pair], choices: Sequence[Choice] = CHOICES
) -> dict[str, Estimator]:
    """Makes the estimators of choices.

    Args:
      seen: the calibration of the mismatch.
      pairs: the calibrating batches, each with the policy on it.
      choices: what to make.

    Returns:
      The name under which results are stored -> estimator.
    """
    found = {}
    for choice in choices:
        calibrated = seen.centered_clip if choice.ratio == "centered" else seen.clip
        estimator = _make(choice, calibrated)
        found[choice.name] = follow(estimator, pairs) if estimator.loss.auto else estimator
    return checked(found)


def widths(pairs: Sequence[Pair]) -> dict[str, Estimator]:
    """Makes centered estimators that differ in the width of their clip alone.

    Args:
      pairs: the calibrating batches, each with the policy on it.

    Returns:
      `bypass_auto_K` and `decoupled_CLIP` -> estimator.
    """
    found = {
        f"bypass_auto_{deviations}": follow(
            ppo(f"auto:{deviations}", bypass_mode=True, centered=True), pairs
        )
        for deviations in DEVIATIONS
    }
    found |= {f"decoupled_{clip:g}": ppo(clip, centered=True) for clip in CLIPS}
    return checked(found)


def unbounded() -> dict[str, Estimator]:
    """Makes the estimators of `SWEPT`, which need no calibration."""
    return checked({choice.name: _make(choice, NONE) for choice in SWEPT})


def _make(choice: Choice, calibrated: float) -> Estimator:
    correction = {"bypass_mode": choice.mode == "bypass", "centered": choice.ratio == "centered"}
    if choice.region.startswith("dppo"):
        return dppo(AUTO if choice.region == "dppo_auto" else THRESHOLD, **correction)
    clips: dict[str, float | str] = {
        "none": NONE,
        "published": REFERENCE_GUARD_CLIP if choice.guard else REFERENCE_CLIP,
        "calibrated": calibrated,
        "auto": AUTO,
    }
    mode = "grpo_guard" if choice.guard else "flow_grpo"
    return ppo(clips[choice.region], mode, **correction)
