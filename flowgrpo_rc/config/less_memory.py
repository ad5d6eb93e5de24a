"""The settings with which a run that has run out of memory is tried again."""

from __future__ import annotations

from dataclasses import replace

from flowgrpo_rc.config.check_engine import chunk_size
from flowgrpo_rc.config.tree import Config


def with_less_memory(config: Config, phase: str) -> tuple[Config, str] | None:
    """Returns the settings with half of the micro-batch that a phase uses, and the change in words.

    Both train the same up to rounding, so a run may go on with them.

    Returns:
      None if the phase has no micro-batch, or one of odd size.
    """
    if phase in ("update", "old_log_prob"):
        size = config.actor.ppo_micro_batch_size_per_gpu
        actor = replace(config.actor, ppo_micro_batch_size_per_gpu=size // 2)
        smaller = replace(config, actor=actor)
        key = "actor.ppo_micro_batch_size_per_gpu"
    elif phase == "rollout":
        size = chunk_size(config)
        rollout = replace(config.rollout, micro_batch_size_per_gpu=size // 2)
        smaller = replace(config, rollout=rollout)
        key = "rollout.micro_batch_size_per_gpu"
    else:
        return None
    trainer = replace(config.trainer, resume_mode="auto")  # this command's own run goes on
    smaller = replace(smaller, trainer=trainer)
    return None if size % 2 else (smaller, f"{key}={size // 2} in place of {size}")
