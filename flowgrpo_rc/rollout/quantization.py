"""Low-precision weights of a replica, through torchao (https://github.com/pytorch/ao).

Only the linear layers inside the repeated blocks are quantized, those under a LoRA included. The
LoRA itself, norms, embedders and the last projection keep the replica's precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PACKAGES = dict.fromkeys(("int8", "int4", "fp8", "int8_dynamic"), "torchao")
"""The values of `rollout.quantization` that a replica can follow, each with the package that it takes.

int8, fp8: one scale for each row of a weight (fp8 is e4m3). int4: one for 32 weights of a row. int8_dynamic: int8 and
the layer's inputs as well, one scale for each token. All but int8_dynamic multiply in the replica's precision.
"""
INT4_GROUP = 32


def precision(dtype: str, quantization: str | None) -> str:
    """How a sampler's precision is called in specs and tables: `bf16`, `bf16+int8`."""
    return dtype if quantization is None else f"{dtype}+{quantization}"


def check_device(dtype: str, quantization: str | None, device: torch.device) -> None:
    """ValueError for what `device` has no kernel for."""
    if quantization == "int4" and device.type == "cuda" and dtype != "bf16":
        raise ValueError(
            f"rollout.quantization=int4 on a GPU needs rollout.dtype=bf16, not {dtype}"
        )


def quantize(network: nn.Module, name: str) -> None:
    """Replace the weights of the blocks' linear layers. ValueError for a layer whose shape does not
    allow it.
    """
    from torchao.quantization import quantize_

    check_layers(network, name)
    for layer in _quantized_layers(network):
        quantize_(layer, _torchao_config(name, layer.weight.device))


def check_layers(network: nn.Module, name: str) -> None:
    """Raises ValueError for a layer whose shape the quantization does not allow."""
    for layer in _quantized_layers(network):
        if name == "int4" and layer.in_features % INT4_GROUP:
            raise ValueError(
                "rollout.quantization=int4 takes layers whose inputs are multiples of "
                f"{INT4_GROUP}; the model has one "
                f"of {layer.in_features}"
            )


def _quantized_layers(network: nn.Module) -> list[nn.Linear]:
    return [module for block in repeated_blocks(network) for module in linear_layers(block)]


def repeated_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists: a transformer's blocks, in order."""
    for child in network.children():
        yield from child if isinstance(child, nn.ModuleList) else repeated_blocks(child)


def linear_layers(block: nn.Module) -> Iterator[nn.Linear]:
    """Those under a LoRA included, its own not."""
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:
            yield module


def _torchao_config(name: str, device: torch.device) -> Any:
    from torchao import quantization as ao

    if name == "int8":
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if name == "fp8":
        return ao.Float8WeightOnlyConfig(set_inductor_config=False)
    if name == "int8_dynamic":
        return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if device.type == "cuda":
        return ao.Int4WeightOnlyConfig(
            group_size=INT4_GROUP,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
    # Without a packed kernel: four bits of information in a byte each.
    return ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(INT4_GROUP))  # type: ignore[attr-defined]
