"""Settings that a run decides itself where they are left open."""

from dataclasses import replace
from pathlib import Path

import torch

from flowgrpo_rc.config.check_engine import engine_class
from flowgrpo_rc.config.check_folder import config_of_run
from flowgrpo_rc.config.machine import device_of
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.records.rollout_files import keeps_means
from flowgrpo_rc.rewards.manager import settled_rewards
from flowgrpo_rc.rollout.devices import AUTO, faster_dtype


def settled(config: Config, device: torch.device | None = None) -> Config:
    """Returns the settings with a value where they leave one open.

    These are the engine of OCR, `rollout.dtype`, by this machine or `device`, `rollout.merge_lora`,
    `centered`, and a clip that has no mismatch to follow; their keys say what they become.

    A run that goes on in `trainer.output_dir` keeps what it has, but for merged weights where they
    are sharded now.
    """
    config = config.with_fixed_clip()
    earlier = config_of_run(config)
    reward = settled_rewards(config.reward, earlier.reward if earlier else None)
    config = replace(config, reward=reward)
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    if rollout.dtype != AUTO and None not in (rollout.merge_lora, correction.centered):
        return config
    if rollout.dtype == AUTO:
        dtype = earlier.rollout.dtype if earlier else faster_dtype(device or device_of(config))
        rollout = replace(rollout, dtype=dtype)
    if rollout.merge_lora is None:
        sharded = resolve_strategy(config.trainer.strategy) == "fsdp2"
        wanted = earlier.rollout.merge_lora if earlier else _merges_at_no_loss(config)
        rollout = replace(rollout, merge_lora=False if sharded and wanted is True else wanted)
    if correction.centered is None:
        centered = earlier.algorithm.rollout_correction.centered if earlier else _has_means(config)
        correction = replace(correction, centered=centered)
    algorithm = replace(config.algorithm, rollout_correction=correction)
    return replace(config, rollout=rollout, algorithm=algorithm)


def _merges_at_no_loss(config: Config) -> bool:
    """Returns whether the LoRA may be added to the sampling weights, if they are whole.

    Not where the weights are exact and the sum would be rounded to bf16, or where a replay has to
    give the rollout's very bits.
    """
    return (
        engine_class(config).merges_lora
        and config.rollout.quantization is config.model.quantization is None
        and config.model.dtype != "bf16"
        and config.model.offload_idle != "layers"
        and config.actor.replay != "aligned"
    )


def _has_means(config: Config) -> bool:
    """Returns whether the rollout's steps come with their means, if they are asked for."""
    if config.model.kind == "causal_lm" or config.knows_no_log_probs():
        return False
    if config.data.replay_dir is not None:
        return keeps_means(Path(config.data.replay_dir).expanduser())
    return engine_class(config).records_means
