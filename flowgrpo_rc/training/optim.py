"""The optimizer of the LoRA and its learning-rate schedule."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn
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


def drowned_by_eps(optimizer: Optimizer) -> tuple[Tensor, Tensor]:
    """Counts the elements whose step AdamW's eps outweighs, where sqrt(v_hat) < eps.

    Returns:
      Their number, and that of all elements that have had a gradient; both stay on the device, and
      are 0 for moments of 8 bits, which would have to be unpacked.
    """
    counts = []
    if isinstance(optimizer, torch.optim.AdamW):
        group = optimizer.param_groups[0]
        for state in filter(None, optimizer.state.values()):  # empty before the first step
            # v_hat = v / (1 - beta^n) < eps^2, without a division of the whole moment.
            bound = group["eps"] ** 2 * (1 - group["betas"][1] ** state["step"])
            moment = state["exp_avg_sq"]
            reached = moment > 0
            counts.append(torch.stack([(reached & (moment < bound)).sum(), reached.sum()]))
    drowned, elements = torch.stack(counts or [torch.zeros(2)]).sum(0)
    return drowned, elements
