"""verl-omni's keys of the actor: optimizer, sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.config.compat.rules import (
    AS_HERE,
    Outcome,
    Rule,
    Setting,
    Written,
    each,
    reported,
    stops,
    to,
)
from flowgrpo_rc.config.compat.verl_omni.keys import (
    ACTOR,
    DTYPES,
    LAUNCHER,
    LOGGING,
    PREFIX,
    SHARDING,
)


def _warmup_steps(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """verl-omni counts training steps; here optimizer updates are counted."""
    if setting.value is None or setting.value <= 0:
        return Outcome(why="no warm-up by a number of steps")
    return Outcome(
        {"actor.optim.lr_warmup_steps": Written(f"${{updates_of_steps:{setting.value}}}")}
    )


def _warmup_ratio(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """verl-omni uses the ratio only if the number of steps is not given."""
    steps = given.get(f"{ACTOR}.optim.lr_warmup_steps")
    if not setting.value or (steps is not None and steps > 0):
        return Outcome(why="no warm-up by a ratio")
    return Outcome(
        {"actor.optim.lr_warmup_steps": Written(f"${{updates_of_ratio:{setting.value}}}")}
    )


ACTOR_RULES: dict[str, Rule] = {
    f"{ACTOR}.strategy": to("trainer.strategy", {"fsdp": "fsdp2"}),
    f"{ACTOR}.rollout_n": to("rollout.n"),
    f"{ACTOR}.loss_scale_factor": stops("set actor.optim.lr", unless=[None]),
    f"{ACTOR}.use_distill_loss": stops("there is no distillation", unless=[False]),
    **each(ACTOR, "distill_loss_mode distill_loss_coef", reported("belongs to use_distill_loss")),
    f"{ACTOR}.shuffle": stops("mini-batches keep the order of the step's prompts", unless=[False]),
    f"{ACTOR}.data_loader_seed": reported("belongs to shuffle"),
    f"{ACTOR}.grad_clip": to("actor.optim.clip_grad"),
    f"{ACTOR}.checkpoint": reported("checkpoints hold LoRA, optimizer, average and state"),
    **each(ACTOR, "enable_timestep_staging use_torch_compile", SHARDING),
    f"{ACTOR}.profiler": LOGGING,
    f"{ACTOR}.fsdp_config.model_dtype": to("model.dtype", DTYPES),
    f"{ACTOR}.fsdp_config.dtype": to(
        "trainer.mixed_precision", {"bfloat16": "bf16", "float32": "no"}
    ),
    f"{ACTOR}.fsdp_config.wrap_policy": SHARDING,
    **each(
        f"{ACTOR}.fsdp_config",
        "param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size "
        "forward_prefetch forward_only use_orig_params strategy ulysses_sequence_parallel_size "
        "seed full_determinism",
        SHARDING,
    ),
    f"{ACTOR}.optim.optimizer": stops("set actor.optim.name", unless=["AdamW"]),
    f"{ACTOR}.optim.optimizer_impl": stops("set actor.optim.name", unless=["torch.optim"]),
    f"{ACTOR}.optim.override_optimizer_config": stops("set actor.optim", unless=[None]),
    f"{ACTOR}.optim.lr_scheduler_type": to("actor.optim.lr_scheduler"),
    f"{ACTOR}.optim.warmup_style": lambda setting, given: (
        Outcome(why=AS_HERE)
        if setting.value is None
        else Outcome({"actor.optim.lr_scheduler": Written(setting.text)})
    ),
    f"{ACTOR}.optim.lr_warmup_steps": _warmup_steps,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": _warmup_ratio,
    f"{ACTOR}.optim.min_lr_ratio": stops("the schedules end at 0", unless=[None, 0]),
    f"{ACTOR}.optim.num_cycles": stops("cosine is half a period", unless=[0.5]),
    **each(
        f"{ACTOR}.optim", "total_training_steps zero_indexed_step", reported("follows from the run")
    ),
    f"{PREFIX}ref": reported("the reference is the model with the LoRA switched off"),
    f"{PREFIX}teacher": reported("belongs to use_distill_loss"),
    **each(PREFIX.rstrip("."), "hybrid_engine nccl_timeout", LAUNCHER),
}
