"""The keys of verl-omni's `diffusion_trainer` configuration
(https://github.com/verl-project/verl-omni, 2026), and what each is here. Keys that are the same but
for `actor_rollout_ref.` need no rule.

A rule for a section holds for all keys below it that have none.
"""

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

PREFIX = "actor_rollout_ref."
MODEL, ACTOR, ROLLOUT = f"{PREFIX}model", f"{PREFIX}actor", f"{PREFIX}rollout"

# Defaults of verl-omni that configs/verl_omni.yaml cannot hold.
UNSAID = {
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.target_modules": "all-linear",
    f"{ROLLOUT}.n": 1,
    "trainer.total_epochs": 30,
}
# A whole command gives both: verl-omni has no default for the second.
WHOLE = (f"{MODEL}.path", f"{ROLLOUT}.name")

# Losses that both have, under the same names.
_LOSSES = ("flow_grpo", "grpo_guard", "flow_dppo")
_LOGGERS = ("mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio", "file")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ENGINE = reported(
    "how the engine runs: rollout.engine_kwargs and rollout.micro_batch_size_per_gpu"
)
_QUANTIZATION = (
    "set rollout.engine_kwargs.quantization (vllm_omni) or rollout.quantization (diffusers)"
)
_LAUNCHER = reported("the launcher decides: accelerate launch --num_processes N (--num_machines M)")
_SHARDING = reported("how weights are sharded and offloaded does not change what is trained")
_LOGGING = reported("logging: metrics.jsonl, samples/ and report.html are always written")
_OTHER_LOSS = reported("belongs to a loss that this project has not")
_HELD_OUT = reported("held-out images are made by the ODE, in the size of the rollout's")
_LOADING = reported("prompt files are read whole, by this project's readers")
_ADAPTER = "adapters are found by the checkpoint's pipeline class"


def _lora_rank(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if same(setting.value, 0):
        return Outcome(
            why="all weights are trained there, a LoRA here: set model.lora_rank", stops=True
        )
    return Outcome({"model.lora_rank": Written(setting.text)})


def _group_size(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if same(setting.value, 1):
        return Outcome(why="a group needs at least 2 samples: set rollout.n", stops=True)
    return Outcome({"rollout.n": Written(setting.text)})


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


def _sde_type(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """The cps log-probability of the peers has no 1 / (2 s^2): clip_ratio and bands are in its
    units.
    """
    if setting.value != "cps":
        return Outcome({"rollout.algo.sde_type": Written(setting.text)})
    return Outcome(
        {"rollout.algo.sde_type": "cps", "rollout.algo.log_prob_convention": "peers"},
        "clip_ratio keeps its units",
    )


def _window_range(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """Without a size every step but the last is trained there, whatever the range."""
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


def _warmup_steps(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """There in training steps, here in optimizer updates."""
    if setting.value is None or setting.value <= 0:
        return Outcome(why="no warm-up by a number of steps")
    return Outcome(
        {"actor.optim.lr_warmup_steps": Written(f"${{updates_of_steps:{setting.value}}}")}
    )


def _warmup_ratio(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """Used there only where the number of steps is not given."""
    steps = given.get(f"{ACTOR}.optim.lr_warmup_steps")
    if not setting.value or (steps is not None and steps > 0):
        return Outcome(why="no warm-up by a ratio")
    return Outcome(
        {"actor.optim.lr_warmup_steps": Written(f"${{updates_of_ratio:{setting.value}}}")}
    )


def _tensor_parallel(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if same(setting.value, 1):
        return Outcome(why=AS_HERE)
    return Outcome({"rollout.engine_kwargs.tensor_parallel_size": Written(setting.text)})


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


def _frequency(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """-1 is never, there; 0 is only at the end, here."""
    if isinstance(setting.value, int) and setting.value < 0:
        return Outcome({setting.key: 0})
    return Outcome({setting.key: Written(setting.text)})


def _loggers(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    asked = setting.value if isinstance(setting.value, list) else [setting.value]
    known = [name for name in asked if name not in _LOGGERS]
    dropped = [name for name in asked if name in _LOGGERS]
    if not dropped:
        return Outcome({"trainer.logger": Written(setting.text)})
    return Outcome(
        {"trainer.logger": known},
        f"there is no {', '.join(dropped)}; metrics.jsonl is always written",
    )


def _is_dppo(given: Mapping[str, Any]) -> bool:
    names = (
        f"{ACTOR}.diffusion_loss.loss_mode",
        "actor.diffusion_loss.loss_mode",
        f"{ACTOR}.policy_loss.loss_mode",
    )
    return any(given.get(name) == "flow_dppo" for name in names)


def _kl_threshold(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if _is_dppo(given):
        return Outcome({"actor.diffusion_loss.kl_threshold": Written(setting.text)})
    return Outcome(why="belongs to loss_mode=flow_dppo")


def _kl_coefficient(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """Whether the variance of a step holds its dt, as it does here."""
    if _is_dppo(given) and not same(setting.value, True):
        return Outcome(
            why="the KL here is that of the step, dt included: set it to true", stops=True
        )
    return Outcome(why=AS_HERE if _is_dppo(given) else "belongs to loss_mode=flow_dppo")


def _reward_workers(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """The name exists on both sides: there it counts processes, here rewards scored at the same
    time.
    """
    if any(key.startswith(PREFIX) for key in given):
        return Outcome(why="reward processes; here a reward is one thread")
    return Outcome({setting.key: Written(setting.text)})


def _seed(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None:
        return Outcome(why="a run always has a seed: trainer.seed")
    return Outcome({"trainer.seed": Written(setting.text)})


def _checkpoints_kept(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None:
        return Outcome(why="all are kept there; here trainer.max_checkpoints_to_keep")
    return Outcome({"trainer.max_checkpoints_to_keep": Written(setting.text)})


_MODEL_RULES: dict[str, Rule] = {
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
    f"{MODEL}.external_lib": reported(_ADAPTER),
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
    f"{MODEL}.fsdp_layer_prefixes": _SHARDING,
    **each(MODEL, "use_shm", _LOADING),
    **each(MODEL, "attn_backend", reported("attention kernels: those of torch")),
}

_ACTOR_RULES: dict[str, Rule] = {
    f"{ACTOR}.strategy": to("trainer.strategy", {"fsdp": "fsdp2"}),
    f"{ACTOR}.rollout_n": to("rollout.n"),
    f"{ACTOR}.policy_loss.loss_mode": to("actor.diffusion_loss.loss_mode"),
    **each(
        f"{ACTOR}.diffusion_loss",
        "mix_beta ref_kl_coef adaptive_weight_min dpo_beta mse_weight ratio_norm",
        _OTHER_LOSS,
    ),
    f"{ACTOR}.diffusion_loss.kl_mask_threshold": _kl_threshold,
    f"{ACTOR}.diffusion_loss.add_kl_coefficient": _kl_coefficient,
    f"{ACTOR}.loss_scale_factor": stops("set actor.optim.lr", unless=[None]),
    f"{ACTOR}.use_distill_loss": stops("there is no distillation", unless=[False]),
    **each(ACTOR, "distill_loss_mode distill_loss_coef", reported("belongs to use_distill_loss")),
    f"{ACTOR}.shuffle": stops("mini-batches keep the order of the step's prompts", unless=[False]),
    f"{ACTOR}.data_loader_seed": reported("belongs to shuffle"),
    f"{ACTOR}.grad_clip": to("actor.optim.clip_grad"),
    f"{ACTOR}.checkpoint": reported("checkpoints hold LoRA, optimizer, average and state"),
    **each(ACTOR, "enable_timestep_staging use_torch_compile", _SHARDING),
    f"{ACTOR}.profiler": _LOGGING,
    f"{ACTOR}.fsdp_config.model_dtype": to("model.dtype", _DTYPES),
    f"{ACTOR}.fsdp_config.dtype": to(
        "trainer.mixed_precision", {"bfloat16": "bf16", "float32": "no"}
    ),
    f"{ACTOR}.fsdp_config.wrap_policy": _SHARDING,
    **each(
        f"{ACTOR}.fsdp_config",
        "param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size "
        "forward_prefetch forward_only "
        "use_orig_params strategy ulysses_sequence_parallel_size seed full_determinism",
        _SHARDING,
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
    **each(PREFIX.rstrip("."), "hybrid_engine nccl_timeout", _LAUNCHER),
}

_ROLLOUT_RULES: dict[str, Rule] = {
    f"{ROLLOUT}.n": _group_size,
    f"{ROLLOUT}.dtype": to("rollout.dtype", _DTYPES),
    f"{ROLLOUT}.prompt_length": reported(
        "the length of images' prompts is rollout.pipeline.max_sequence_length"
    ),
    f"{ROLLOUT}.seed": reported("noise follows from trainer.seed"),
    f"{ROLLOUT}.quantization": stops(_QUANTIZATION, unless=[None]),
    f"{ROLLOUT}.rollout_adapter": stops("there is one LoRA", unless=["default"]),
    f"{ROLLOUT}.external_lib": reported(_ADAPTER),
    f"{ROLLOUT}.multi_turn": reported("belongs to multi_turn.enable"),
    f"{ROLLOUT}.multi_turn.enable": stops("images have one turn", unless=[False]),
    **each(ROLLOUT, "nnodes n_gpus_per_node", _LAUNCHER),
    **each(
        ROLLOUT,
        "mode rollout_attn_backend gpu_memory_utilization enforce_eager cudagraph_capture_sizes "
        "free_cache_engine "
        "data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_model_len max_num_seqs max_prompt_embed_length step_execution "
        "enable_chunked_prefill enable_prefix_caching logprobs_mode scheduling_policy load_format "
        "layered_summon "
        "disable_log_stats skip_tokenizer_init enable_rollout_routing_replay agent "
        "checkpoint_engine prometheus mtp "
        "disaggregation profiler server_routing",
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
        f"{ROLLOUT}.val_kwargs.pipeline", "height width max_sequence_length num_frames", _HELD_OUT
    ),
    **each(
        f"{ROLLOUT}.val_kwargs.algo",
        "noise_level sde_type sde_window_size sde_window_range",
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

_DATA_RULES: dict[str, Rule] = {
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
        "dataloader_num_workers "
        "image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key "
        "reward_fn_key "
        "return_multi_modal_inputs data_source",
        _LOADING,
    ),
}

_REWARD = "rewards are set in reward.terms"
_REWARD_RULES: dict[str, Rule] = {
    "reward.num_workers": _reward_workers,
    "reward.custom_reward_function": reported("belongs to custom_reward_function.path"),
    "reward.custom_reward_function.path": stops(_REWARD, unless=[None]),
    "reward.reward_functions": stops(_REWARD, unless=[{}]),
    "reward.models": stops(_REWARD, unless=[{}]),
    "reward.aggregation": stops("rewards add up by weight", unless=["weighted_sum"]),
    "reward.reward_model": reported("belongs to reward_model.enable"),
    "reward.reward_model.enable": stops(_REWARD, unless=[False]),
    **each(
        "reward",
        "reward_manager reward_kwargs sandbox_fusion accelerator_workers",
        reported(_REWARD),
    ),
}

_NFT = reported("belongs to DiffusionNFT")
_ALGORITHM_RULES: dict[str, Rule] = {
    "algorithm.trainer_type": stops(
        "policy gradients are the only kind", unless=["policy_gradient"]
    ),
    "algorithm.sample_source": stops("set data.replay_dir", unless=["online"]),
    "algorithm.paired_preference": stops("there are no pairs", unless=[False]),
    "algorithm.bypass_mode": to("algorithm.rollout_correction.bypass_mode"),
    **each(
        "algorithm",
        "old_policy_decay_schedule old_policy_decay old_policy_update_interval timestep_fraction "
        "adv_mode",
        _NFT,
    ),
}

_TRAINER_RULES: dict[str, Rule] = {
    "trainer.total_epochs": _epochs,
    "trainer.total_training_steps": _total_steps,
    "trainer.logger": _loggers,
    "trainer.save_freq": _frequency,
    "trainer.test_freq": _frequency,
    "trainer.default_local_dir": to("trainer.output_dir"),
    "trainer.max_actor_ckpt_to_keep": _checkpoints_kept,
    "trainer.device": to("trainer.device", {"cuda": "auto"}),
    "trainer.resume_from_path": stops("set trainer.output_dir to the run's folder", unless=[None]),
    "trainer.val_only": stops("use the command flowgrpo-rc eval", unless=[False]),
    "trainer.val_before_train": reported("a run starts and ends with an evaluation"),
    "trainer.v1": reported("belongs to trainer_mode=separate_async"),
    "trainer.v1.trainer_mode": stops("set rollout.staleness", unless=["sync"]),
    "trainer.use_v1": reported("there is one trainer"),
    **each(
        "trainer",
        "nnodes n_gpus_per_node ray_wait_register_center_timeout ray_master_port_range",
        _LAUNCHER,
    ),
    **each(
        "trainer",
        "log_val_generations rollout_data_dir validation_data_dir video_fps rollout_data_save_freq "
        "rollout_data_max_samples validation_data_max_samples",
        _LOGGING,
    ),
    **each("trainer", "esi_redundant_time", reported("trainer.max_time ends a run in time")),
    **each(
        "trainer",
        "default_hdfs_dir del_local_ckpt_after_load",
        reported("checkpoints stay in trainer.output_dir"),
    ),
    "ray_kwargs": _LAUNCHER,
    "transfer_queue": _LAUNCHER,
    "global_profiler": _LOGGING,
    "skip": reported("trainer.save_rollouts and data.replay_dir"),
}

RULES = (
    _MODEL_RULES
    | _ACTOR_RULES
    | _ROLLOUT_RULES
    | _DATA_RULES
    | _REWARD_RULES
    | _ALGORITHM_RULES
    | _TRAINER_RULES
)
