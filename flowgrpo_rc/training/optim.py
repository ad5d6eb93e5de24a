"""The optimizer of the LoRA and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

OPTIMIZERS = ("adamw", "adamw_8bit")
LR_SCHEDULERS = ("constant", "linear", "cosine", "polynomial")
SMALLEST_8BIT = 4096  # torchao keeps the moments of smaller tensors in fp32


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer of the LoRA.

    name: adamw, or adamw_8bit, whose moments take a byte each (torchao's, arXiv 2110.02861).
    lr: learning rate.
    betas: decay of the two moments.
    eps: AdamW's, against division by zero.
    weight_decay: AdamW's, decoupled.
    clip_grad: largest norm of the gradient.
    lr_scheduler: how the learning rate changes until the end of the run.
    lr_warmup_steps: optimizer updates until it is reached.
    max_nonfinite_updates: the run ends after so many updates in a row whose gradient is not finite
        (each is skipped).
    """

    name: str = "adamw"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 1e-4
    clip_grad: float = 1.0
    lr_scheduler: str = "constant"
    lr_warmup_steps: int = 0
    max_nonfinite_updates: int = 5

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        if self.name not in OPTIMIZERS:
            raise ValueError(f"actor.optim.name={self.name!r}: allowed are {', '.join(OPTIMIZERS)}")
        if self.name == "adamw_8bit" and find_spec("torchao") is None:
            raise ValueError(
                "actor.optim.name=adamw_8bit needs torchao: pip install 'flowgrpo-rc[quantization]'"
            )
        for name in ("lr", "eps", "clip_grad"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"actor.optim.{name}={getattr(self, name)}: give a number above 0")
        if self.weight_decay < 0 or self.lr_warmup_steps < 0:
            raise ValueError(
                "actor.optim.weight_decay and actor.optim.lr_warmup_steps cannot be negative"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"actor.optim.betas={self.betas}: give two numbers from 0 to below 1")
        if self.lr_scheduler not in LR_SCHEDULERS:
            raise ValueError(
                f"actor.optim.lr_scheduler={self.lr_scheduler!r}: allowed are "
                f"{', '.join(LR_SCHEDULERS)}"
            )
        if self.max_nonfinite_updates < 1:
            raise ValueError(
                f"actor.optim.max_nonfinite_updates={self.max_nonfinite_updates}: give at least 1"
            )


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
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, **options)
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
