"""verl-omni's keys of the rollout: sizes, engine, sampler, evaluation."""

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
from flowgrpo_rc.config.compat.verl_omni.keys import ADAPTER, DTYPES, LAUNCHER, ROLLOUT, WHOLE

_ENGINE = reported(
    "how the engine runs: rollout.engine_kwargs and rollout.micro_batch_size_per_gpu"
)
_QUANTIZATION = (
    "set rollout.engine_kwargs.quantization (vllm_omni) or rollout.quantization (diffusers)"
)
_HELD_OUT = reported("held-out images are made by the ODE, in the size of the rollout's")


def _group_size(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if same(setting.value, 1):
        return Outcome(why="a group needs at least 2 samples: set rollout.n", stops=True)
    return Outcome({"rollout.n": Written(setting.text)})


def _sde_type(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """verl-omni's log-probability of cps lacks 1 / (2 s^2); clip_ratio and bands have its units."""
    if setting.value != "cps":
        return Outcome({"rollout.algo.sde_type": Written(setting.text)})
    return Outcome(
        {"rollout.algo.sde_type": "cps", "rollout.algo.log_prob_convention": "peers"},
        "clip_ratio keeps its units",
    )


def _window_range(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """Without a size verl-omni trains every step but the last and ignores the range."""
    names = (
        f"{ROLLOUT}.algo.sde_window_size",
        f"{ROLLOUT}.sde_window_size",
        "rollout.algo.sde_window_size",
    )
    sizes = [given[name] for name in names if name in given] or (
        [None] if all(key in given for key in WHOLE) else [0]
    )
    if None in sizes:
        return Outcome(why="has no effect there without rollout.algo.sde_window_size")
    return Outcome({"rollout.algo.sde_window_range": Written(setting.text)})


def _tensor_parallel(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if same(setting.value, 1):
        return Outcome(why=AS_HERE)
    return Outcome({"rollout.engine_kwargs.tensor_parallel_size": Written(setting.text)})


ROLLOUT_RULES: dict[str, Rule] = {
    f"{ROLLOUT}.n": _group_size,
    f"{ROLLOUT}.dtype": to("rollout.dtype", DTYPES),
    f"{ROLLOUT}.prompt_length": reported(
        "the length of images' prompts is rollout.pipeline.max_sequence_length"
    ),
    f"{ROLLOUT}.seed": reported("noise follows from trainer.seed"),
    f"{ROLLOUT}.quantization": stops(_QUANTIZATION, unless=[None]),
    f"{ROLLOUT}.rollout_adapter": stops("there is one LoRA", unless=["default"]),
    f"{ROLLOUT}.external_lib": reported(ADAPTER),
    f"{ROLLOUT}.multi_turn": reported("belongs to multi_turn.enable"),
    f"{ROLLOUT}.multi_turn.enable": stops("images have one turn", unless=[False]),
    **each(ROLLOUT, "nnodes n_gpus_per_node", LAUNCHER),
    **each(
        ROLLOUT,
        "mode rollout_attn_backend gpu_memory_utilization enforce_eager cudagraph_capture_sizes "
        "free_cache_engine data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_model_len max_num_seqs max_prompt_embed_length step_execution "
        "enable_chunked_prefill enable_prefix_caching logprobs_mode scheduling_policy load_format "
        "layered_summon disable_log_stats skip_tokenizer_init enable_rollout_routing_replay agent "
        "checkpoint_engine prometheus mtp disaggregation profiler server_routing",
        _ENGINE,
    ),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": reported(
        "recomputed in actor.ppo_micro_batch_size_per_gpu"
    ),
    f"{ROLLOUT}.engine_kwargs.vllm_omni": _ENGINE,
    **each(
        f"{ROLLOUT}.engine_kwargs.vllm_omni",
        "quantization quantization_config",
        stops(_QUANTIZATION, unless=[None]),
    ),
    f"{ROLLOUT}.engine_kwargs.vllm_omni.dtype": stops("set rollout.dtype", unless=[None]),
    f"{ROLLOUT}.tensor_model_parallel_size": _tensor_parallel,
    f"{ROLLOUT}.pipeline.guidance_scale": to("rollout.pipeline.guidance_scale", {None: 1.0}),
    f"{ROLLOUT}.pipeline.num_frames": to("rollout.pipeline.num_frames", {1: None}),
    f"{ROLLOUT}.pipeline.frame_rate": stops("videos have their model's rate", unless=[24.0]),
    f"{ROLLOUT}.pipeline.video_flow_shift": stops(
        "the shift is that of the checkpoint's scheduler", unless=[12.0]
    ),
    f"{ROLLOUT}.pipeline.aspect_ratio": stops("set rollout.pipeline.height, width", unless=[None]),
    f"{ROLLOUT}.pipeline.output_type": stops("rewards say whether they score latents"),
    **each(
        ROLLOUT,
        "top_k top_p repetition_penalty max_new_tokens llm_calculate_log_probs",
        reported("belongs to text that a pipeline writes before the image"),
    ),
    f"{ROLLOUT}.algo.sde_contiguous": stops("a window is contiguous", unless=[True]),
    f"{ROLLOUT}.algo.sde_type": _sde_type,
    f"{ROLLOUT}.algo.sde_window_range": _window_range,
    f"{ROLLOUT}.algo.sample_strategy": stops(
        "windows are drawn anew at every step", unless=["random"]
    ),
    f"{ROLLOUT}.algo.iters_per_group": reported("belongs to sample_strategy=progressive"),
    f"{ROLLOUT}.algo.sde_window_seed": reported("windows follow from trainer.seed"),
    f"{ROLLOUT}.val_kwargs.n": reported("a held-out prompt has one image"),
    f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps": to(
        "rollout.val_kwargs.num_inference_steps"
    ),
    f"{ROLLOUT}.val_kwargs.pipeline.guidance_scale": to(
        "rollout.val_kwargs.guidance_scale", {None: 1.0}
    ),
    f"{ROLLOUT}.val_kwargs.pipeline.true_cfg_scale": to("rollout.val_kwargs.true_cfg_scale"),
    **each(
        f"{ROLLOUT}.val_kwargs.pipeline",
        "height width max_sequence_length num_frames frame_rate video_flow_shift aspect_ratio "
        "output_type",
        _HELD_OUT,
    ),
    **each(
        f"{ROLLOUT}.val_kwargs.algo",
        "noise_level sde_type sde_window_size sde_window_range sde_contiguous",
        _HELD_OUT,
    ),
    # Releases before the sections `pipeline` and `algo`.
    **{
        f"{ROLLOUT}.{name}": to(f"rollout.pipeline.{name}")
        for name in (
            "height",
            "width",
            "num_inference_steps",
            "true_cfg_scale",
            "max_sequence_length",
        )
    },
    f"{ROLLOUT}.guidance_scale": to("rollout.pipeline.guidance_scale", {None: 1.0}),
    f"{ROLLOUT}.sde_type": _sde_type,
    f"{ROLLOUT}.sde_window_range": _window_range,
    **{
        f"{ROLLOUT}.{name}": to(f"rollout.algo.{name}")
        for name in ("noise_level", "sde_window_size")
    },
}
