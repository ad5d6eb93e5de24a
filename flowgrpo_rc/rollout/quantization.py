"""Low-precision weights: those of a replica, through torchao (https://github.com/pytorch/ao).

Only linear layers inside the repeated blocks are quantized, including those that a LoRA wraps. The
LoRA itself, norms, embedders and the last projection keep the replica's precision.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.quantization import check_layers, quantized_layers

logger = logging.getLogger(__name__)

# The values of `rollout.quantization` that a replica offers, each with the package that it needs.
# int8 and fp8 (e4m3) have one scale for each row of a weight, int4 one for 32 weights of a row.
# int8_dynamic is int8 and quantizes the layer's inputs as well, with one scale for each token. All
# but int8_dynamic multiply in the replica's precision.
PACKAGES = dict.fromkeys(("int8", "int4", "fp8", "int8_dynamic"), "torchao")
INT4_GROUP = 32


def check_device(
    dtype: str, quantization: str | None, device: torch.device, compiles: bool
) -> None:
    """Refuses a quantization that cannot run on a device or is of no use; warns of a slow one."""
    if quantization == "int8_dynamic":
        check_int8_products(device)
    on_gpu = device.type == "cuda"
    if quantization == "int4" and on_gpu:
        if dtype != "bf16":
            raise ValueError(
                f"rollout.quantization=int4 on a GPU needs rollout.dtype=bf16, not {dtype}"
            )
        logger.warning(
            "rollout.quantization=int4: its kernel on a GPU is made for few rows, so that rollouts "
            "may be slower than in bf16; it saves memory"
        )
    if quantization == "int8_dynamic" and on_gpu and not compiles:
        # torchao.kernel.intmm looks at the text of each input.
        raise ValueError(
            "rollout.quantization=int8_dynamic on a GPU needs rollout.compile=true: without it "
            "torchao copies the input of every layer to the host and formats it as text"
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


def _torchao_config(name: str, device: torch.device) -> Any:
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
