"""An engine's own copy of the trainer's network, for engines that live in its process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from flowgrpo_rc.batch import Spec
from flowgrpo_rc.distributed.numerics import rounds_to_tf32
from flowgrpo_rc.models.base import DTYPES
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.models.quantization import precision
from flowgrpo_rc.rollout.engine import R, RolloutEngine
from flowgrpo_rc.rollout.options.merged_lora import MergedLora, RoundedLora
from flowgrpo_rc.rollout.options.option import RolloutOption, SamplingNetwork
from flowgrpo_rc.rollout.options.quantized import Quantized, plain_layers

S = TypeVar("S", bound=Spec)


class Replica(SamplingNetwork):
    """A copy of a LoRA-wrapped network in another precision, which follows the trainer's LoRA.

    * In the training weights' own precision the copy shares their frozen tensors.
    * The LoRA is always a copy. Where nothing else is converted it stays as it is.
    * The LoRA is marked as trainable, as the trainer's is. torch multiplies by such a weight in
      another way, with other bits, even where no gradient is recorded.
    * Buffers that a checkpoint does not hold keep their precision, as they do when a model is
      loaded in `dtype`. Rotary frequencies in bf16 would stand for other positions.
    """

    def __init__(
        self, network: nn.Module, dtype: str, options: Sequence[RolloutOption] = ()
    ) -> None:
        # deepcopy takes what it finds in its memo: tensors to share, or those that are converted
        # here, one by one, so that the first precision is never held twice.
        stored = _stored(network)
        frozen = [tensor for tensor in stored if not tensor.requires_grad]
        memo: dict[int, object] = {id(tensor): tensor for tensor in frozen}
        if any(tensor.dtype != DTYPES[dtype] for tensor in frozen):
            memo = {id(tensor): _converted(tensor, DTYPES[dtype]) for tensor in stored}
        # The codes of `model.quantization` are the same in each precision.
        memo |= {id(p): p for p in network.parameters() if not p.is_floating_point()}
        replica = copy.deepcopy(network, memo=memo).eval()
        lora = {name: p for name, p in replica.named_parameters() if p.requires_grad}
        super().__init__(replica, network, lora, DTYPES[dtype], precision(dtype, None))
        for option in options:
            option.wrap(self)

    def spec(self, requested: S) -> S:
        """Returns what was asked for, with the precision that the copy really has."""
        tf32 = rounds_to_tf32(self.precision)
        return dataclasses.replace(requested, dtype=self.precision, tf32=tf32)

    @torch.no_grad()
    def sync(self, state: Mapping[str, Tensor]) -> None:
        """Copies LoRA tensors, which have the names and shapes of the copy's."""
        for name, parameter in self.lora.items():
            parameter.copy_(state[name])
        for finish in self.after_sync:
            finish()


class ReplicaEngine(RolloutEngine[R]):
    """An engine that samples with a `Replica`, which its constructor sets."""

    options: ClassVar[Sequence[type[RolloutOption]]] = (Quantized, MergedLora, RoundedLora)
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


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.detach().to(dtype, copy=tensor.requires_grad)  # a LoRA of its own
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(converted, requires_grad=tensor.requires_grad)
    return converted


def _stored(network: nn.Module) -> list[Tensor]:
    """Returns a checkpoint's floating-point tensors, except what the class keeps in fp32."""
    stored = []
    for transformer in transformers(network).values():
        fp32_modules = set(transformer._keep_in_fp32_modules or ())
        tensors: dict[str, Tensor] = transformer.state_dict(keep_vars=True)
        stored += [
            tensor
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and not fp32_modules & set(name.split("."))
        ]
    return stored
