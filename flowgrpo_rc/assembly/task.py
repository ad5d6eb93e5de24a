"""Loads the model and wraps it with its LoRA in what the trainer asks for."""

from datetime import timedelta

import torch
from torch import nn

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.sharding import resolve_strategy, shard_frozen_weights
from flowgrpo_rc.models.base import FlowModel, load_model
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rewards.manager import needs_samples
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.training.first_pass import make_prompt_cache
from flowgrpo_rc.training.tasks.image import ImageTask
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.tasks.text import TextTask


def load(config: ModelConfig, device: torch.device) -> CausalLM | FlowModel:
    """Loads the model of either kind, without its LoRA."""
    if config.kind == "causal_lm":
        return load_causal_lm(config, device)
    return load_model(config, device)


def make_task(spec: RunSpec, processes: Processes) -> Task:
    """Loads the model, puts its LoRA on, and wraps both in what the trainer asks for."""
    config = spec.config
    checkpointing, seed = config.model.gradient_checkpointing, config.trainer.seed
    rollout, tf32 = config.rollout, config.trainer.tf32
    autocast = processes.accelerator.autocast
    with processes.in_turn():
        model = load(config.model, processes.device)
    network = add_lora(model, config.model, seed)
    if isinstance(model, CausalLM):
        tokens = TokenPolicy(model, network, autocast=autocast, checkpoint_gradients=checkpointing)
        return TextTask(model, tokens, rollout, tf32=tf32)
    if config.model.prompt_cache is not None:
        model.prompt_cache = make_prompt_cache(
            config.model, model, processes.device, tf32=config.trainer.tf32
        )
    if checkpointing:
        for part in transformers(network).values():
            part.enable_gradient_checkpointing()
    policy = FlowPolicy(
        model, network, autocast=autocast, steps_per_forward=config.actor.steps_per_forward
    )
    return ImageTask(
        model,
        policy,
        rollout,
        seed,
        keep_means=spec.keeps_means,
        decode=needs_samples(spec.rewards),
        seeded=config.data.replay_dir is None and spec.engine_class.draws_seed_noise,
        tf32=tf32,
    )


def shard(config: Config, network: nn.Module, processes: Processes) -> None:
    """Spreads the frozen weights over the processes, if `trainer.strategy` asks for it."""
    strategy = resolve_strategy(config.trainer.strategy)
    if processes.count > 1 and strategy == "fsdp2":
        timeout = timedelta(seconds=config.trainer.timeout_s)
        shard_frozen_weights(transformers(network).values(), processes.device, timeout)
