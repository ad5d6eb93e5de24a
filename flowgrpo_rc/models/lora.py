"""LoRA on the network (arXiv 2106.09685) through peft: adding it, reading it, switching it off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.models.base import DTYPES, ModelConfig, TrainableModel
from flowgrpo_rc.models.lora_files import ADAPTER, load_export


def add_lora(model: TrainableModel, config: ModelConfig, seed: int) -> Any:
    """Put a fresh LoRA (or that of `config.lora_path`) on the model's network; only its tensors
    train, in fp32 (fp64 on an fp64 network).

    The initial values follow from `seed` alone. Raises ValueError if a target module is not there.
    """
    network = model.network
    targets = list(config.target_modules or model.default_target_modules)
    names = [name for name, _ in network.named_modules()]
    missing = [
        target
        for target in targets
        if not any(n == target or n.endswith("." + target) for n in names)
    ]
    if missing:
        raise ValueError(
            f"model.target_modules: the network has no module that ends in {', '.join(missing)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        network.add_adapter(
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                init_lora_weights="gaussian" if config.lora_init == "gaussian" else True,
                target_modules=targets,
            ),
            adapter_name=ADAPTER,
        )
    precision = torch.promote_types(DTYPES[config.dtype], torch.float32)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(precision)
    if config.lora_path is not None:
        load_export(network, config)
    return network


def lora_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable tensors by name, in a fixed order."""
    return {name: p for name, p in sorted(network.named_parameters()) if p.requires_grad}


@contextmanager
def reference_policy(network: Any) -> Iterator[None]:
    """The base model for the duration: the adapter is off."""
    network.disable_adapters()
    try:
        yield
    finally:
        network.enable_adapters()


def other_tensors(held: Mapping[str, Tensor], pushed: Mapping[str, Tensor]) -> int:
    """Counts the LoRA tensors that are not those that were pushed, apart from rounding.

    Args:
      held: what an engine holds, by name, in its precision.
      pushed: what it was given, by name.
    """
    differ = [(tensor != pushed[name].to(tensor)).any() for name, tensor in held.items()]
    return int(torch.stack(differ).sum())
