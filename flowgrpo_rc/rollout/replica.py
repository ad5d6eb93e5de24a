"""An engine's own copy of the trainer's network, for engines that live in its process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from flowgrpo_rc.batch import Spec
from flowgrpo_rc.distributed.numerics import rounds_to_tf32
from flowgrpo_rc.models.base import DTYPES
from flowgrpo_rc.models.lora_files import ADAPTER
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.models.quantization import precision
from flowgrpo_rc.rollout.compiling import compile_blocks
from flowgrpo_rc.rollout.config import ROUNDED
from flowgrpo_rc.rollout.engine import R, RolloutEngine
from flowgrpo_rc.rollout.quantization import PACKAGES, plain_layers, quantize

S = TypeVar("S", bound=Spec)


class Replica:
    """A copy of a LoRA-wrapped network in another precision, which follows the trainer's LoRA.

    * In the training weights' own precision the copy shares their frozen tensors.
    * The LoRA is always a copy. It stays separate unless `merge_lora` adds it to the weights, which
      saves its own layers at every forward. Sums in bf16 then round a small update away, or up. A
      sum is always made of the trainer's weights, so that its rounding does not add up.
    * Where nothing else is converted the LoRA stays as it is, unless `merge_lora` is `rounded`.
    * The LoRA is marked as trainable, as the trainer's is. torch multiplies by such a weight in
      another way, with other bits, even where no gradient is recorded.
    * Buffers that a checkpoint does not hold keep their precision, as they do when a model is
      loaded in `dtype`. Rotary frequencies in bf16 would stand for other positions.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        dtype: str,
        quantization: str | None = None,
        backend: Any = None,
        merge_lora: bool | str = False,
    ) -> None:
        # deepcopy takes what it finds in its memo: tensors to share, or those that are converted
        # here, one by one, so that the first precision is never held twice.
        stored = _stored(network)
        frozen = [tensor for tensor in stored if not tensor.requires_grad]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in frozen}
        if any(tensor.dtype != DTYPES[dtype] for tensor in frozen):
            memo = {id(tensor): _converted(tensor, DTYPES[dtype]) for tensor in stored}
        # The codes of `model.quantization` are the same in each precision.
        memo |= {id(p): p for p in network.parameters() if not p.is_floating_point()}
        replica = copy.deepcopy(network, memo=memo)
        self.lora = {name: p for name, p in replica.named_parameters() if p.requires_grad}
        if merge_lora == ROUNDED:
            for parameter in self.lora.values():
                parameter.data = parameter.data.to(DTYPES[dtype])
        self.network: Any = replica.eval()
        self.precision = precision(dtype, quantization)
        self._merged = _prepare_merging(network, replica) if merge_lora is True else []
        self._merge()
        if quantization is not None:
            quantize(replica, quantization)
        if backend is not None:
            compile_blocks(replica, backend)

    def spec(self, requested: S) -> S:
        """Returns what was asked for, with the precision that the copy really has."""
        tf32 = rounds_to_tf32(self.precision)
        return dataclasses.replace(requested, dtype=self.precision, tf32=tf32)

    @torch.no_grad()
    def sync(self, state: Mapping[str, Tensor]) -> None:
        """Copies LoRA tensors, which have the names and shapes of the copy's."""
        for name, parameter in self.lora.items():
            parameter.copy_(state[name])
        self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        for layer, original in self._merged:
            # The update is rounded before it is added, as in peft's own merge.
            merged = original + layer.get_delta_weight(ADAPTER).to(original.dtype)
            layer.get_base_layer().weight.copy_(merged)


class ReplicaEngine(RolloutEngine[R]):
    """An engine that samples with a `Replica`, which its constructor sets."""

    quantizations = PACKAGES
    merges_lora = True
    _replica: Replica

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copies the trainer's LoRA."""
        self._replica.sync(state)

    def lora_shapes(self) -> dict[str, torch.Size]:
        """Returns the shapes of the copy's LoRA."""
        return {name: tensor.shape for name, tensor in self._replica.lora.items()}

    def held_weights(self) -> Mapping[str, Tensor]:
        """Returns the LoRA of the copy."""
        return self._replica.lora

    def plain_layers(self) -> int:
        """Returns how many linear layers of the copy's blocks hold plain weights."""
        return plain_layers(self._replica.network)

    def close(self) -> None:
        """Frees the copy."""
        self.__dict__.clear()


def _prepare_merging(
    network: torch.nn.Module, replica: torch.nn.Module
) -> list[tuple[Any, Tensor]]:
    """Gives layers with a LoRA weights of their own; pairs them with the trainer's weights."""
    pairs = []
    for layer, trained in zip(lora_layers(replica), lora_layers(network), strict=True):
        base = layer.get_base_layer()
        base.weight = torch.nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        layer.merged_adapters = [ADAPTER]  # from now on peft's forward leaves the LoRA out
        pairs.append((layer, trained.get_base_layer().weight.detach()))
    return pairs


def lora_layers(network: torch.nn.Module) -> list[Any]:
    """Returns the layers of a network that have a LoRA."""
    return [layer for layer in network.modules() if isinstance(layer, LoraLayer)]


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.detach().to(dtype, copy=tensor.requires_grad)  # a LoRA of its own
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(converted, requires_grad=tensor.requires_grad)
    return converted


def _stored(module: Any) -> list[Tensor]:
    """Returns a checkpoint's floating-point tensors, except what the class keeps in fp32."""
    stored = []
    for transformer in transformers(module).values():
        fp32_modules = set(transformer._keep_in_fp32_modules or ())
        tensors: dict[str, Tensor] = transformer.state_dict(keep_vars=True)
        stored += [
            tensor
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and not fp32_modules & set(name.split("."))
        ]
    return stored
