"""Checks that the settings fit what the loss of images trains on: denoising steps of a rollout, or
finished samples, which have no log-probs and so no mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.base import DIFFUSION_KEY, ForwardLoss


def check_trained_on(config: Config) -> None:
    """Checks a run of images.

    Raises:
      ValueError: the rollout does not make what the loss trains on, or a setting has no effect.
    """
    section = config.actor.diffusion_loss
    size = config.rollout.algo.sde_window_size
    loss = section.forward
    named = f"{DIFFUSION_KEY}.loss_mode={section.loss_mode}"
    if loss is None:
        if size == 0:
            raise ValueError(
                f"rollout.algo.sde_window_size=0 leaves {named} no stochastic step to train on: "
                "give at least 1, or a loss of finished samples, loss_mode=diffusion_nft"
            )
        return
    if size != 0:
        raise ValueError(
            f"{named} trains on finished samples, which the ODE makes: set "
            f"rollout.algo.sde_window_size=0 (it is {'null' if size is None else size})"
        )
    _check_times(config, loss)
    for setting, default in _without_effect(config):
        raise ValueError(
            f"{setting} has no effect with {named}, which knows no log-probs: drop it, or give its "
            f"default where a file sets it, {default}"
        )
    for setting, holds in (
        (f"data.replay_dir={config.data.replay_dir}", config.data.replay_dir is not None),
        ("trainer.save_rollouts=true", config.trainer.save_rollouts),
    ):
        if holds:
            raise ValueError(
                f"{setting} is for recorded steps, and {named} trains on finished samples: drop "
                "one of them"
            )


def _check_times(config: Config, loss: ForwardLoss) -> None:
    steps = config.rollout.evaluations()
    if loss.times is not None and loss.times > steps:
        raise ValueError(
            f"{DIFFUSION_KEY}.times={loss.times}: the schedule has {steps} noise levels "
            "(rollout.pipeline.num_inference_steps); give at most that, or null for all"
        )
    if config.actor.diffusion_loss.adv_clip_max == math.inf:
        raise ValueError(
            f"{DIFFUSION_KEY}.adv_clip_max=inf: advantages are divided by it with "
            f"{DIFFUSION_KEY}.loss_mode={config.actor.diffusion_loss.loss_mode}; give a number"
        )


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Yields settings about log-probs that are not the default, and the default."""
    correction = config.algorithm.rollout_correction
    for field in fields(RolloutCorrectionConfig):
        value = getattr(correction, field.name)
        off = (field.default, False) if field.name == "centered" else (field.default,)
        if value not in off:
            default = "null" if field.default is None else str(field.default).lower()
            yield f"{KEY}.{field.name}={value}", f"{KEY}.{field.name}={default}"
    for name, default in (("old_log_probs", "auto"), ("replay", "any")):
        value = getattr(config.actor, name)
        if value != default:
            yield f"actor.{name}={value}", f"actor.{name}={default}"
