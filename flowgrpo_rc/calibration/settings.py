"""The rule that turns a measured mismatch into a mode, a clip band and rejection bands."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from flowgrpo_rc.calibration.measure import Mismatch
from flowgrpo_rc.config import Config
from flowgrpo_rc.losses.base import DiffusionLossConfig

MODES = ("auto", "bypass", "decoupled")
REFERENCE_CLIP = {"gaussian": DiffusionLossConfig.clip_ratio, "peers": 1e-5}  # of the published recipes, by convention
QUANTILE, MARGIN = 0.99, 1.25  # of |difference|, and how far above it the band of bypass mode ends
WIDEST = 10.0  # times the reference: a wider band no longer bounds what an update does
MOVEMENT = 7.0  # times the floor: a movement of ten floors, less three of noise, must still be clipped
CRITERION, BAND = "token_k1", "auto:4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """clip_ratio: None where the loss has none; reason: of the mode, with the numbers that decided."""

    bypass_mode: bool
    clip_ratio: float | None
    reason: str

    def yaml(self, header: list[str]) -> str:
        """A file of the group `calibration`, for `--config-dir OUT +calibration=NAME`."""
        lines = ["# @package _global_", *(f"# {line}" for line in header), f"# {self.reason}"]
        if self.clip_ratio is not None:
            lines += ["actor:", "  diffusion_loss:", f"    clip_ratio: {self.clip_ratio:.1e}"]
        lines += [
            "algorithm:",
            "  rollout_correction:",
            f"    bypass_mode: {str(self.bypass_mode).lower()}",
            f"    rollout_rs: {CRITERION}",
            f'    rollout_rs_threshold: "{BAND}"',
            "    rollout_rs_threshold_lower: null",
        ]
        return "\n".join(lines) + "\n"

    def applied(self, config: Config) -> Config:
        """A copy of the configuration with these settings."""
        config = copy.deepcopy(config)
        if self.clip_ratio is not None:
            config.actor.diffusion_loss.clip_ratio = self.clip_ratio
        correction = config.algorithm.rollout_correction
        correction.bypass_mode = self.bypass_mode
        correction.rollout_rs, correction.rollout_rs_threshold = CRITERION, BAND
        correction.rollout_rs_threshold_lower = None
        return config


def choose(config: Config, mismatch: Mismatch, *, mode: str, cause: str | None) -> Settings:
    """The settings for a mismatch of engine and trainer.

    Bypass mode where a band that 99% of the mismatch lies in, with a margin, is sensible: at most `WIDEST` times the
    reference, and at most `MOVEMENT` times the floor. Decoupled mode otherwise, with the reference's band, since its
    ratio holds no mismatch. A fault is no noise to make room for. `mode` overrules the choice, not the numbers.
    """
    loss_mode = config.actor.diffusion_loss.loss_mode
    reference = REFERENCE_CLIP[config.rollout.algo.log_prob_convention]
    if loss_mode != "flow_grpo":
        if mode == "bypass":
            raise ValueError(
                f"--mode bypass: the band of actor.diffusion_loss.loss_mode={loss_mode} is not on the log-ratio that "
                "is measured here; use decoupled mode, or loss_mode=flow_grpo"
            )
        return Settings(
            bypass_mode=False,
            clip_ratio=None,
            reason=f"Decoupled mode: {loss_mode} does not clip the log-ratio, so no band of its own was fitted.",
        )
    floor, within = mismatch.scale(), mismatch.quantile(QUANTILE)
    needed, widest = up(MARGIN * within), min(WIDEST * reference, MOVEMENT * floor)
    numbers = f"{100 * QUANTILE:g}% of the mismatch is within {within:.1e}, the floor is {floor:.1e}"
    fits = cause is None and (needed <= reference or needed <= widest)
    if mode == "bypass" or (mode == "auto" and fits):
        clip, chosen = max(reference, needed), "Bypass mode"
        reason = f"a clip_ratio of {clip:.1e} contains it" + ("" if fits else ", though that is wider than sensible")
    else:
        clip, chosen = reference, "Decoupled mode"
        if cause is not None:
            reason = f"there is a fault ({cause}) to be mended first, and the band must not make room for it"
        elif fits:
            reason = "asked for; the ratio holds no mismatch, so the band is the reference's"
        else:
            reason = f"a band of {needed:.1e} would be wider than the {widest:.1e} that still bounds an update"
    return Settings(bypass_mode=chosen == "Bypass mode", clip_ratio=clip, reason=f"{chosen}: {numbers}; {reason}.")


def up(value: float) -> float:
    """Two significant digits, rounded up."""
    nearest = float(f"{value:.1e}")
    digit = 10.0 ** (int(f"{value:e}".split("e")[1]) - 1)
    return nearest if nearest >= value else float(f"{nearest + digit:.1e}")
