"""Names and places of shipped files, for whoever needs no more than these."""

from __future__ import annotations

from pathlib import Path

DEFAULT_CONFIG = "tiny_ocr"
# What a whole command line of verl-omni leaves unsaid is that system's default.
OTHER_CONFIG = "verl_omni"
# The folder of whole configurations, each chosen by `+experiment=NAME`.
EXPERIMENT = "experiment"
# The environment variable with the token that clients of a served reward send.
TOKEN_ENV = "FLOWGRPO_REWARD_TOKEN"
# All keys, a line each; written by docs/reference_pages.py.
KEYS = Path(__file__).with_name("keys.txt")
# Settings, and what flow_grpo, TRL, diffusers and other programs call them.
PEERS = {
    "actor.diffusion_loss.clip_ratio": "clip_range",
    "actor.use_kl_loss=true actor.kl_loss_coef": "beta kl_coef",
    "actor.optim.clip_grad": "max_grad_norm",
    "actor.optim.lr": "learning_rate lr",
    "actor.ppo_epochs": "num_iterations num_inner_epochs",
    "actor.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size train.batch_size",
    "actor.ppo_mini_batch_size": "gradient_accumulation_steps",
    "data.train_batch_size": "batch_size",
    "data.train_files": "data prompts",
    "model.lora_rank": "lora_rank rank",
    "model.path": "model pretrained_model_name_or_path",
    "rollout.n": "num_generations num_image_per_prompt num_images_per_prompt",
    "rollout.pipeline.height": "resolution",
    "rollout.pipeline.num_inference_steps": "num_steps",
    "rollout.response_length": "max_completion_length",
    "rollout.val_kwargs.num_inference_steps": "eval_num_steps",
    "trainer.device": "device",
    "trainer.num_processes": "num_processes",
    "trainer.output_dir": "out output_dir",
    "trainer.seed": "seed",
    "trainer.total_training_steps": "epochs max_steps max_train_steps num_epochs steps",
}


def own_key(name: str) -> str | None:
    """Returns the setting that another program calls so, in a section or not; None if none does."""
    for word in (name, name.rpartition(".")[2]):
        for key, others in PEERS.items():
            if word in others.split():
                return key
    return None


def config_folder() -> Path:
    """Returns `configs/`, which is inside the package in a wheel and beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
