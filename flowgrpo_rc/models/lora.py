"""LoRA on a network through peft: adding one, reading its tensors, switching it off.

A LoRA adds a low-rank update to frozen linear layers: W x + (alpha / rank) B A x, where only A and
B are trained. See https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

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


def add_lora(model: TrainableModel, config: ModelConfig, seed: int) -> nn.Module:
    """Puts a LoRA on each transformer of the model, from the run's seed alone; returns the network.

    From then on only its tensors train. They are fp32, or fp64 on an fp64 network. ValueError if
    modules or the file of `lora_path` do not fit.
    """
    network = model.network
    targets = list(config.target_modules or model.default_target_modules)
    for fault in _faults(network, targets, config.lora_rank):
        raise ValueError(f"model.{fault}")
    # peft draws from the global generator, whose state has to be the same after this block.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        for transformer in transformers(network).values():
            transformer.add_adapter(
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


def _faults(network: nn.Module, targets: Sequence[str], rank: int) -> Iterator[str]:
    """Yields each target that names something else than linear layers, with the nearest layers
    that exist, and a rank above that of every layer with a LoRA.
    """
    modules = dict(network.named_modules())
    linear = {name: module for name, module in modules.items() if isinstance(module, _LINEAR)}
    for target in targets:
        named = [name for name in modules if f".{name}".endswith(f".{target}")]
        kinds = {type(modules[name]).__name__ for name in named if name not in linear}
        if named and not kinds:
            continue
        inside = {
            target + name.removeprefix(owner)
            for owner in named
            for name in linear
            if name.startswith(f"{owner}.")
        }
        endings = {".".join(name.split(".")[-length:]) for name in linear for length in (1, 2)}
        words = [ending for ending in sorted(endings) if not ending[0].isdigit()]
        near = sorted(inside) or get_close_matches(target, words, n=4, cutoff=0.4) or words[:4]
        what = f"the network has no module that ends in {target}"
        if named:
            what = f"{target} is a {', '.join(sorted(kinds))}, and a LoRA goes on linear layers"
        yield f"target_modules: {what}; near to it are {', '.join(near)}"
    ranks = {
        name: min(module.weight.flatten(1).shape)
        for name, module in linear.items()
        if f".{name}".endswith(tuple(f".{target}" for target in targets))
    }
    largest = max(ranks, key=lambda name: ranks[name])
    if rank > ranks[largest]:
        yield (
            f"lora_rank={rank}: no layer with a LoRA has a larger rank than {largest}, "
            f"{ranks[largest]}: give at most that"
        )


def lora_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trainable tensors of a network by name, in the same order on all processes."""
    return {name: p for name, p in sorted(network.named_parameters()) if p.requires_grad}


@contextmanager
def reference_policy(network: nn.Module) -> Iterator[None]:
    """Switches the LoRA off inside the context, so that the network is the base model."""
    for transformer in transformers(network).values():
        transformer.disable_adapters()
    try:
        yield
    finally:
        for transformer in transformers(network).values():
            transformer.enable_adapters()


@contextmanager
def other_weights(
    parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Gives a LoRA other values inside the context; its graph must not outlive that."""
    values = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = tensors[name]
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = values[name]
