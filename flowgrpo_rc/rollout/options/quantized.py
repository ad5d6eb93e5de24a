"""Low-precision weights: those of a replica, through torchao (https://github.com/pytorch/ao).

Only linear layers inside the repeated blocks are quantized, including those that a LoRA wraps. The
LoRA itself, norms, embedders and the last projection keep the replica's precision.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.quantization import check_layers, precision, quantized_layers
from flowgrpo_rc.rollout.options.compiled import Compiled
from flowgrpo_rc.rollout.options.option import Need, RolloutOption, SamplingNetwork

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig


logger = logging.getLogger(__name__)

# The values of `rollout.quantization`. int8 and fp8 (e4m3) have one scale for each row of a weight,
# int4 one for 32 weights of a row. int8_dynamic is int8 and quantizes the layer's inputs as well,
# with one scale for each token. All but int8_dynamic multiply in the replica's precision.
NAMES = ("int8", "int4", "fp8", "int8_dynamic")
INT4_GROUP = 32


@dataclass(frozen=True)
class Quantized(RolloutOption):
    """Rounds the frozen weights of the blocks to few bits, on top of a precision `dtype`."""

    name: str
    dtype: str

    needs = frozenset({Need.PLAIN_WEIGHTS})
    removes = frozenset({Need.PLAIN_WEIGHTS})
    packages = ("torchao",)
    shares_weights = False

    @property
    def setting(self) -> str:
        """Returns the setting that chose it."""
        return f"rollout.quantization={self.name}"

    def wrap(self, copy: SamplingNetwork) -> None:
        """Quantizes the blocks of the copy."""
        quantize(copy.network, self.name)
        copy.precision = precision(self.dtype, self.name)

    def check_network(self, network: nn.Module) -> None:
        """Raises ValueError for a layer whose shape does not allow it."""
        check_shapes(network, self.name)

    def check_device(self, device: torch.device, others: Sequence[RolloutOption]) -> None:
        """Refuses what cannot run on a device, or is of no use there; warns of what is slow."""
        if self.name == "int8_dynamic":
            check_int8_products(device)
        if device.type != "cuda":
            return
        if self.name == "int4":
            if self.dtype != "bf16":
                raise ValueError(
                    f"{self.setting} on a GPU needs rollout.dtype=bf16, not {self.dtype}"
                )
            logger.warning(
                "rollout.quantization=int4: its kernel on a GPU is made for few rows, so that "
                "rollouts may be slower than in bf16; it saves memory"
            )
        compiles = any(isinstance(option, Compiled) for option in others)
        if self.name == "int8_dynamic" and not compiles:
            # torchao.kernel.intmm looks at the text of each input.
            raise ValueError(
                f"{self.setting} on a GPU needs rollout.compile=true: without it torchao copies "
                "the input of every layer to the host and formats it as text"
            )


def check_int8_products(device: torch.device) -> None:
    """Raises ValueError if int8 products overflow in 16 bits, as CPUs without VNNI let them."""
    if device.type != "cpu":
        return
    # Every sum of two products is 2 * 127 * 127 or more, and so near to what 16 bits hold that
    # an offset of the inputs, which such kernels add, takes it beyond.
    left = torch.full((64, 256), 127, dtype=torch.int8)
    right = torch.full((256, 128), 127, dtype=torch.int8)
    if (torch._int_mm(left, right) != 256 * 127 * 127).any():
        raise ValueError(
            "rollout.quantization=int8_dynamic: this processor's integer kernels overflow; they "
            "need VNNI, which it lacks or ONEDNN_MAX_CPU_ISA forbids. Set "
            "rollout.quantization=int8, which multiplies in rollout.dtype, or null"
        )


def quantize(network: nn.Module, name: str) -> None:
    """Quantizes the blocks' linear layers in place. ValueError if their shapes do not allow it."""
    from torchao.quantization import quantize_

    check_shapes(network, name)
    if name == "int8_dynamic":  # a worker's machine may be another than the one that was checked
        check_int8_products(next(network.parameters()).device)
    for layer in quantized_layers(network):
        quantize_(layer, _torchao_config(name, layer.weight.device))


def check_shapes(network: nn.Module, name: str) -> None:
    """Raises ValueError for a layer whose shape the quantization does not allow."""
    check_layers(network, "rollout.quantization", name, INT4_GROUP if name == "int4" else None)


def plain_layers(network: nn.Module) -> int:
    """Counts the linear layers of the blocks whose weights are not quantized."""
    return sum(not is_quantized(layer.weight) for layer in quantized_layers(network))


def is_quantized(weight: Tensor) -> bool:
    """Says whether a weight is in 8 bits or fewer, packed in integers, or a tensor of torchao."""
    return (
        weight.element_size() == 1
        or not weight.is_floating_point()
        # They report the precision that they had before.
        or type(weight).__module__.startswith("torchao.")
    )


def count_quantized(network: nn.Module) -> tuple[int, int]:
    """Counts the layers of any class with quantized matrices, and those with any matrix."""
    matrices = [
        [weight for weight in module.parameters(recurse=False) if weight.ndim > 1]
        for module in network.modules()
    ]
    layers = [weights for weights in matrices if weights]
    return sum(any(map(is_quantized, weights)) for weights in layers), len(layers)


def _torchao_config(name: str, device: torch.device) -> AOBaseConfig:
    from torchao import quantization as ao

    kinds = {
        "int8": ao.Int8WeightOnlyConfig,
        "fp8": ao.Float8WeightOnlyConfig,
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig,
    }
    if name in kinds:
        return kinds[name](set_inductor_config=False)
    if device.type == "cuda":
        return ao.Int4WeightOnlyConfig(
            group_size=INT4_GROUP,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
    # On a CPU there is no packed kernel: each weight of four bits takes a byte.
    return ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        granularity=ao.PerGroup(INT4_GROUP),
    )
