"""An engine's own copy of the trainer's network, for engines that live in its process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import DTYPES
from flowgrpo_rc.rollout.quantization import precision, quantize, repeated_blocks


class Replica:
    """A copy of a LoRA-wrapped network in `dtype`, which follows the trainer's LoRA by `sync`.

    In the training weights' own precision the copy shares their frozen tensors. The LoRA is always
    a copy and stays
    separate: merged into bf16 weights, small updates would be rounded away. Buffers that a
    checkpoint does not hold keep their precision, as they do where a model is loaded in `dtype`:
    rotary frequencies in bf16 would be other positions.

    quantization: of the frozen weights (`quantization.PACKAGES`). backend: compile the repeated
        blocks with this
    backend of torch.compile. precision: the name of what came of it; lora: its LoRA, by name.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        dtype: str,
        quantization: str | None = None,
        backend: Any = None,
    ) -> None:
        frozen = [tensor for tensor in _stored(network) if not tensor.requires_grad]
        if all(tensor.dtype == DTYPES[dtype] for tensor in frozen):
            replica = copy.deepcopy(network, memo={id(tensor): tensor for tensor in frozen})
        else:
            replica = copy.deepcopy(network)
            for tensor in _stored(replica):
                tensor.data = tensor.data.to(DTYPES[dtype])
        self.lora = {name: p for name, p in replica.named_parameters() if p.requires_grad}
        self.network: Any = replica.requires_grad_(False).eval()
        self.precision = precision(dtype, quantization)
        if quantization is not None:
            quantize(replica, quantization)
        if backend is not None:
            for block in repeated_blocks(replica):
                block.compile(backend=backend)
        self.version = 0

    def sync(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take over LoRA tensors. ValueError unless names and shapes are those of the copy."""
        if state.keys() != self.lora.keys():
            different = sorted(state.keys() ^ self.lora.keys())[:3]
            raise ValueError(
                f"the engine's LoRA has other tensors than the trainer's, among them {different}"
            )
        for name, parameter in self.lora.items():
            if state[name].shape != parameter.shape:
                raise ValueError(
                    f"the engine's {name} is {tuple(parameter.shape)}, the trainer's "
                    f"{tuple(state[name].shape)}"
                )
        for name, parameter in self.lora.items():
            parameter.copy_(state[name])
        self.version = version


def _stored(module: Any) -> list[Tensor]:
    """Parameters and floating-point buffers that a checkpoint holds, without those that the class
    keeps in fp32.
    """
    kept = set(module._keep_in_fp32_modules or ())
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return [
        t
        for name, t in tensors.items()
        if t.is_floating_point() and not kept & set(name.split("."))
    ]
