"""Settles what is left open until the machine and the rollout are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from flowgrpo_rc.config.check_engine import engine_class
from flowgrpo_rc.config.check_folder import config_of_run
from flowgrpo_rc.config.device import device_of
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.records.rollout_files import keeps_means
from flowgrpo_rc.rollout.faster_dtype import AUTO, faster_dtype


def settled(config: Config, device: torch.device | None = None) -> Config:
    """Returns the settings with a value where they leave one open.

    `rollout.dtype=auto` becomes the precision that samples faster on this machine, and
    `algorithm.rollout_correction.centered=null` becomes true for images whose rollout records its
    means. A run that goes on in `trainer.output_dir` keeps what it has.

    Args:
      config: the settings.
      device: that samples; None for that of this machine.

    Raises:
      ValueError: there is no such engine.
    """
    correction = config.algorithm.rollout_correction
    if config.rollout.dtype != AUTO and correction.centered is not None:
        return config
    earlier = config_of_run(config)
    if config.rollout.dtype == AUTO:
        dtype = earlier.rollout.dtype if earlier else faster_dtype(device or device_of(config))
        config = replace(config, rollout=replace(config.rollout, dtype=dtype))
    if correction.centered is None:
        centered = earlier.algorithm.rollout_correction.centered if earlier else _has_means(config)
        correction = replace(correction, centered=centered)
        config = replace(config, algorithm=replace(config.algorithm, rollout_correction=correction))
    return config


def _has_means(config: Config) -> bool:
    """Returns whether the rollout's steps come with their means, if they are asked for."""
    if config.model.kind == "causal_lm" or config.knows_no_log_probs():
        return False
    if config.data.replay_dir is not None:
        return keeps_means(Path(config.data.replay_dir).expanduser())
    return engine_class(config).records_means
