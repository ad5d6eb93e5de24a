"""A LoRA that is added to the weights that sample, or rounded to their precision beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flowgrpo_rc.rollout.options.option import Need, RolloutOption, SamplingNetwork

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


@dataclass(frozen=True)
class MergedLora(RolloutOption):
    """Adds the LoRA to the weights, which saves its own layers at every forward.

    Sums in bf16 round a small update away, or up. A sum is always made of the trainer's weights, so
    that its rounding does not add up.
    """

    needs = frozenset({Need.WHOLE_WEIGHTS, Need.PLAIN_WEIGHTS})
    shares_weights = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return "rollout.merge_lora=true"

    def rounding_explains(self, training_dtype: str) -> bool:
        """Returns False where the sum rounds weights that were exact."""
        return training_dtype != "bf16"

    def wrap(self, copy: SamplingNetwork) -> None:
        """Adds the LoRA, and each one that arrives."""
        merge = partial(_merge, _own_weights(copy))
        merge()
        copy.after_sync.append(merge)


@dataclass(frozen=True)
class RoundedLora(RolloutOption):
    """Keeps the LoRA apart and in the weights' precision, where it would be fp32."""

    shares_weights = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return "rollout.merge_lora=rounded"

    def rounding_explains(self, training_dtype: str) -> bool:
        """Returns False where the LoRA beside exact weights is rounded."""
        return training_dtype != "bf16"

    def wrap(self, copy: SamplingNetwork) -> None:
        """Rounds the LoRA."""
        for parameter in copy.lora.values():
            parameter.data = parameter.data.to(copy.dtype)


def lora_layers(network: nn.Module) -> list[LoraLayer]:
    """Returns the layers of a network that have a LoRA."""
    from peft.tuners.lora import LoraLayer

    return [layer for layer in network.modules() if isinstance(layer, LoraLayer)]


def _own_weights(copy: SamplingNetwork) -> list[tuple[LoraLayer, Tensor]]:
    """Gives layers with a LoRA weights of their own; pairs them with the trainer's weights."""
    from flowgrpo_rc.models.lora_files import ADAPTER

    pairs = []
    for layer, trained in zip(lora_layers(copy.network), lora_layers(copy.trained), strict=True):
        base = layer.get_base_layer()
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        layer.merged_adapters = [ADAPTER]  # from now on peft's forward leaves the LoRA out
        pairs.append((layer, trained.get_base_layer().weight.detach()))
    return pairs


@torch.no_grad()
def _merge(pairs: list[tuple[LoraLayer, Tensor]]) -> None:
    from flowgrpo_rc.models.lora_files import ADAPTER

    for layer, original in pairs:
        # The update is rounded before it is added, as in peft's own merge.
        merged = original + layer.get_delta_weight(ADAPTER).to(original.dtype)
        layer.get_base_layer().weight.copy_(merged)
