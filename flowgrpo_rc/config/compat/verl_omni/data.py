"""verl-omni's keys of the prompts."""

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
from flowgrpo_rc.config.compat.verl_omni.keys import LOADING


def _seed(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None:
        return Outcome(why="a run always has a seed: trainer.seed")
    return Outcome({"trainer.seed": Written(setting.text)})


DATA_RULES: dict[str, Rule] = {
    "data.val_max_samples": to("rollout.val_kwargs.n", {-1: None}),
    "data.train_max_samples": stops("give a file with fewer prompts", unless=[-1, None]),
    "data.seed": _seed,
    "data.shuffle": stops("prompts are always shuffled", unless=[True]),
    "data.prompt_key": stops("the column is `prompt`", unless=["prompt"]),
    "data.negative_prompt_key": stops(
        "the column is `negative_prompt`", unless=["negative_prompt"]
    ),
    "data.filter_overlong_prompts": stops(
        "long texts are cut, as in the stock pipeline", unless=[False]
    ),
    "data.truncation": stops("long texts are cut on the right", unless=["error", "right"]),
    "data.custom_cls": stops("datasets are files: write the prompts to .jsonl", unless=[None]),
    "data.datagen": stops("datasets are files", unless=[None]),
    "data.sampler": stops("prompts come in a seeded permutation", unless=[None]),
    "data.apply_chat_template_kwargs": stops(
        "the pipeline's own template and lengths are used", unless=[{}]
    ),
    "data.tokenizer": stops("the checkpoint's own tokenizers are used", unless=[None]),
    "data.trust_remote_code": stops("remote code is never run", unless=[False]),
    "data.tool_config_path": stops("there are no tools", unless=[None]),
    **each("data", "max_prompt_length", reported("images: rollout.pipeline.max_sequence_length")),
    **each("data", "max_response_length", reported("images have no response length")),
    **each(
        "data",
        "use_shm val_batch_size return_raw_input_ids return_raw_chat return_full_prompt "
        "dataloader_num_workers image_patch_size validation_shuffle "
        "filter_overlong_prompts_workers image_key video_key reward_fn_key "
        "return_multi_modal_inputs data_source",
        LOADING,
    ),
}
