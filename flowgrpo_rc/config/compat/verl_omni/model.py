"""verl-omni's keys of the model."""

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
    same,
    stops,
    to,
)
from flowgrpo_rc.config.compat.verl_omni.keys import ADAPTER, LOADING, MODEL, SHARDING

# Losses that both have, under the same names.
_LOSSES = ("flow_grpo", "grpo_guard", "flow_dppo")


def _lora_rank(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if same(setting.value, 0):
        return Outcome(
            why="all weights are trained there, a LoRA here: set model.lora_rank", stops=True
        )
    return Outcome({"model.lora_rank": Written(setting.text)})


def _target_modules(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None or isinstance(setting.value, list):
        return Outcome({"model.target_modules": Written(setting.text)})
    return Outcome(
        why="set model.target_modules to a list of layer names; null: the adapter's own", stops=True
    )


def _tokenizer_path(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    own = given.get(f"{MODEL}.path", given.get("model.path"))
    if setting.value is None or str(setting.value).startswith(f"{own}/"):
        return Outcome(why=AS_HERE)
    return Outcome(
        why="the checkpoint's own tokenizers are used: put the other one into its folder",
        stops=True,
    )


MODEL_RULES: dict[str, Rule] = {
    f"{MODEL}.algorithm": stops("set actor.diffusion_loss and algorithm for it", unless=_LOSSES),
    f"{MODEL}.tokenizer_path": _tokenizer_path,
    f"{MODEL}.custom_chat_template": stops(
        "here a prompt is the text of its user messages, in the pipeline's own template",
        unless=[None],
    ),
    f"{MODEL}.extra_tokenizers": reported(
        "the pipeline's own tokenizers; rollout.pipeline.max_sequence_length"
    ),
    f"{MODEL}.trust_remote_code": stops("remote code is never run", unless=[False]),
    f"{MODEL}.external_lib": reported(ADAPTER),
    f"{MODEL}.enable_gradient_checkpointing": to("model.gradient_checkpointing"),
    f"{MODEL}.config_path": stops("the configuration in the checkpoint is used", unless=[None]),
    f"{MODEL}.transformer_subfolder": stops(
        "the pipeline's transformer is trained", unless=["transformer"]
    ),
    f"{MODEL}.lora_rank": _lora_rank,
    f"{MODEL}.lora_init_weights": to("model.lora_init", {True: "default"}),
    f"{MODEL}.lora_adapter_path": to("model.lora_path"),
    f"{MODEL}.target_modules": _target_modules,
    f"{MODEL}.target_parameters": stops("name layers in model.target_modules", unless=[None]),
    f"{MODEL}.exclude_modules": stops(
        "name the remaining layers in model.target_modules", unless=[None]
    ),
    f"{MODEL}.policy_state_adapters": stops("there is one LoRA", unless=[["default"]]),
    f"{MODEL}.lora_dtype": stops("LoRA weights are always fp32", unless=[None, "fp32", "float32"]),
    f"{MODEL}.model_type": stops("set model.kind", unless=["diffusion_model"]),
    f"{MODEL}.pipeline": stops("there it follows rollout.pipeline: set that"),
    f"{MODEL}.algo": stops("there it follows rollout.algo: set that"),
    f"{MODEL}.mtp": reported("no language model"),
    f"{MODEL}.fsdp_layer_prefixes": SHARDING,
    **each(MODEL, "use_shm", LOADING),
    **each(MODEL, "attn_backend", reported("attention kernels: those of torch")),
}
