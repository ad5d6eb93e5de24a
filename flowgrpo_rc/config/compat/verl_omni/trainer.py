"""verl-omni's keys of the algorithm and of the run itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.config.compat.rules import (
    Outcome,
    Rule,
    Setting,
    Written,
    each,
    reported,
    stops,
    to,
)
from flowgrpo_rc.config.compat.verl_omni.keys import LAUNCHER, LOGGING

# Loggers of verl that this project does not have.
_THEIRS = ("vemlp_wandb", "clearml", "file")
_NFT = reported("belongs to DiffusionNFT")


def _epochs(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if given.get("trainer.total_training_steps") is not None:
        return Outcome(why="trainer.total_training_steps decides, there the smaller of the two")
    return Outcome(
        why="set trainer.total_training_steps: epochs x prompts // data.train_batch_size",
        stops=True,
    )


def _total_steps(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None:
        return Outcome(why="set trainer.total_training_steps to a number", stops=True)
    return Outcome({"trainer.total_training_steps": Written(setting.text)})


def _save_freq(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """In verl-omni -1 means never; here 0 means only at the end, where the LoRA is exported."""
    if isinstance(setting.value, int) and setting.value < 0:
        return Outcome({setting.key: 0})
    return Outcome({setting.key: Written(setting.text)})


def _loggers(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """Takes a single name, too, and drops loggers that have no counterpart."""
    is_list = isinstance(setting.value, list)
    asked = setting.value if is_list else [setting.value]
    dropped = [name for name in asked if name in _THEIRS]
    known = [name for name in asked if name not in dropped]
    if not dropped:
        return Outcome({"trainer.logger": Written(setting.text) if is_list else known})
    return Outcome(
        {"trainer.logger": known},
        f"there is no {', '.join(dropped)}; metrics.jsonl is always written",
    )


def _checkpoints_kept(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None:
        return Outcome(why="all are kept there; here trainer.max_checkpoints_to_keep")
    return Outcome({"trainer.max_checkpoints_to_keep": Written(setting.text)})


ALGORITHM_RULES: dict[str, Rule] = {
    "algorithm.trainer_type": stops(
        "policy gradients are the only kind", unless=["policy_gradient"]
    ),
    "algorithm.sample_source": stops("set data.replay_dir", unless=["online"]),
    "algorithm.paired_preference": stops("there are no pairs", unless=[False]),
    "algorithm.adv_estimator": to("algorithm.adv_estimator", {"dance_grpo": "flow_grpo"}),
    "distillation": stops("there is no distillation"),
    "distillation.enabled": stops("there is no distillation", unless=[False]),
    "distillation.teacher_models": reported("belongs to distillation.enabled"),
    "algorithm.bypass_mode": to("algorithm.rollout_correction.bypass_mode"),
    **each(
        "algorithm",
        "old_policy_decay_schedule old_policy_decay old_policy_update_interval timestep_fraction "
        "adv_mode",
        _NFT,
    ),
}

TRAINER_RULES: dict[str, Rule] = {
    "trainer.total_epochs": _epochs,
    "trainer.total_training_steps": _total_steps,
    "trainer.logger": _loggers,
    "trainer.save_freq": _save_freq,
    "trainer.default_local_dir": to("trainer.output_dir"),
    "trainer.max_actor_ckpt_to_keep": _checkpoints_kept,
    "trainer.resume_from_path": stops("set trainer.output_dir to the run's folder", unless=[None]),
    "trainer.val_only": stops("use the command flowgrpo-rc evaluate", unless=[False]),
    "trainer.v1": reported("belongs to trainer_mode=separate_async"),
    "trainer.v1.trainer_mode": stops("set rollout.staleness", unless=["sync"]),
    "trainer.use_v1": reported("there is one trainer"),
    **each(
        "trainer",
        "nnodes n_gpus_per_node ray_wait_register_center_timeout ray_master_port_range",
        LAUNCHER,
    ),
    **each(
        "trainer",
        "log_val_generations rollout_data_dir validation_data_dir video_fps rollout_data_save_freq "
        "rollout_data_max_samples validation_data_max_samples",
        LOGGING,
    ),
    **each("trainer", "esi_redundant_time", reported("trainer.max_time ends a run in time")),
    **each(
        "trainer",
        "default_hdfs_dir del_local_ckpt_after_load",
        reported("checkpoints stay in trainer.output_dir"),
    ),
    "ray_kwargs": LAUNCHER,
    "transfer_queue": LAUNCHER,
    "global_profiler": LOGGING,
    "skip": reported("trainer.save_rollouts and data.replay_dir"),
}
