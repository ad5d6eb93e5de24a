"""Names and places of shipped files, for whoever needs no more than these."""

from pathlib import Path

DEFAULT_CONFIG = "tiny_ocr"
# What a whole command line of verl-omni leaves unsaid is that system's default.
OTHER_CONFIG = "verl_omni"
# The folder of whole configurations, each chosen by `+experiment=NAME`.
EXPERIMENT = "experiment"
# What `plan --fit` without a number asks for.
RATE = 400.0  # TFLOP that a card does in a second, assumed; the best of an H100 in bf16 is 990
CARD = "card"
# The environment variable with the token that clients of a served reward send.
TOKEN_ENV = "FLOWGRPO_REWARD_TOKEN"
# All keys, a line each; written by docs/reference_pages.py.
KEYS = Path(__file__).with_name("keys.txt")
# Settings, what flow_grpo, TRL, diffusers and others call them, and what a value means here.
PEERS = {
    "actor.diffusion_loss.beta": "mix_beta",
    "actor.diffusion_loss.clip_ratio": "clip_range",
    "actor.use_kl_loss=true actor.kl_loss_coef": "beta kl_coef",
    "actor.optim.betas": "adam_beta1 adam_beta2",
    "actor.optim.clip_grad": "max_grad_norm",
    "actor.optim.lr": "learning_rate lr",
    "actor.optim.name": "use_8bit_adam (adamw_8bit)",
    "actor.optim.weight_decay": "adam_weight_decay",
    "actor.ppo_epochs": "num_iterations num_inner_epochs",
    "actor.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size train.batch_size "
    "train_batch_size (samples of a forward)",
    "actor.ppo_mini_batch_size": "gradient_accumulation_steps (prompts of an update, of all "
    "processes)",
    "actor.token_loss.clip_ratio_c": "delta (null for none)",
    "actor.token_loss.clip_ratio_high": "epsilon_high",
    "actor.token_loss.clip_ratio_low": "epsilon",
    "actor.token_loss.loss_agg_mode": "loss_type (token-mean for dapo)",
    "actor.token_loss.loss_mode": "importance_sampling_level (gspo for sequence)",
    "algorithm.adv_estimator": "global_std scale_rewards (grpo, flow_grpo or dr_grpo)",
    "algorithm.rollout_correction.rollout_is": "vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode (token or sequence, with a rollout_is_mode)",
    "algorithm.rollout_correction.rollout_is_threshold": "vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_clip_min (one number or lower_upper)",
    "data.train_batch_size": "batch_size generation_batch_size num_batches_per_epoch "
    "train_batch_size (prompts, each sampled rollout.n times)",
    "data.train_files": "data dataset_name instance_prompt prompts",
    "data.val_files": "validation_prompt",
    "model.dtype": "mixed_precision (of the frozen weights)",
    "model.lora_rank": "lora_rank rank",
    "model.path": "model pretrained_model_name_or_path",
    "model.target_modules": "lora_layers",
    "reward.terms.NAME.weight": "reward_fn reward_funcs reward_weights",
    "rollout.engine_kwargs.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.n": "num_generations num_image_per_prompt num_images_per_prompt",
    "rollout.name": "use_vllm (vllm_engine)",
    "rollout.pipeline.height": "resolution (and rollout.pipeline.width)",
    "rollout.pipeline.num_inference_steps": "num_steps",
    "rollout.response_length": "max_completion_length",
    "rollout.val_kwargs.n": "num_validation_images",
    "rollout.val_kwargs.num_inference_steps": "eval_num_steps",
    "trainer.device": "device",
    "trainer.logger": "report_to",
    "trainer.max_checkpoints_to_keep": "checkpoints_total_limit",
    "trainer.mixed_precision": "mixed_precision (of the training forward)",
    "trainer.num_processes": "num_processes",
    "trainer.output_dir": "out output_dir",
    "trainer.push_to_hub": "hub_model_id",
    "trainer.save_freq": "checkpointing_steps",
    "trainer.seed": "seed",
    "trainer.test_freq": "validation_epochs",
    "trainer.tf32": "allow_tf32",
    "trainer.total_training_steps": "epochs max_steps max_train_steps num_epochs num_train_epochs "
    "steps",
}


def own_key(name: str) -> str | None:
    """Says how to set what another program calls so, in a section or not; None if none does."""
    rows = [(key, *others.partition(" (")) for key, others in PEERS.items()]
    for word in (name, name.rpartition(".")[2]):
        found = [f"{key}=...{sep}{note}" for key, said, sep, note in rows if word in said.split()]
        if found:
            return " or ".join(found)
    return None


def config_folder() -> Path:
    """Returns `configs/`, which is inside the package in a wheel and beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
