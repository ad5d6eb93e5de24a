"""The optimizer of the LoRA and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowgrpo_rc.training.config import OptimConfig

SMALLEST_8BIT = 4096  # torchao keeps the moments of smaller tensors in fp32


def check_optimizer(parameters: Sequence[nn.Parameter], config: OptimConfig) -> None:
    """Raises ValueError if moments of 8 bits would change nothing."""
    if config.name != "adamw_8bit":
        return
    largest = max(parameter.numel() for parameter in parameters)
    if largest < SMALLEST_8BIT:
        raise ValueError(
            f"actor.optim.name=adamw_8bit has no effect: the largest LoRA tensor has {largest} "
            f"numbers, and moments of fewer than {SMALLEST_8BIT} stay in fp32. Raise "
            "model.lora_rank or use actor.optim.name=adamw"
        )


def make_optimizer(parameters: Sequence[nn.Parameter], config: OptimConfig) -> Optimizer:
    """Makes AdamW over `parameters`. Raises ValueError if 8 bits would change nothing."""
    check_optimizer(parameters, config)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.betas[0], config.betas[1]),
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw":
        # On a GPU torch takes many tensors at once by itself, and on a CPU only if it is told to.
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        return torch.optim.AdamW(parameters, fused=True if on_cpu else None, **options)
    from torchao.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(parameters, **options)
    for group in optimizer.param_groups:
        # torchao sets an fp32 tensor, in whose precision the schedule would compute.
        group["initial_lr"] = config.lr
    return optimizer


def make_schedule(optimizer: Optimizer, config: OptimConfig, total_updates: int) -> LRScheduler:
    """Makes the learning-rate schedule of a run with `total_updates` optimizer updates."""
    warm = config.lr_scheduler == "constant" and config.lr_warmup_steps > 0
    schedule: LRScheduler = get_scheduler(
        "constant_with_warmup" if warm else config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=total_updates,
    )
    return schedule
