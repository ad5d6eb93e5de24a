"""verl-omni's keys of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

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
from flowgrpo_rc.config.compat.verl_omni.loss import ALGORITHMS, gives_loss, loss_outcome

# A chat of a system and a user's message, for looking at what a template makes of it.
_CHAT = (("system", "the system's text"), ("user", "the user's text"))


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


def _algorithm(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """verl-omni's algorithm is a sampler, and the loss if that is not given."""
    if setting.value not in ALGORITHMS:
        return Outcome(why="set actor.diffusion_loss and algorithm for it", stops=True)
    if gives_loss(given):
        return Outcome(why="actor.diffusion_loss.loss_mode decides")
    return loss_outcome(ALGORITHMS[setting.value])


def _chat_template(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """Here a prompt is the text of its user messages; a template may say just that."""
    if setting.value is None or _rendered(str(setting.value)) == dict(_CHAT)["user"]:
        return Outcome(why="as here: the user's text alone")
    return Outcome(
        why="here a prompt is the text of its user messages, in the pipeline's own template",
        stops=True,
    )


def _rendered(template: str) -> str | None:
    """Returns what a chat template makes of the chat; None if it cannot be rendered."""
    messages = [{"role": role, "content": content} for role, content in _CHAT]
    try:
        return SandboxedEnvironment().from_string(template).render(messages=messages)
    except Exception:  # a template is foreign code
        return None


def _tokenizer_path(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    own = given.get(f"{MODEL}.path", given.get("model.path"))
    if setting.value is None or str(setting.value).startswith(f"{own}/"):
        return Outcome(why=AS_HERE)
    return Outcome(
        why="the checkpoint's own tokenizers are used: put the other one into its folder",
        stops=True,
    )


MODEL_RULES: dict[str, Rule] = {
    f"{MODEL}.algorithm": _algorithm,
    f"{MODEL}.architecture": stops(ADAPTER, unless=[None]),
    f"{MODEL}.tokenizer_path": _tokenizer_path,
    f"{MODEL}.custom_chat_template": _chat_template,
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
