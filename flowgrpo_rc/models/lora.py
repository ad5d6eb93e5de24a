"""LoRA on a network through peft: adding one, reading its tensors, switching it off.

A LoRA adds a low-rank update to frozen linear layers: W x + (alpha / rank) B A x, where only A and
B are trained. See https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.models.base import DTYPES, TrainableModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora_files import ADAPTER, load_export
from flowgrpo_rc.models.networks import transformers

# GPT-2 has Conv1D in place of a linear layer.
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)


def add_lora(model: TrainableModel, config: ModelConfig, seed: int) -> Any:
    """Puts a LoRA on each transformer of the model, from the run's seed alone; returns the network.

    From then on only its tensors train. They are fp32, or fp64 on an fp64 network. ValueError if
    modules or the file of `lora_path` do not fit.
    """
    network = model.network
    targets = list(config.target_modules or model.default_target_modules)
    parts = transformers(network).values()
    for target in targets:
        _check_target(network, target)
    _check_rank(network, targets, config.lora_rank)
    # peft draws from the global generator, whose state has to be the same after this block.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        for part in parts:
            part.add_adapter(
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


def _check_rank(network: nn.Module, targets: Sequence[str], rank: int) -> None:
    """Raises ValueError for a rank above that of the weights of every layer with a LoRA."""
    ranks = {
        name: min(module.weight.flatten(1).shape)
        for name, module in network.named_modules()
        if isinstance(module, _LINEAR) and f".{name}".endswith(tuple(f".{t}" for t in targets))
    }
    largest = max(ranks, key=lambda name: ranks[name])
    if rank > ranks[largest]:
        raise ValueError(
            f"model.lora_rank={rank}: no layer with a LoRA has a larger rank than {largest}, "
            f"{ranks[largest]}: give at most that"
        )


def _check_target(network: nn.Module, target: str) -> None:
    """Raises ValueError unless a target names linear layers alone; it names the nearest ones."""
    modules = dict(network.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, _LINEAR)]
    named = [name for name in modules if f".{name}".endswith(f".{target}")]
    others = {type(modules[name]).__name__ for name in named if name not in linear}
    if named and not others:
        return
    what = f"{target} is a {', '.join(sorted(others))}, and a LoRA goes on linear layers"
    if not named:
        what = f"the network has no module that ends in {target}"
    inside = {
        target + name.removeprefix(owner)
        for owner in named
        for name in linear
        if name.startswith(f"{owner}.")
    }
    endings = {".".join(name.split(".")[-length:]) for name in linear for length in (1, 2)}
    words = [ending for ending in sorted(endings) if not ending[0].isdigit()]
    near = sorted(inside) or get_close_matches(target, words, n=4, cutoff=0.4) or words[:4]
    raise ValueError(f"model.target_modules: {what}; near to it are {', '.join(near)}")


def lora_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trainable tensors of a network by name, in the same order on all processes."""
    return {name: p for name, p in sorted(network.named_parameters()) if p.requires_grad}


@contextmanager
def reference_policy(network: Any) -> Iterator[None]:
    """Switches the LoRA off inside the context, so that the network is the base model."""
    parts = transformers(network).values()
    for part in parts:
        part.disable_adapters()
    try:
        yield
    finally:
        for part in parts:
            part.enable_adapters()


@contextmanager
def other_weights(
    parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Gives a LoRA other values inside the context; its graph must not outlive that."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = tensors[name]
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
